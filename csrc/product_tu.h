// The body of a translation unit of one instruction set, for the products of a mixture of experts.
#pragma once

#include "gating.h"
#include "product.h"

namespace sparsight::SPS_ISA {

template <class T>
constexpr ProductOps<T> make_product_ops() {
  return {kTileRows<T>, kTileCols<T>,       Vec<T>::W, times_rows<T>,   tile<T>,   pack<T>,
          pack_rows<T>, pack_transposed<T>, glu<T>,    glu_backward<T>, spread<T>, gather_sum<T>};
}

extern const ProductOps<float> float_products;
extern const ProductOps<double> double_products;
const ProductOps<float> float_products = make_product_ops<float>();
const ProductOps<double> double_products = make_product_ops<double>();

}  // namespace sparsight::SPS_ISA
