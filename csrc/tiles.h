// Between row-major activations and transposed tiles.
#pragma once

#include "ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

template <class T>
void load_tile(const T* x, i64 ld, int nb, i64 cols, T* xt, T* sums) {
  using V = Vec<T>;
  using R = typename V::R;
  constexpr int W = V::W;
  const i64 stride = (nb + W - 1) / W * W;
  const i64 whole = cols / W * W;
  for (int b = 0; b < stride; b += W) {
    const int rows = nb - b < W ? nb - b : W;
    i64 c = 0;
    if (rows == W) {
      // Along the rows, W of them at a time: about as many streams as the hardware prefetcher follows.
      const T* from = x + b * ld;
      T* to = xt + b;
      for (; c < whole; c += W, from += W) {
        V::load_transposed(from, ld, [&](int, R column) __attribute__((always_inline)) {
          V::store(to, column);
          to += stride;
        });
        if (sums) {
          // Two sums, because one addition has to wait for the one before.
          R even = V::load(sums + c), odd = V::zero();
          for (int i = 0; i < W; i += 2) {
            even = V::add(even, V::load(from + i * ld));
            odd = V::add(odd, V::load(from + (i + 1) * ld));
          }
          V::store(sums + c, V::add(even, odd));
        }
      }
    }
    for (; c < cols; ++c)
      for (int i = 0; i < W; ++i) {
        const T v = i < rows ? x[(b + i) * ld + c] : T(0);
        xt[c * stride + b + i] = v;
        if (sums) sums[c] += v;
      }
  }
}

constexpr i64 kAhead = 64;

template <class T>
void store_tile(const T* yt, int nb, i64 rows, const T* bias, T* y, i64 ld) {
  using V = Vec<T>;
  using R = typename V::R;
  constexpr int W = V::W;
  const i64 stride = (nb + W - 1) / W * W;
  const i64 whole = rows / W * W;
  for (int b = 0; b < stride; b += W) {
    const int batch = nb - b < W ? nb - b : W;
    for (i64 r = 0; r < whole; r += W) {
      const R shift = bias ? V::load(bias + r) : V::zero();
      T* to = y + b * ld + r;
      // The lines of y after the next few: a store to memory that is in no cache has to read it first.
      for (int i = 0; i < W; ++i) prefetch(to + i * ld + kAhead);
      V::load_transposed(yt + r * stride + b, stride, [&](int i, R row) __attribute__((always_inline)) {
        if (i < batch) V::store(to, V::add(row, shift));
        to += ld;
      });
    }
    for (i64 r = whole; r < rows; ++r)
      for (int i = 0; i < batch; ++i) y[(b + i) * ld + r] = yt[r * stride + b + i] + (bias ? bias[r] : T(0));
  }
}

}  // namespace sparsight::SPS_ISA
