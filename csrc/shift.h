// The shifted copies that a convolution of stride 1 reads, instead of an unfolded input.
#pragma once

#include "ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// Whole vectors, past `count` too. What keeps the vectors keeps the compiler from calling memcpy and memset, which
// cost more than a row of an image does.
template <class T>
SPS_INLINE void copy_over(const T* from, i64 count, T* to) {
  using V = Vec<T>;
  for (i64 j = 0; j < count; j += V::W) {
    typename V::R row = V::load(from + j);
    SPS_KEEP_VECTOR(row);
    V::store(to + j, row);
  }
}

template <class T>
SPS_INLINE void zeros_over(T* to, i64 count) {
  using V = Vec<T>;
  typename V::R zero = V::zero();
  for (i64 j = 0; j < count; j += V::W) {
    SPS_KEEP_VECTOR(zero);
    V::store(to + j, zero);
  }
}

// Exactly so many, which are few: one store each.
template <class T>
SPS_INLINE void few_zeros(T* to, i64 count) {
  for (const T* end = to + count; to < end; ++to) {
    *to = 0;
    SPS_KEEP_POINTER(to);
  }
}

constexpr i64 kPlanesAhead = 2;  // to ask for: the rows of a strip are too few for the hardware to see a pattern

template <class T>
void shift(const Shifts& s, const T* begin, const T* end, const T* from, i64 planes, i64 r0, i64 r1, T* to) {
  using V = Vec<T>;
  for (i64 p = 0; p < planes; ++p, from += s.height * s.width)
    for (i64 c = 0; c < s.copies; ++c, to += s.size) {
      // Column j is column j + right of the plane, where that exists: from first to last.
      const i64 right = c * s.step - s.left;
      const i64 first = right > 0 ? 0 : -right < s.columns ? -right : s.columns;
      const i64 past = s.width - right < s.columns ? s.width - right : s.columns;
      const i64 last = past > first ? past : first;
      T* row = to;
      for (i64 r = r0; r < r1; ++r, row += s.columns) {
        const i64 y = r - s.top;
        if (y < 0 || y >= s.height || first == last) {
          zeros_over(row, s.columns);
          continue;
        }
        // The neighbours of a row come along and give way to zeros. Only at both ends of the array are there none.
        const i64 at = from - begin + y * s.width + right;
        for (i64 j = 0; c == 0 && j < s.columns; j += 64 / i64(sizeof(T)))
          prefetch(begin + at + kPlanesAhead * s.height * s.width + j);
        if (at >= 0 && at + s.columns + V::W <= end - begin)
          copy_over(begin + at, s.columns, row);
        else
          for (i64 j = first; j < last; ++j) row[j] = begin[at + j];
        few_zeros(row, first);
        few_zeros(row + last, s.columns - last);
      }
      // Tiles that end with the image look past it, and must not find anything there that is not a number.
      zeros_over(row, s.size - (row - to));
    }
}

}  // namespace sparsight::SPS_ISA
