// Where a kernel finds the rows of its cell: inner rows it reads for each weight, outer rows it sums up.
#pragma once

#include "ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// In tiles: rows of N vectors, one after another.
template <class T, int N>
struct TileRows {
  static constexpr i64 stride = N * Vec<T>::W;
  const u16* index;
  SPS_INLINE const T* inner(const T* base, int k) const { return base + index[k] * stride; }
  // Four indices in one load: where activations come from memory, load ports are what there is least of.
  SPS_INLINE std::uint64_t four(int k) const {
    std::uint64_t at;
    __builtin_memcpy(&at, index + k, sizeof at);
    SPS_KEEP_POINTER(at);
    return at;
  }
  template <int I>
  SPS_INLINE const T* of(const T* base, std::uint64_t four) const {
    return base + i64(four >> (16 * I) & 0xFFFF) * stride;
  }
  template <class P>
  SPS_INLINE P* outer(P* base, i64 o) const {
    return base + o * stride;
  }
  SPS_INLINE typename Vec<T>::R first(i64) const { return Vec<T>::zero(); }
  SPS_INLINE void next(int weights) { index += weights; }
};

// In planes: inner rows anywhere, outer rows equally far apart.
template <class T>
struct PlaneRows {
  const i32* offset;
  i64 apart;
  const T* bias;
  SPS_INLINE const T* inner(const T* base, int k) const { return base + offset[k]; }
  SPS_INLINE int four(int k) const { return k; }
  template <int I>
  SPS_INLINE const T* of(const T* base, int k) const {
    return base + offset[k + I];
  }
  template <class P>
  SPS_INLINE P* outer(P* base, i64 o) const {
    return base + o * apart;
  }
  SPS_INLINE typename Vec<T>::R first(i64 o) const { return bias ? Vec<T>::set1(bias[o]) : Vec<T>::zero(); }
  SPS_INLINE void next(int weights) { offset += weights; }
};

}  // namespace sparsight::SPS_ISA
