// The body of a translation unit of one instruction set: instantiates every kernel and fills the two tables.
#pragma once

#include "dispatch.h"
#include "shift.h"
#include "tiles.h"
#include "unfold.h"

namespace sparsight::SPS_ISA {

template <class T>
constexpr Ops<T> make_ops() {
  return {Vec<T>::W, load_tile<T>, store_tile<T>, unfold<T>, fold<T>, gather<T>, backward<T>,
          shift<T>, gather_plane<T>, backward_plane<T>};
}

extern const Ops<float> float_ops;
extern const Ops<double> double_ops;
const Ops<float> float_ops = make_ops<float>();
const Ops<double> double_ops = make_ops<double>();

}  // namespace sparsight::SPS_ISA
