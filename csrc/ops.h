// What a translation unit of one instruction set offers to the drivers: a table of plain functions.
//
// All of them work on one *tile*: up to `tile` rows of the batch, stored transposed as [features][stride], where
// stride is the tile's number of rows rounded up to whole vectors. The batch is the vector dimension, so a
// weight is one broadcast and its activations are contiguous.
#pragma once

#include <cstdint>

namespace sparsight {

using i64 = std::int64_t;
using i32 = std::int32_t;
using u16 = std::uint16_t;

constexpr int kTileVectors = 4;  // vectors a full tile is wide: four accumulators, four loads a weight

// Segments of equal length that follow one another: one loop count, so the branch predictor learns it.
struct Run {
  i32 length, count;
};

// The part of a sparse matrix in one panel of inner indices and one chunk of outer indices. A segment is the
// set of weights of one outer index inside the panel.
struct Cell {
  const Run* run;
  const Run* run_end;
  const i32* outer;  // outer index of each segment
  const i32* start;  // the CSR position of its first weight, or null when values follow the order of the cell
  const u16* inner;  // inner index of each weight, counted from the beginning of the panel
  int block;         // outputs that one index and its values stand for: 1, 4 or 8
};

// Where the positions of a tile look into a padded image. Positions in one output row form a span.
struct Window {
  i64 taps, channel_size;
  int spans;
  i64 step;           // between neighbouring positions, in input columns
  const i64* offset;  // [taps][spans], of a span's first position, from the beginning of its channel
  const int* at;      // [spans + 1], where spans begin in the tile
};

// Planes (the channels of an image, padded) and the copies of each that a kernel of stride 1 reads: copy i begins
// i * step columns further right and is as wide as the result, so that what a tap sees at consecutive positions is
// contiguous, from one row to the next too.
struct Shifts {
  i64 height, width;  // of a plane as it comes
  i64 top, left;      // zeros before its first row and column; negative where so many are cut off
  i64 columns;        // of a copy
  i64 copies, step;
  i64 size;           // elements from one copy to the next
};

// Where a cell's rows lie when nothing is packed into tiles.
template <class T>
struct Plane {
  const i32* offset;  // per weight of the cell: where its inner row begins
  i64 apart;          // elements from one outer row to the next
  const T* bias;      // per outer index, where the sums begin; gather_plane only, null for zero
};

template <class T>
struct Ops {
  int lanes;  // elements in a vector
  // xt[c][b] = x[b][c], zero where b >= nb. sums (optional): sums[c] += sum over b of what was read.
  void (*load_tile)(const T* x, i64 ld, int nb, i64 cols, T* xt, T* sums);
  // y[b][r] = yt[r][b] (+ bias[r])
  void (*store_tile)(const T* yt, int nb, i64 rows, const T* bias, T* y, i64 ld);
  // Rows f0 to f1 of the tile from the padded image, and all rows of so many channels back (adding). Image and
  // tile have a vector to spare at the end.
  void (*unfold)(const Window& window, const T* image, i64 f0, i64 f1, int rows, int stride, T* tile);
  void (*fold)(const Window& window, const T* tile, i64 channels, int stride, T* image);
  // out[outer] (+)= sum of values * in[inner]; `in` points at the panel's first row
  void (*gather)(const Cell& cell, const T* values, const T* in, T* out, int vectors, bool first_panel);
  // The whole backward of a cell: din[outer] (+)= sum of values * dout[inner] (din may be null), and
  // dvalues[k] (+)= dot(dout[inner_k], in[outer]) (dvalues may be null). values and dvalues follow the cell.
  void (*backward)(const Cell& cell, const T* values, const T* dout, const T* in, T* din, T* dvalues, int vectors,
                   bool first_panel, bool first_tile);
  // The copies of rows r0 to r1 of so many padded planes, the first of them at `from` in an array from begin to end.
  // `to` has a vector to spare.
  void (*shift)(const Shifts& shifts, const T* begin, const T* end, const T* from, i64 planes, i64 r0, i64 r1, T* to);
  // gather and backward on such copies, straight from and to planes. Values in the same order as there.
  void (*gather_plane)(const Cell& cell, const Plane<T>& plane, const T* values, const T* in, T* out, int vectors,
                       bool first_panel);
  void (*backward_plane)(const Cell& cell, const Plane<T>& plane, const T* values, const T* dout, const T* in, T* din,
                         T* dvalues, int vectors, bool first_panel, bool first_tile);
};

enum class Isa { portable, avx2, avx512, neon };

template <class T>
const Ops<T>& ops();        // the table of the instruction set in use
Isa isa();                  // chosen once: the best of this processor, or what SPARSIGHT_ISA names (which throws where it names none)
bool isa_available(Isa which);
bool isa_force(Isa which);  // for tests; false where it is not available
const char* isa_name(Isa which);

}  // namespace sparsight
