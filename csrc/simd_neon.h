// NEON on AArch64: 32 registers of 4 floats or 2 doubles. Included by simd.h only.
#pragma once

namespace sparsight::SPS_ISA {

template <>
struct Vec<float> {
  using R = float32x4_t;
  static constexpr int W = 4;
  static constexpr int kRegisters = 32;
  static constexpr bool kDots16 = false;
  static SPS_INLINE R zero() { return vdupq_n_f32(0); }
  static SPS_INLINE R set1(float a) { return vdupq_n_f32(a); }
  static SPS_INLINE R load(const float* p) { return vld1q_f32(p); }
  static SPS_INLINE void store(float* p, R a) { vst1q_f32(p, a); }
  static SPS_INLINE R add(R a, R b) { return vaddq_f32(a, b); }
  static SPS_INLINE R mul(R a, R b) { return vmulq_f32(a, b); }
  static SPS_INLINE R fma(R a, R b, R c) { return vfmaq_f32(c, a, b); }

  using Four = const float*;
  static SPS_INLINE Four load4(const float* p) { return p; }
  template <int I>
  static SPS_INLINE R lane(Four four) {
    return set1(four[I]);
  }
  template <class Sink>
  static SPS_INLINE void load_transposed(const float* p, i64 ld, Sink sink) {
    const R a = load(p), b = load(p + ld), c = load(p + 2 * ld), d = load(p + 3 * ld);
    const float64x2_t l0 = vreinterpretq_f64_f32(vzip1q_f32(a, b)), h0 = vreinterpretq_f64_f32(vzip2q_f32(a, b));
    const float64x2_t l1 = vreinterpretq_f64_f32(vzip1q_f32(c, d)), h1 = vreinterpretq_f64_f32(vzip2q_f32(c, d));
    sink(0, vreinterpretq_f32_f64(vzip1q_f64(l0, l1)));
    sink(1, vreinterpretq_f32_f64(vzip2q_f64(l0, l1)));
    sink(2, vreinterpretq_f32_f64(vzip1q_f64(h0, h1)));
    sink(3, vreinterpretq_f32_f64(vzip2q_f64(h0, h1)));
  }

  static SPS_INLINE void dots4(float* out, R a, R b, R c, R d, bool accumulate) {
    R s = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
    if (accumulate) s = add(s, load(out));
    store(out, s);
  }
  static SPS_INLINE void dots3(float* out, int count, R a, R b, R c, bool accumulate) {
    float sums[4];
    dots4(sums, a, b, c, zero(), false);
    for (int i = 0; i < count; ++i) out[i] = accumulate ? out[i] + sums[i] : sums[i];
  }
};

template <>
struct Vec<double> {
  using R = float64x2_t;
  static constexpr int W = 2;
  static constexpr int kRegisters = 32;
  static constexpr bool kDots16 = false;
  static SPS_INLINE R zero() { return vdupq_n_f64(0); }
  static SPS_INLINE R set1(double a) { return vdupq_n_f64(a); }
  static SPS_INLINE R load(const double* p) { return vld1q_f64(p); }
  static SPS_INLINE void store(double* p, R a) { vst1q_f64(p, a); }
  static SPS_INLINE R add(R a, R b) { return vaddq_f64(a, b); }
  static SPS_INLINE R mul(R a, R b) { return vmulq_f64(a, b); }
  static SPS_INLINE R fma(R a, R b, R c) { return vfmaq_f64(c, a, b); }

  using Four = const double*;
  static SPS_INLINE Four load4(const double* p) { return p; }
  template <int I>
  static SPS_INLINE R lane(Four four) {
    return set1(four[I]);
  }
  template <class Sink>
  static SPS_INLINE void load_transposed(const double* p, i64 ld, Sink sink) {
    const R a = load(p), b = load(p + ld);
    sink(0, vzip1q_f64(a, b));
    sink(1, vzip2q_f64(a, b));
  }

  static SPS_INLINE void dots4(double* out, R a, R b, R c, R d, bool accumulate) {
    R ab = vpaddq_f64(a, b), cd = vpaddq_f64(c, d);
    if (accumulate) ab = add(ab, load(out)), cd = add(cd, load(out + 2));
    store(out, ab);
    store(out + 2, cd);
  }
  static SPS_INLINE void dots3(double* out, int count, R a, R b, R c, bool accumulate) {
    double sums[4];
    dots4(sums, a, b, c, zero(), false);
    for (int i = 0; i < count; ++i) out[i] = accumulate ? out[i] + sums[i] : sums[i];
  }
};

}  // namespace sparsight::SPS_ISA
