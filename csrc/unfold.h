// Between a padded image and a tile of its unfolded form: row f of the tile is what tap f % taps of channel
// f / taps sees at each of the tile's positions.
#pragma once

#include "ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

template <class T>
void unfold(const Window& w, const T* image, i64 f0, i64 f1, int rows, int stride, T* tile) {
  using V = Vec<T>;
  const T* channel = image + f0 / w.taps * w.channel_size;
  i64 tap = f0 % w.taps;
  for (i64 f = f0; f < f1; ++f, tile += stride) {
    for (int i = 0; i < w.spans; ++i) {
      const T* from = channel + w.offset[tap * w.spans + i];
      T* to = tile + w.at[i];
      const int count = w.at[i + 1] - w.at[i];
      // Whole vectors, past the end too: what follows is written later, and image and tile have a vector to spare.
      if (w.step == 1)
        for (int j = 0; j < count; j += V::W) V::store(to + j, V::load(from + j));
      else
        for (int j = 0; j < count; ++j) to[j] = from[j * w.step];
    }
    for (int j = rows; j < stride; ++j) tile[j] = 0;
    if (++tap == w.taps) tap = 0, channel += w.channel_size;
  }
}

// The reverse: adds the rows of whole channels to the image. Tap by tap over all channels, because neighbouring
// taps overlap in memory, and a load that half overlaps a store still in flight has to wait for it.
template <class T>
void fold(const Window& w, const T* tile, i64 channels, int stride, T* image) {
  using V = Vec<T>;
  for (i64 tap = 0; tap < w.taps; ++tap)
    for (i64 c = 0; c < channels; ++c) {
      const T* row = tile + (c * w.taps + tap) * stride;
      for (int i = 0; i < w.spans; ++i) {
        T* to = image + c * w.channel_size + w.offset[tap * w.spans + i];
        const T* from = row + w.at[i];
        const int count = w.at[i + 1] - w.at[i];
        int j = 0;
        if (w.step == 1)
          for (; j + V::W <= count; j += V::W) V::store(to + j, V::add(V::load(to + j), V::load(from + j)));
        for (; j < count; ++j) to[j * w.step] += from[j];
      }
    }
}

}  // namespace sparsight::SPS_ISA
