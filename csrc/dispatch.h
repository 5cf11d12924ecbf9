// From run-time numbers (vectors in the tile, rows in a block, what is wanted) to the kernel compiled for them.
#pragma once

#include "blocks.h"
#include "sparse.h"

namespace sparsight::SPS_ISA {

template <class T, int N, bool First>
void gather_n(const Cell& cell, const T* values, const T* in, T* out) {
  switch (cell.block) {
    case 4: return gather_block_cell<T, N, First, 4>(cell, values, in, out);
    case 8: return gather_block_cell<T, N, First, 8>(cell, values, in, out);
    default: return gather_cell<T, N, First>(cell, TileRows<T, N>{cell.inner}, values, in, out);
  }
}

template <class T>
void gather(const Cell& cell, const T* values, const T* in, T* out, int vectors, bool first) {
#define SPS_CASE(N) \
  case N: return first ? gather_n<T, N, true>(cell, values, in, out) : gather_n<T, N, false>(cell, values, in, out);
  switch (vectors) { SPS_CASE(1) SPS_CASE(2) SPS_CASE(3) SPS_CASE(4) }
#undef SPS_CASE
}

template <class T, int N, bool First, bool In, bool Values>
void backward_b(const Cell& cell, const T* values, const T* dout, const T* in, T* din, T* dvalues, bool accumulate) {
  switch (cell.block) {
    case 4: return backward_block_cell<T, N, First, In, Values, 4>(cell, values, dout, in, din, dvalues, accumulate);
    case 8: return backward_block_cell<T, N, First, In, Values, 8>(cell, values, dout, in, din, dvalues, accumulate);
    default:
      return backward_cell<T, N, First, In, Values>(cell, TileRows<T, N>{cell.inner}, values, dout, in, din, dvalues,
                                                    accumulate);
  }
}

template <class T, int N, bool First>
void backward_n(const Cell& cell, const T* values, const T* dout, const T* in, T* din, T* dvalues, bool accumulate) {
  if (din && dvalues)
    backward_b<T, N, First, true, true>(cell, values, dout, in, din, dvalues, accumulate);
  else if (din)
    backward_b<T, N, First, true, false>(cell, values, dout, in, din, dvalues, accumulate);
  else if (dvalues)
    backward_b<T, N, First, false, true>(cell, values, dout, in, din, dvalues, accumulate);
}

template <class T>
void backward(const Cell& cell, const T* values, const T* dout, const T* in, T* din, T* dvalues, int vectors,
              bool first_panel, bool first_tile) {
  const bool more = !first_tile;
#define SPS_CASE(N)                                                                         \
  case N:                                                                                   \
    return first_panel ? backward_n<T, N, true>(cell, values, dout, in, din, dvalues, more) \
                       : backward_n<T, N, false>(cell, values, dout, in, din, dvalues, more);
  switch (vectors) { SPS_CASE(1) SPS_CASE(2) SPS_CASE(3) SPS_CASE(4) }
#undef SPS_CASE
}

// The same kernels over the rows of a plane.

template <class T>
void gather_plane(const Cell& cell, const Plane<T>& plane, const T* values, const T* in, T* out, int vectors,
                  bool first) {
  const PlaneRows<T> rows{plane.offset, plane.apart, plane.bias};
#define SPS_CASE(N)                                                                  \
  case N:                                                                            \
    return first ? gather_cell<T, N, true>(cell, rows, values, in, out)              \
                 : gather_cell<T, N, false>(cell, rows, values, in, out);
  switch (vectors) { SPS_CASE(1) SPS_CASE(2) SPS_CASE(3) SPS_CASE(4) }
#undef SPS_CASE
}

template <class T, int N, bool First>
void backward_plane_n(const Cell& cell, const PlaneRows<T>& rows, const T* values, const T* dout, const T* in, T* din,
                      T* dvalues, bool accumulate) {
  if (din && dvalues)
    backward_cell<T, N, First, true, true>(cell, rows, values, dout, in, din, dvalues, accumulate);
  else if (din)
    backward_cell<T, N, First, true, false>(cell, rows, values, dout, in, din, dvalues, accumulate);
  else if (dvalues)
    backward_cell<T, N, First, false, true>(cell, rows, values, dout, in, din, dvalues, accumulate);
}

template <class T>
void backward_plane(const Cell& cell, const Plane<T>& plane, const T* values, const T* dout, const T* in, T* din,
                    T* dvalues, int vectors, bool first_panel, bool first_tile) {
  const PlaneRows<T> rows{plane.offset, plane.apart, nullptr};
  const bool more = !first_tile;
#define SPS_CASE(N)                                                                                     \
  case N:                                                                                               \
    return first_panel ? backward_plane_n<T, N, true>(cell, rows, values, dout, in, din, dvalues, more) \
                       : backward_plane_n<T, N, false>(cell, rows, values, dout, in, din, dvalues, more);
  switch (vectors) { SPS_CASE(1) SPS_CASE(2) SPS_CASE(3) SPS_CASE(4) }
#undef SPS_CASE
}

}  // namespace sparsight::SPS_ISA
