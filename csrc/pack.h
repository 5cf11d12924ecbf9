// Between the CSR order of values and the order in which the backward pass meets them.
#pragma once

#include "plan.h"

namespace sparsight {

template <int Block, class T>
void pack_blocks(const i32* source, i64 count, const T* values, T* packed) {
  for (i64 i = 0; i < count; ++i)
    for (int b = 0; b < Block; ++b) packed[i * Block + b] = values[source[i] * i64(Block) + b];
}

template <int Block, class T>
void unpack_blocks(const i32* source, i64 count, const T* packed, T* values) {
  for (i64 i = 0; i < count; ++i)
    for (int b = 0; b < Block; ++b) values[source[i] * i64(Block) + b] = packed[i * Block + b];
}

// The weights from `first` to `last` of the pass. Block is a constant inside, so that the usual block of one does
// not pay for an inner loop.
template <class T>
void pack(const Pass& pass, i64 first, i64 last, const T* values, T* packed) {
  const i32* source = pass.source.data() + first;
  switch (pass.block) {
    case 4: return pack_blocks<4>(source, last - first, values, packed);
    case 8: return pack_blocks<8>(source, last - first, values, packed);
    default: return pack_blocks<1>(source, last - first, values, packed);
  }
}

template <class T>
void unpack(const Pass& pass, i64 first, i64 last, const T* packed, T* values) {
  const i32* source = pass.source.data() + first;
  switch (pass.block) {
    case 4: return unpack_blocks<4>(source, last - first, packed, values);
    case 8: return unpack_blocks<8>(source, last - first, packed, values);
    default: return unpack_blocks<1>(source, last - first, packed, values);
  }
}

}  // namespace sparsight
