// AVX2 with FMA: 16 registers of 8 floats or 4 doubles. Included by simd.h only.
#pragma once

namespace sparsight::SPS_ISA {

template <>
struct Vec<float> {
  using R = __m256;
  static constexpr int W = 8;
  static constexpr int kRegisters = 16;
  static constexpr bool kDots16 = false;
  static SPS_INLINE R zero() { return _mm256_setzero_ps(); }
  static SPS_INLINE R set1(float a) { return _mm256_set1_ps(a); }
  static SPS_INLINE R load(const float* p) { return _mm256_loadu_ps(p); }
  static SPS_INLINE void store(float* p, R a) { _mm256_storeu_ps(p, a); }
  static SPS_INLINE R add(R a, R b) { return _mm256_add_ps(a, b); }
  static SPS_INLINE R mul(R a, R b) { return _mm256_mul_ps(a, b); }
  static SPS_INLINE R fma(R a, R b, R c) { return _mm256_fmadd_ps(a, b, c); }

  using Four = const float*;
  static SPS_INLINE Four load4(const float* p) { return p; }
  template <int I>
  static SPS_INLINE R lane(Four four) {
    return set1(four[I]);
  }
  template <class Sink>
  static SPS_INLINE void load_transposed(const float* p, i64 ld, Sink sink) {
    for (int q = 0; q < 2; ++q) {
      R a[4];
      for (int m = 0; m < 4; ++m) {
        const float* s = p + m * ld + 4 * q;
        a[m] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(s)), _mm_loadu_ps(s + 4 * ld), 1);
      }
      const R l01 = _mm256_unpacklo_ps(a[0], a[1]), h01 = _mm256_unpackhi_ps(a[0], a[1]);
      const R l23 = _mm256_unpacklo_ps(a[2], a[3]), h23 = _mm256_unpackhi_ps(a[2], a[3]);
      sink(4 * q + 0, _mm256_shuffle_ps(l01, l23, 0x44));
      sink(4 * q + 1, _mm256_shuffle_ps(l01, l23, 0xEE));
      sink(4 * q + 2, _mm256_shuffle_ps(h01, h23, 0x44));
      sink(4 * q + 3, _mm256_shuffle_ps(h01, h23, 0xEE));
    }
  }

  static SPS_INLINE void dots4(float* out, R a, R b, R c, R d, bool accumulate) {
    const R s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    if (accumulate) t = _mm_add_ps(t, _mm_loadu_ps(out));
    _mm_storeu_ps(out, t);
  }
  static SPS_INLINE void dots3(float* out, int count, R a, R b, R c, bool accumulate) {
    float sums[4];
    dots4(sums, a, b, c, zero(), false);
    for (int i = 0; i < count; ++i) out[i] = accumulate ? out[i] + sums[i] : sums[i];
  }
};

template <>
struct Vec<double> {
  using R = __m256d;
  static constexpr int W = 4;
  static constexpr int kRegisters = 16;
  static constexpr bool kDots16 = false;
  static SPS_INLINE R zero() { return _mm256_setzero_pd(); }
  static SPS_INLINE R set1(double a) { return _mm256_set1_pd(a); }
  static SPS_INLINE R load(const double* p) { return _mm256_loadu_pd(p); }
  static SPS_INLINE void store(double* p, R a) { _mm256_storeu_pd(p, a); }
  static SPS_INLINE R add(R a, R b) { return _mm256_add_pd(a, b); }
  static SPS_INLINE R mul(R a, R b) { return _mm256_mul_pd(a, b); }
  static SPS_INLINE R fma(R a, R b, R c) { return _mm256_fmadd_pd(a, b, c); }

  using Four = const double*;
  static SPS_INLINE Four load4(const double* p) { return p; }
  template <int I>
  static SPS_INLINE R lane(Four four) {
    return set1(four[I]);
  }
  template <class Sink>
  static SPS_INLINE void load_transposed(const double* p, i64 ld, Sink sink) {
    for (int q = 0; q < 2; ++q) {
      R a[2];
      for (int m = 0; m < 2; ++m) {
        const double* s = p + m * ld + 2 * q;
        a[m] = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(s)), _mm_loadu_pd(s + 2 * ld), 1);
      }
      sink(2 * q + 0, _mm256_unpacklo_pd(a[0], a[1]));
      sink(2 * q + 1, _mm256_unpackhi_pd(a[0], a[1]));
    }
  }

  static SPS_INLINE void dots4(double* out, R a, R b, R c, R d, bool accumulate) {
    const R ab = _mm256_hadd_pd(a, b), cd = _mm256_hadd_pd(c, d);
    R s = add(_mm256_permute2f128_pd(ab, cd, 0x20), _mm256_permute2f128_pd(ab, cd, 0x31));
    if (accumulate) s = add(s, _mm256_loadu_pd(out));
    _mm256_storeu_pd(out, s);
  }
  static SPS_INLINE void dots3(double* out, int count, R a, R b, R c, bool accumulate) {
    double sums[4];
    dots4(sums, a, b, c, zero(), false);
    for (int i = 0; i < count; ++i) out[i] = accumulate ? out[i] + sums[i] : sums[i];
  }
};

}  // namespace sparsight::SPS_ISA
