// SiLU gates and the rows of a mixture, element by element, in loops that the compiler turns into vectors.
#pragma once

#include "product_ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// e^x to a few units in the last place: 2^n · e^r with |r| <= ln(2)/2, by a polynomial. The C library's would
// be called element by element.
SPS_INLINE float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5·2^23: the sum's low bits are the rounded integer
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const std::int32_t bits = (std::int32_t(n) + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return p * power;
}
SPS_INLINE double exp_of(double x) { return __builtin_exp(x); }

// out = silu(gate) · up, for rows of [gate | up]
template <class T>
void glu(const T* before, i64 rows, i64 hidden, T* out) {
  for (i64 i = 0; i < rows; ++i) {
    const T* __restrict gate = before + i * 2 * hidden;
    const T* __restrict up = gate + hidden;
    T* __restrict to = out + i * hidden;
    for (i64 j = 0; j < hidden; ++j) to[j] = gate[j] / (T(1) + exp_of(-gate[j])) * up[j];
  }
}

// The way back: [d_gate | d_up] from d_out.
template <class T>
void glu_backward(const T* before, const T* d_out, i64 rows, i64 hidden, T* d_before) {
  for (i64 i = 0; i < rows; ++i) {
    const T* __restrict gate = before + i * 2 * hidden;
    const T* __restrict up = gate + hidden;
    const T* __restrict d = d_out + i * hidden;
    T* __restrict d_gate = d_before + i * 2 * hidden;
    T* __restrict d_up = d_gate + hidden;
    for (i64 j = 0; j < hidden; ++j) {
      const T g = gate[j], s = T(1) / (T(1) + exp_of(-g));
      d_gate[j] = d[j] * up[j] * s * (T(1) + g * (T(1) - s));
      d_up[j] = d[j] * g * s;
    }
  }
}

// back[i] = scale[i] · grad[token[i]]; dots[i] = grad[token[i]] · out[i], where anyone wants it
template <class T>
void spread(const T* grad, const i64* token, const T* scale, const T* out, i64 rows, i64 width, T* back, T* dots) {
  using V = Vec<T>;
  for (i64 i = 0; i < rows; ++i) {
    const T* g = grad + token[i] * width;
    const T* o = out + i * width;
    T* to = back + i * width;
    const typename V::R s = V::set1(scale[i]);
    typename V::R sum = V::zero();
    i64 j = 0;
    for (; j + V::W <= width; j += V::W) {
      const typename V::R v = V::load(g + j);
      if (dots) sum = V::fma(v, V::load(o + j), sum);
      V::store(to + j, V::mul(v, s));
    }
    T total = 0;
    for (; j < width; ++j) {
      if (dots) total += g[j] * o[j];
      to[j] = g[j] * scale[i];
    }
    if (dots) {
      T part[V::W];
      V::store(part, sum);
      for (int l = 0; l < V::W; ++l) total += part[l];
      dots[i] = total;
    }
  }
}

// y[t] = sum over j < k of weight[j][t] · rows[place[j][t]]; no weights: all 1
template <class T>
void gather_sum(const T* rows, const i64* place, const T* weight, i64 k, i64 tokens, i64 first, i64 last, i64 width,
                T* y) {
  using V = Vec<T>;
  for (i64 t = first; t < last; ++t)
    for (i64 n = 0; n < k; ++n) {
      const T* from = rows + place[n * tokens + t] * width;
      T* to = y + t * width;
      const T w = weight ? weight[n * tokens + t] : T(1);
      const typename V::R scale = V::set1(w);
      i64 j = 0;
      if (n == 0) {
        for (; j + V::W <= width; j += V::W) V::store(to + j, V::mul(scale, V::load(from + j)));
        for (; j < width; ++j) to[j] = w * from[j];
      } else {
        for (; j + V::W <= width; j += V::W) V::store(to + j, V::fma(scale, V::load(from + j), V::load(to + j)));
        for (; j < width; ++j) to[j] += w * from[j];
      }
    }
}

}  // namespace sparsight::SPS_ISA
