// No instruction set assumed: four lanes in a plain array, left to the compiler's own vectoriser.
// Included by simd.h only.
#pragma once

namespace sparsight::SPS_ISA {

template <class T>
struct Vec {
  static constexpr int W = 4;
  static constexpr int kRegisters = 16;
  static constexpr bool kDots16 = false;
  struct R {
    T v[W];
  };
  static SPS_INLINE R set1(T a) { return {{a, a, a, a}}; }
  static SPS_INLINE R zero() { return set1(0); }
  static SPS_INLINE R load(const T* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static SPS_INLINE void store(T* p, R a) {
    for (int i = 0; i < W; ++i) p[i] = a.v[i];
  }
  static SPS_INLINE R add(R a, R b) {
    for (int i = 0; i < W; ++i) a.v[i] += b.v[i];
    return a;
  }
  static SPS_INLINE R mul(R a, R b) {
    for (int i = 0; i < W; ++i) a.v[i] *= b.v[i];
    return a;
  }
  static SPS_INLINE R fma(R a, R b, R c) { return add(mul(a, b), c); }

  using Four = const T*;
  static SPS_INLINE Four load4(const T* p) { return p; }
  template <int I>
  static SPS_INLINE R lane(Four four) {
    return set1(four[I]);
  }
  template <class Sink>
  static SPS_INLINE void load_transposed(const T* p, i64 ld, Sink sink) {
    for (int j = 0; j < W; ++j) sink(j, R{{p[j], p[ld + j], p[2 * ld + j], p[3 * ld + j]}});
  }

  static SPS_INLINE void dots4(T* out, R a, R b, R c, R d, bool accumulate) {
    const R rows[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
      const T s = (rows[i].v[0] + rows[i].v[1]) + (rows[i].v[2] + rows[i].v[3]);
      out[i] = accumulate ? out[i] + s : s;
    }
  }
  static SPS_INLINE void dots3(T* out, int count, R a, R b, R c, bool accumulate) {
    T sums[4];
    dots4(sums, a, b, c, zero(), false);
    for (int i = 0; i < count; ++i) out[i] = accumulate ? out[i] + sums[i] : sums[i];
  }
};

}  // namespace sparsight::SPS_ISA
