// The two kernels of unstructured sparsity, each over one cell of a plan and one tile of the batch.
#pragma once

#include "ops.h"
#include "rows.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// Forward. A weight costs N loads of activations, one broadcast and one index for N fused multiply-adds, so the
// load ports are the limit; that is why the tile is four vectors wide and the panel fits the first-level cache.
template <class T, int N, bool First, class Rows>
void gather_cell(const Cell& cell, Rows rows, const T* values, const T* in, T* out) {
  using V = Vec<T>;
  using R = typename V::R;
  const i32* outer = cell.outer;
  const i32* start = cell.start;
  for (const Run* run = cell.run; run != cell.run_end; ++run) {
    const int length = run->length;
    for (int s = 0; s < run->count; ++s) {
      T* o = rows.outer(out, outer[s]);
      const T* v = values + start[s];
      // Segments are ordered by length, so the next ones are far away: ask for them now.
      prefetch(values + start[s + 4]);
      for (int j = 0; j < N; ++j) prefetch(rows.outer(out, outer[s + 4]) + j * V::W);
      R acc[N];
      for (int j = 0; j < N; ++j) acc[j] = First ? rows.first(outer[s]) : V::load(o + j * V::W);
      auto weight = [&](const T* x, R w) __attribute__((always_inline)) {
        SPS_KEEP_POINTER(x);
        for (int j = 0; j < N; ++j) acc[j] = V::fma(w, V::load(x + j * V::W), acc[j]);
      };
      int k = 0;
      for (; k + 4 <= length; k += 4) {
        const typename V::Four four = V::load4(v + k);
        const auto at = rows.four(k);
        weight(rows.template of<0>(in, at), V::template lane<0>(four));
        weight(rows.template of<1>(in, at), V::template lane<1>(four));
        weight(rows.template of<2>(in, at), V::template lane<2>(four));
        weight(rows.template of<3>(in, at), V::template lane<3>(four));
      }
      for (; k < length; ++k) weight(rows.inner(in, k), V::set1(v[k]));
      for (int j = 0; j < N; ++j) V::store(o + j * V::W, acc[j]);
      rows.next(length);
    }
    outer += run->count;
    start += run->count;
  }
}

// Backward, along the transposed index: outer is an input, inner an output. One load of dout feeds both the
// input's gradient and the weight's, so arithmetic is the limit: 2N multiply-adds and a share of dots4 a weight.
template <class T, int N, bool First, bool In, bool Values, class Rows>
void backward_cell(const Cell& cell, Rows rows, const T* values, const T* dout, const T* in, T* din, T* dvalues,
                   bool accumulate) {
  using V = Vec<T>;
  using R = typename V::R;
  const i32* outer = cell.outer;
  for (const Run* run = cell.run; run != cell.run_end; ++run) {
    const int length = run->length;
    for (int s = 0; s < run->count; ++s) {
      R x[N], g[N];
      T* d = In ? rows.outer(din, outer[s]) : nullptr;
      for (int j = 0; j < N; ++j) {
        if (Values) prefetch(rows.outer(in, outer[s + 4]) + j * V::W);
        if (In) prefetch(rows.outer(din, outer[s + 4]) + j * V::W);
      }
      for (int j = 0; j < N; ++j) {
        if (Values) x[j] = V::load(rows.outer(in, outer[s]) + j * V::W);
        if (In) g[j] = First ? V::zero() : V::load(d + j * V::W);
      }
      auto weight = [&](int k) __attribute__((always_inline)) {
        const T* y = rows.inner(dout, k);
        SPS_KEEP_POINTER(y);
        R dot = V::zero();
        const R w = V::set1(In ? values[k] : T(0));
        for (int j = 0; j < N; ++j) {
          R t = V::load(y + j * V::W);
          if (In && Values) SPS_KEEP_VECTOR(t);
          if (In) g[j] = V::fma(w, t, g[j]);
          if (Values) dot = j ? V::fma(t, x[j], dot) : V::mul(t, x[j]);
        }
        return dot;
      };
      // The sums over lanes wait long for their operands, so those of four weights are taken while the next four
      // are under way: the scheduler then always finds a multiply-add that is ready.
      int k = 0;
      if constexpr (Values && V::kDots16) {
        for (; k + 16 <= length; k += 16) {
          const R a = weight(k), b = weight(k + 1), c = weight(k + 2), e = weight(k + 3);
          const R a2 = weight(k + 4), b2 = weight(k + 5), c2 = weight(k + 6), e2 = weight(k + 7);
          const R p = V::partial4(a, b, c, e);
          const R a3 = weight(k + 8), b3 = weight(k + 9), c3 = weight(k + 10), e3 = weight(k + 11);
          const R p2 = V::partial4(a2, b2, c2, e2);
          const R a4 = weight(k + 12), b4 = weight(k + 13), c4 = weight(k + 14), e4 = weight(k + 15);
          const R p3 = V::partial4(a3, b3, c3, e3);
          V::dots16(dvalues + k, p, p2, p3, V::partial4(a4, b4, c4, e4), accumulate);
        }
      }
      if (k + 4 <= length) {
        R a = weight(k), b = weight(k + 1), c = weight(k + 2), e = weight(k + 3);
        for (k += 4; k + 4 <= length; k += 4) {
          const R a2 = weight(k), b2 = weight(k + 1), c2 = weight(k + 2), e2 = weight(k + 3);
          if (Values) V::dots4(dvalues + k - 4, a, b, c, e, accumulate);
          a = a2, b = b2, c = c2, e = e2;
        }
        if (Values) V::dots4(dvalues + k - 4, a, b, c, e, accumulate);
      }
      if (k < length) {
        const int rest = length - k;
        R r[3] = {weight(k), V::zero(), V::zero()};
        if (rest > 1) r[1] = weight(k + 1);
        if (rest > 2) r[2] = weight(k + 2);
        if (Values) V::dots3(dvalues + k, rest, r[0], r[1], r[2], accumulate);
      }
      if (In)
        for (int j = 0; j < N; ++j) V::store(d + j * V::W, g[j]);
      rows.next(length);
      values += length;
      if (Values) dvalues += length;
    }
    outer += run->count;
  }
}

}  // namespace sparsight::SPS_ISA
