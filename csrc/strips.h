// The work of a convolution of stride 1: images cut into strips of rows, and where a strip's weights find their rows.
#pragma once

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "conv.h"
#include "tile.h"

namespace sparsight {

constexpr i64 kStripBytes = 512 << 10;  // of copies and results that should stay in the second-level cache

// One pass. Forward, the copies are those of x and the results are outputs; backward, those of dy (padded so that the
// kernel, turned round, yields the gradient) and the results are channels. An inner index is a plane and a tap.
template <class T>
struct Strips {
  const Pass& pass;
  i64 taps, kernel_w;
  bool turned;         // the kernel
  i64 height, width;   // of a result
  i64 down, halo;      // rows from one tap to the next below; rows that a strip reads beside its own
  i64 rows, count;     // in a strip, the last may have fewer; strips in an image
  Shifts shifts;

  Strips(const Pass& p, const ConvShape& s, bool back)
      : pass(p), taps(s.taps()), kernel_w(s.kernel_w), turned(back), height(back ? s.height : s.out_h),
        width(back ? s.width : s.out_w), down(s.dilation_h), halo(s.dilation_h * (s.kernel_h - 1)) {
    const i64 across = s.dilation_w * (s.kernel_w - 1);
    shifts = {back ? s.out_h : s.height, back ? s.out_w : s.width, back ? halo - s.pad_h : s.pad_h,
              back ? across - s.pad_w : s.pad_w, width, s.kernel_w, s.dilation_w, 0};
    cut(back ? 2 * pass.outer_size : pass.outer_size);
    // A vector to spare, and an odd number of cache lines: copies would otherwise compete for the same few places.
    constexpr i64 line = 64 / sizeof(T);
    shifts.size = (((rows + halo) * width + 2 * line - 1) / line | 1) * line;
    if (pass.inner_size / taps * plane() > INT32_MAX) 
      throw std::length_error("rows of " + std::to_string(width) + " positions are too long for the kernel of a convolution");
  }

  i64 plane() const { return shifts.copies * shifts.size; }
  i64 first_plane(i64 q) const { return q * pass.panel / taps; }
  i64 last_plane(i64 q) const { return (std::min(pass.inner_size, (q + 1) * pass.panel) + taps - 1) / taps; }
  i64 most_planes() const { return (pass.panel + taps - 1) / taps + 1; }
  i64 copies_size() const { return most_planes() * plane() + 64; }
  Tiles<T> tiles(i64 strip) const { return Tiles<T>(std::min(rows, height - strip * rows) * width); }

  // For the weights k0 to k1 of the pass: where in all the copies of a strip their rows begin.
  void offsets(i64 k0, i64 k1, i32* to) const {
    std::vector<i32> table(pass.inner_size);
    for (i64 i = 0; i < pass.inner_size; ++i) {
      const i64 tap = turned ? taps - 1 - i % taps : i % taps;
      table[i] = i32(i / taps * plane() + tap % kernel_w * shifts.size + tap / kernel_w * down * width);
    }
    for (i64 q = 0; q < pass.panels; ++q) {
      const i64 first = std::max(k0, pass.first_weight(q, 0)), last = std::min(k1, pass.first_weight(q + 1, 0));
      const i32* rows_of = table.data() + q * pass.panel;
      for (i64 k = first; k < last; ++k) to[k] = rows_of[pass.inner[k]];
    }
  }

 private:
  void cut(i64 results) {
    const i64 bytes = (most_planes() * shifts.copies + results) * width * i64(sizeof(T));
    const i64 fit = std::max({kStripBytes / bytes - halo, 4 * halo, i64(1)});
    const i64 wish = (height + fit - 1) / fit;
    rows = (height + wish - 1) / wish;
    // Rows that make whole tiles, where that does not change much.
    const i64 full = Tiles<T>(1).full, even = full / std::gcd(full, width);
    if (even <= rows) rows = (rows + even - 1) / even * even;
    rows = std::min(rows, height);
    count = (height + rows - 1) / rows;
  }
};

}  // namespace sparsight
