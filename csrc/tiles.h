// Between row-major activations and transposed tiles.
#pragma once

#include "ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// Adds the sum of up to W rows to sums.
template <class T>
SPS_INLINE void add_rows(const T* from, i64 ld, int rows, T* sums) {
  using V = Vec<T>;
  using R = typename V::R;
  // Two sums, because one addition has to wait for the one before.
  R even = V::load(sums), odd = V::zero();
  int i = 0;
  for (; i + 2 <= rows; i += 2) {
    even = V::add(even, V::load(from + i * ld));
    odd = V::add(odd, V::load(from + (i + 1) * ld));
  }
  if (i < rows) even = V::add(even, V::load(from + i * ld));
  V::store(sums, V::add(even, odd));
}

template <class T>
void load_tile(const T* x, i64 ld, int nb, i64 cols, T* xt, T* sums) {
  using V = Vec<T>;
  using R = typename V::R;
  constexpr int W = V::W;
  const i64 stride = (nb + W - 1) / W * W;
  const i64 whole = cols / W * W;
  for (int b = 0; b < stride; b += W) {
    const int rows = nb - b < W ? nb - b : W;
    const T* first = x + b * ld;
    auto square = [&](i64 c) __attribute__((always_inline)) {
      T few[W * W];
      const T* from = first + c;
      i64 apart = ld;
      if (rows < W) {  // zeros in the place of the rows that are not there
        for (int i = 0; i < W; ++i) V::store(few + i * W, i < rows ? V::load(from + i * ld) : V::zero());
        from = few, apart = W;
      }
      T* to = xt + c * stride + b;
      V::load_transposed(from, apart, [&](int, R column) __attribute__((always_inline)) {
        V::store(to, column);
        to += stride;
      });
    };
    // Along the rows, W of them at a time: about as many streams as the hardware prefetcher follows.
    for (i64 c = 0; c < whole; c += W) {
      square(c);
      if (sums) add_rows(first + c, ld, rows, sums + c);
    }
    // The rest of the columns: with some of those before once more, or one by one where there are too few.
    if (whole < cols && whole > 0) square(cols - W);
    for (i64 c = whole; c < cols; ++c)
      for (int i = 0; i < W; ++i) {
        const T v = i < rows ? first[i * ld + c] : T(0);
        if (whole == 0) xt[c * stride + b + i] = v;
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
    // The last W rows once more where some are left over.
    for (i64 n = 0; n < rows && whole > 0; n += W) {
      const i64 r = n < whole ? n : rows - W;
      const R shift = bias ? V::load(bias + r) : V::zero();
      T* to = y + b * ld + r;
      // The lines of y after the next few: a store to memory that is in no cache has to read it first.
      for (int i = 0; i < W; ++i) prefetch(to + i * ld + kAhead);
      V::load_transposed(yt + r * stride + b, stride, [&](int i, R row) __attribute__((always_inline)) {
        if (i < batch) V::store(to, V::add(row, shift));
        to += ld;
      });
    }
    for (i64 r = 0; r < rows && whole == 0; ++r)
      for (int i = 0; i < batch; ++i) y[(b + i) * ld + r] = yt[r * stride + b + i] + (bias ? bias[r] : T(0));
  }
}

}  // namespace sparsight::SPS_ISA
