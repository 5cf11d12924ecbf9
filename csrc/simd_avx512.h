// AVX-512F: 32 registers of 16 floats or 8 doubles. Included by simd.h only.
#pragma once

namespace sparsight::SPS_ISA {

template <>
struct Vec<float> {
  using R = __m512;
  static constexpr int W = 16;
  static constexpr int kRegisters = 32;
  static SPS_INLINE R zero() { return _mm512_setzero_ps(); }
  static SPS_INLINE R set1(float a) { return _mm512_set1_ps(a); }
  static SPS_INLINE R load(const float* p) { return _mm512_loadu_ps(p); }
  static SPS_INLINE void store(float* p, R a) { _mm512_storeu_ps(p, a); }
  static SPS_INLINE R add(R a, R b) { return _mm512_add_ps(a, b); }
  static SPS_INLINE R mul(R a, R b) { return _mm512_mul_ps(a, b); }
  static SPS_INLINE R fma(R a, R b, R c) { return _mm512_fmadd_ps(a, b, c); }
  // Four weights in one load, each broadcast from its register: the load ports have less to spare than port 5.
  using Four = __m512;
  static SPS_INLINE Four load4(const float* p) {
    __m128 four = _mm_loadu_ps(p);
    SPS_KEEP_VECTOR(four);
    return _mm512_broadcast_f32x4(four);
  }
  template <int I>
  static SPS_INLINE R lane(Four four) {
    return _mm512_permute_ps(four, I * 0x55);
  }

  // 128-bit pieces are placed by loads (no shuffle port), then each lane is a 4x4 transposition.
  template <class Sink>
  static SPS_INLINE void load_transposed(const float* p, i64 ld, Sink sink) {
    R a[4][4];
    // Row group by row group: 16 rows a power of two apart share a cache set that holds only 12 of them.
    const float *s0 = p, *s1 = p + 4 * ld, *s2 = p + 8 * ld, *s3 = p + 12 * ld;
    for (int m = 0; m < 4; ++m) {
      for (int q = 0; q < 4; ++q) {
        R t = _mm512_castps128_ps512(_mm_loadu_ps(s0 + 4 * q));
        t = _mm512_insertf32x4(t, _mm_loadu_ps(s1 + 4 * q), 1);
        t = _mm512_insertf32x4(t, _mm_loadu_ps(s2 + 4 * q), 2);
        a[q][m] = _mm512_insertf32x4(t, _mm_loadu_ps(s3 + 4 * q), 3);
      }
      s0 += ld, s1 += ld, s2 += ld, s3 += ld;
      SPS_KEEP_POINTER(s0);
      SPS_KEEP_POINTER(s1);
      SPS_KEEP_POINTER(s2);
      SPS_KEEP_POINTER(s3);
    }
    for (int q = 0; q < 4; ++q) {
      const R l01 = _mm512_unpacklo_ps(a[q][0], a[q][1]), h01 = _mm512_unpackhi_ps(a[q][0], a[q][1]);
      const R l23 = _mm512_unpacklo_ps(a[q][2], a[q][3]), h23 = _mm512_unpackhi_ps(a[q][2], a[q][3]);
      sink(4 * q + 0, _mm512_shuffle_ps(l01, l23, 0x44));
      sink(4 * q + 1, _mm512_shuffle_ps(l01, l23, 0xEE));
      sink(4 * q + 2, _mm512_shuffle_ps(h01, h23, 0x44));
      sink(4 * q + 3, _mm512_shuffle_ps(h01, h23, 0xEE));
    }
  }

