// One small vector type per instruction set, so that every kernel is written once.
//
// A kernel file includes this header inside a translation unit that was compiled with the flags of one
// instruction set and that defined SPS_ISA as the name of its namespace. The namespace matters: templates
// instantiated under different flags must not share a symbol, or the linker would keep just one of them and
// an old processor could run AVX-512 code. For the same reason nothing in here uses the standard library.
#pragma once

#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define SPS_INLINE inline __attribute__((always_inline))

namespace sparsight::SPS_ISA {

using i64 = std::int64_t;

// Vec<T>: R is the register, W its lanes. Beside the arithmetic:
//   load_transposed  reads W rows of W elements, ld apart, and gives each column i to sink(i, column)
//   dots4            writes (or adds) the sums over lanes of a, b, c, d to out[0..3]
//   dots3            the same for one to three sums, touching no more than `count` elements of out
//   kDots16          whether sixteen sums at once are cheaper: then partial4 begins those of four vectors, and
//                    dots16 ends those of four partial4 that followed one another
//   load4, lane<I>   four consecutive weights, and one of them in every lane
template <class T>
struct Vec;

SPS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Keeps a value in its register. gcc would rather fold one load into two instructions, which loads twice, and
// would rather address with an index register, which splits each multiply-add in two micro-operations.
#if defined(__x86_64__) && !defined(SPS_PORTABLE)
#define SPS_KEEP_VECTOR(v) asm("" : "+v"(v))
#define SPS_KEEP_POINTER(p) asm("" : "+r"(p))
#elif defined(__aarch64__) && !defined(SPS_PORTABLE)
#define SPS_KEEP_VECTOR(v) asm("" : "+w"(v))
#define SPS_KEEP_POINTER(p) asm("" : "+r"(p))
#else
#define SPS_KEEP_VECTOR(v) ((void)0)
#define SPS_KEEP_POINTER(p) ((void)0)
#endif

}  // namespace sparsight::SPS_ISA

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(SPS_PORTABLE)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif
