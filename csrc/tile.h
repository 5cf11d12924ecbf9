// The batch (or the positions of an image) cut into tiles.
#pragma once

#include <algorithm>

#include "ops.h"

namespace sparsight {

// All tiles are full but the last, whose stride is as short as its rows allow.
template <class T>
struct Tiles {
  int lanes, full;
  i64 batch, count;
  explicit Tiles(i64 b)
      : lanes(ops<T>().lanes), full(lanes * kTileVectors), batch(b), count((b + full - 1) / full) {}
  i64 begin(i64 t) const { return t * full; }
  int rows(i64 t) const { return int(std::min<i64>(full, batch - begin(t))); }
  int vectors(i64 t) const { return (rows(t) + lanes - 1) / lanes; }
  int stride(i64 t) const { return vectors(t) * lanes; }
};

}  // namespace sparsight