  // One quarter of the register for each of the four: its lanes still have to be summed.
  static constexpr bool kDots16 = true;
  static SPS_INLINE R partial4(R a, R b, R c, R d) {
    const R ab = add(_mm512_mask_blend_ps(0xFF00, a, b), _mm512_shuffle_f32x4(a, b, 0x4E));
    const R cd = add(_mm512_mask_blend_ps(0xFF00, c, d), _mm512_shuffle_f32x4(c, d, 0x4E));
    // ab = a02 a13 b13 b02 in quarters (the order of the halves does not matter: they are summed next)
    return add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  }
  static SPS_INLINE void dots16(float* out, R p, R q, R r, R s, bool accumulate) {
    const R pq = add(_mm512_unpacklo_ps(p, q), _mm512_unpackhi_ps(p, q));
    const R rs = add(_mm512_unpacklo_ps(r, s), _mm512_unpackhi_ps(r, s));
    R sums = add(_mm512_shuffle_ps(pq, rs, 0x44), _mm512_shuffle_ps(pq, rs, 0xEE));
    // Quarter i holds the i-th sums of p, q, r, s: turn this square over.
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    sums = _mm512_permutexvar_ps(turn, sums);
    if (accumulate) sums = add(sums, load(out));
    store(out, sums);
  }
  static SPS_INLINE __m128 sums4(R a, R b, R c, R d) {
    R s = partial4(a, b, c, d);
    s = add(s, _mm512_permute_ps(s, 0x4E));
    s = add(s, _mm512_permute_ps(s, 0xB1));
    const __m512i pick = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(pick, s));
  }
  static SPS_INLINE void dots4(float* out, R a, R b, R c, R d, bool accumulate) {
    __m128 s = sums4(a, b, c, d);
    if (accumulate) s = _mm_add_ps(s, _mm_loadu_ps(out));
    _mm_storeu_ps(out, s);
  }
  static SPS_INLINE void dots3(float* out, int count, R a, R b, R c, bool accumulate) {
    R s = _mm512_castps128_ps512(sums4(a, b, c, zero()));
    const __mmask16 few = __mmask16((1 << count) - 1);
    if (accumulate) s = add(s, _mm512_maskz_loadu_ps(few, out));
    _mm512_mask_storeu_ps(out, few, s);
  }
};

template <>
struct Vec<double> {
  using R = __m512d;
  static constexpr int W = 8;
  static constexpr int kRegisters = 32;
  static constexpr bool kDots16 = false;
  static SPS_INLINE R zero() { return _mm512_setzero_pd(); }
  static SPS_INLINE R set1(double a) { return _mm512_set1_pd(a); }
  static SPS_INLINE R load(const double* p) { return _mm512_loadu_pd(p); }
  static SPS_INLINE void store(double* p, R a) { _mm512_storeu_pd(p, a); }
  static SPS_INLINE R add(R a, R b) { return _mm512_add_pd(a, b); }
  static SPS_INLINE R mul(R a, R b) { return _mm512_mul_pd(a, b); }
  static SPS_INLINE R fma(R a, R b, R c) { return _mm512_fmadd_pd(a, b, c); }

  using Four = const double*;
  static SPS_INLINE Four load4(const double* p) { return p; }
  template <int I>
  static SPS_INLINE R lane(Four four) {
    return set1(four[I]);
  }
  template <class Sink>
  static SPS_INLINE void load_transposed(const double* p, i64 ld, Sink sink) {
    for (int q = 0; q < 4; ++q) {
      R a[2];
      for (int m = 0; m < 2; ++m) {
        const double* s = p + m * ld + 2 * q;
        // The f32x4 form places 128 bits and is plain AVX-512F; its f64x2 twin would need DQ.
        __m512 t = _mm512_castps128_ps512(_mm_castpd_ps(_mm_loadu_pd(s)));
        t = _mm512_insertf32x4(t, _mm_castpd_ps(_mm_loadu_pd(s + 2 * ld)), 1);
        t = _mm512_insertf32x4(t, _mm_castpd_ps(_mm_loadu_pd(s + 4 * ld)), 2);
        a[m] = _mm512_castps_pd(_mm512_insertf32x4(t, _mm_castpd_ps(_mm_loadu_pd(s + 6 * ld)), 3));
      }
      sink(2 * q + 0, _mm512_unpacklo_pd(a[0], a[1]));
      sink(2 * q + 1, _mm512_unpackhi_pd(a[0], a[1]));
    }
  }

  static SPS_INLINE void dots4(double* out, R a, R b, R c, R d, bool accumulate) {
    const R ab = add(_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
    const R cd = add(_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
    const R even = _mm512_shuffle_f64x2(ab, cd, 0x88), odd = _mm512_shuffle_f64x2(ab, cd, 0xDD);
    const R s = add(even, odd);  // quarters: ab ab cd cd
    const R t = add(s, _mm512_shuffle_f64x2(s, s, 0xB1));
    __m256d u = _mm512_castpd512_pd256(_mm512_shuffle_f64x2(t, t, 0x08));
    if (accumulate) u = _mm256_add_pd(u, _mm256_loadu_pd(out));
    _mm256_storeu_pd(out, u);
  }
  static SPS_INLINE void dots3(double* out, int count, R a, R b, R c, bool accumulate) {
    double sums[4];
    dots4(sums, a, b, c, zero(), false);
    for (int i = 0; i < count; ++i) out[i] = accumulate ? out[i] + sums[i] : sums[i];
  }
};

}  // namespace sparsight::SPS_ISA
