// The shifted copies that a convolution of stride 1 reads, instead of an unfolded input.
#pragma once

#include "ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// Whole vectors, past `count` too.
template <class T>
SPS_INLINE void copy_over(const T* from, i64 count, T* to) {
  using V = Vec<T>;
  for (i64 j = 0; j < count; j += V::W) V::store(to + j, V::load(from + j));
}

template <class T>
SPS_INLINE void zeros_over(T* to, i64 count) {
  using V = Vec<T>;
  for (i64 j = 0; j < count; j += V::W) V::store(to + j, V::zero());
}

template <class T>
void shift(const Shifts& s, const T* from, const T* end, i64 planes, i64 r0, i64 r1, T* line, T* to) {
  using V = Vec<T>;
  const i64 wide = s.columns + (s.copies - 1) * s.step;  // of a padded row
  // Its columns that come from the plane: first to last, which begin at column `skip` of it.
  const i64 first = s.left < 0 ? 0 : s.left < wide ? s.left : wide;
  const i64 past = s.left + s.width;
  const i64 last = past < first ? first : past < wide ? past : wide;
  const i64 skip = first - s.left, count = last - first;
  for (i64 p = 0; p < planes; ++p, from += s.height * s.width) {
    // A padded plane first: it stays in the first-level cache, where loads at any column are cheap. Stores run over
    // the end of a row, and what comes next is written after them.
    T* row = line;
    for (i64 r = r0; r < r1; ++r, row += wide) {
      const i64 y = r - s.top;
      if (y < 0 || y >= s.height || count == 0) {
        zeros_over(row, wide);
        continue;
      }
      const T* x = from + y * s.width + skip;
      zeros_over(row, first);
      if (end - x >= count + V::W)
        copy_over(x, count, row + first);
      else  // no vector to spare at the end of the array
        for (i64 j = 0; j < count; ++j) row[first + j] = x[j];
      for (i64 j = last; j < wide; ++j) row[j] = 0;
    }
    for (i64 c = 0; c < s.copies; ++c, to += s.size) {
      T* copy = to;
      row = line + c * s.step;
      for (i64 r = r0; r < r1; ++r, row += wide, copy += s.columns) copy_over(row, s.columns, copy);
      // Tiles that end with the image look past it, and must not find anything there that is not a number.
      zeros_over(copy, s.size - (copy - to));
    }
  }
}

}  // namespace sparsight::SPS_ISA
