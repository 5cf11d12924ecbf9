// The kernels for row blocks: 4 or 8 neighbouring outputs share their inputs, so an activation once loaded feeds
// several multiply-adds, and the arithmetic is the limit in both directions.
#pragma once

#include "ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// Forward. Rows in flight are as many as the registers hold: Rows * N accumulators, N activations, one weight.
template <class T, int N, bool First, int Block>
void gather_block_cell(const Cell& cell, const T* values, const T* in, T* out) {
  using V = Vec<T>;
  using R = typename V::R;
  constexpr i64 stride = N * V::W;
  constexpr int Rows = V::kRegisters >= 32 ? 4 : 2;
  const i32* outer = cell.outer;
  const i32* start = cell.start;
  const u16* inner = cell.inner;
  for (const Run* run = cell.run; run != cell.run_end; ++run) {
    const int length = run->length;
    for (int s = 0; s < run->count; ++s) {
      for (int part = 0; part < Block; part += Rows) {
        T* o = out + (outer[s] * i64(Block) + part) * stride;
        const T* v = values + start[s] * i64(Block) + part;
        R acc[Rows][N];
        for (int i = 0; i < Rows; ++i)
          for (int j = 0; j < N; ++j) acc[i][j] = First ? V::zero() : V::load(o + i * stride + j * V::W);
        for (int k = 0; k < length; ++k, v += Block) {
          const T* x = in + inner[k] * stride;
          SPS_KEEP_POINTER(x);
          R a[N];
          for (int j = 0; j < N; ++j) {
            a[j] = V::load(x + j * V::W);
            SPS_KEEP_VECTOR(a[j]);
          }
          for (int i = 0; i < Rows; ++i) {
            const R w = V::set1(v[i]);
            for (int j = 0; j < N; ++j) acc[i][j] = V::fma(w, a[j], acc[i][j]);
          }
        }
        for (int i = 0; i < Rows; ++i)
          for (int j = 0; j < N; ++j) V::store(o + i * stride + j * V::W, acc[i][j]);
      }
      inner += length;
    }
    outer += run->count;
    start += run->count;
  }
}

// Backward: as for single weights, but always four at a time, on rows that follow one another. Here too the sums
// over lanes are one turn behind (sparse.h says why).
template <class T, int N, bool First, bool In, bool Values, int Block>
void backward_block_cell(const Cell& cell, const T* values, const T* dout, const T* in, T* din, T* dvalues,
                         bool accumulate) {
  using V = Vec<T>;
  using R = typename V::R;
  constexpr i64 stride = N * V::W;
  constexpr int Fours = Block / 4;
  const i32* outer = cell.outer;
  const u16* inner = cell.inner;
  for (const Run* run = cell.run; run != cell.run_end; ++run) {
    const int length = run->length;
    for (int s = 0; s < run->count; ++s) {
      R x[N], g[N];
      T* d = In ? din + outer[s] * stride : nullptr;
      for (int j = 0; j < N; ++j) {
        if (Values) x[j] = V::load(in + outer[s] * stride + j * V::W);
        if (In) g[j] = First ? V::zero() : V::load(d + j * V::W);
      }
      auto four = [&](int n, R* dot) __attribute__((always_inline)) {
        const T* y = dout + (inner[n / Fours] * i64(Block) + n % Fours * 4) * stride;
        SPS_KEEP_POINTER(y);
        for (int i = 0; i < 4; ++i) {
          const R w = V::set1(In ? values[4 * n + i] : T(0));
          for (int j = 0; j < N; ++j) {
            R t = V::load(y + i * stride + j * V::W);
            if (In && Values) SPS_KEEP_VECTOR(t);
            if (In) g[j] = V::fma(w, t, g[j]);
            if (Values) dot[i] = j ? V::fma(t, x[j], dot[i]) : V::mul(t, x[j]);
          }
        }
      };
      const int fours = length * Fours;
      int n = 0;
      if constexpr (Values && V::kDots16) {
        for (; n + 4 <= fours; n += 4) {
          R a[4], b[4], c[4], e[4];
          four(n, a);
          four(n + 1, b);
          const R p = V::partial4(a[0], a[1], a[2], a[3]);
          four(n + 2, c);
          const R q = V::partial4(b[0], b[1], b[2], b[3]);
          four(n + 3, e);
          const R r = V::partial4(c[0], c[1], c[2], c[3]);
          V::dots16(dvalues + 4 * n, p, q, r, V::partial4(e[0], e[1], e[2], e[3]), accumulate);
        }
      }
      if (n < fours) {
        R dot[4], next[4];
        four(n, dot);
        for (++n; n < fours; ++n) {
          four(n, next);
          if (Values) V::dots4(dvalues + 4 * (n - 1), dot[0], dot[1], dot[2], dot[3], accumulate);
          for (int i = 0; i < 4; ++i) dot[i] = next[i];
        }
        if (Values) V::dots4(dvalues + 4 * (fours - 1), dot[0], dot[1], dot[2], dot[3], accumulate);
      }
      values += 4 * fours;
      if (Values) dvalues += 4 * fours;
      if (In)
        for (int j = 0; j < N; ++j) V::store(d + j * V::W, g[j]);
      inner += length;
    }
    outer += run->count;
  }
}

}  // namespace sparsight::SPS_ISA
