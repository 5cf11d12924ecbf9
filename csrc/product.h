// Small dense products on whole registers: one tile of rows × two vectors, and what packs its operands.
//
// Two forms. A weight times rows: the rows are packed as vectors and the weight, too large to be packed for so
// little use, is read where it lies, a broadcast at a time. A gradient, a product over the rows: both sides are
// packed, because rows that lie a power of two apart share one set of the cache.
#pragma once

#include "product_ops.h"
#include "simd.h"

namespace sparsight::SPS_ISA {

// Memory that will be wanted next, fetched into the second cache while a tile computes: line k lies at
// from + (k mod 16)·near + (k div 16)·far, one line for each term of the tile's sum.
template <class T>
SPS_INLINE void fetch(const Ahead<T>& ahead, i64 k) {
  __builtin_prefetch(ahead.from + (k & 15) * ahead.near + (k >> 4) * ahead.far, 0, 2);
}

// As many accumulators as fit beside two vectors of B and one broadcast of A.
template <class T>
constexpr int kTileRows = Vec<T>::kRegisters == 32 ? 12 : 6;
template <class T>
constexpr int kTileCols = 2 * Vec<T>::W;


// -- a weight times rows ---------------------------------------------------------------------------------

// c[m][j] = sum over k of w[m][k] · x[k][j] for M rows of w where they lie and N vectors of packed x.
template <class T, int M, int N>
SPS_INLINE void flat_tile(const T* w, i64 ld, const T* x, i64 depth, T* c) {
  using V = Vec<T>;
  using R = typename V::R;
  R sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = V::zero();
  const Ahead<T> ahead{w + M * ld, ld, 64 / i64(sizeof(T))};
  for (i64 k = 0; k < depth; ++k) {
    fetch(ahead, k);
    R col[N];
    for (int n = 0; n < N; ++n) col[n] = V::load(x + n * V::W);
    x += N * V::W;
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const R one = V::set1(w[m * ld + k]);
      for (int n = 0; n < N; ++n) sum[m][n] = V::fma(one, col[n], sum[m][n]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) V::store(c + (m * N + n) * V::W, sum[m][n]);
}

// y[t][o] for `count` rows t, at most N vectors of them, and the outputs o of w [outputs][inputs].
template <class T, int N>
void rows_of(const T* w, i64 inputs, i64 outputs, const T* x, int count, T* y, i64 ldy) {
  using V = Vec<T>;
  constexpr int W = V::W, M = kTileRows<T> * 2 / (N < 2 ? 2 : N), kBlock = 48;
  T block[kBlock * N * W];
  for (i64 o = 0; o < outputs; o += kBlock) {
    const int some = int(outputs - o < kBlock ? outputs - o : kBlock);
    int m = 0;
    for (; m + M <= some; m += M) flat_tile<T, M, N>(w + (o + m) * inputs, inputs, x, inputs, block + m * N * W);
    for (; m < some; ++m) flat_tile<T, 1, N>(w + (o + m) * inputs, inputs, x, inputs, block + m * N * W);
    int j = 0;
    for (; j + W <= some; j += W)
      for (int t = 0; t < count; t += W)
        V::load_transposed(block + j * N * W + t, N * W, [&](int i, typename V::R column) {
          if (t + i < count) V::store(y + (t + i) * ldy + o + j, column);
        });
    for (; j < some; ++j)
      for (int t = 0; t < count; ++t) y[t * ldy + o + j] = block[j * N * W + t];
  }
}

template <class T>
void times_rows(const T* w, i64 inputs, i64 outputs, const T* x, int vectors, int count, T* y, i64 ldy) {
  switch (vectors) {
    case 1: return rows_of<T, 1>(w, inputs, outputs, x, count, y, ldy);
    case 2: return rows_of<T, 2>(w, inputs, outputs, x, count, y, ldy);
    case 3: return rows_of<T, 3>(w, inputs, outputs, x, count, y, ldy);
  }
}

// -- a gradient ------------------------------------------------------------------------------------------

// c[m][j] (+)= sum over k of a[k][m] · panel[k][j] for M rows and two vectors.
template <class T, int M>
SPS_INLINE void tile_of(const T* a, const T* panel, i64 depth, T* c, i64 ldc, int cols, bool add,
          const Ahead<T>& ahead) {
  using V = Vec<T>;
  using R = typename V::R;
  constexpr int W = V::W;
  R sum[M][2];
  for (int m = 0; m < M; ++m) {
    sum[m][0] = sum[m][1] = V::zero();
    __builtin_prefetch(c + m * ldc, 1, 3);
    __builtin_prefetch(c + m * ldc + W, 1, 3);
  }
  for (i64 k = 0; k < depth; ++k) {
    const R low = V::load(panel), high = V::load(panel + W);
    fetch(ahead, k);
    panel += 2 * W;
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const R one = V::set1(a[m]);
      sum[m][0] = V::fma(one, low, sum[m][0]);
      sum[m][1] = V::fma(one, high, sum[m][1]);
    }
    a += kTileRows<T>;
  }
  if (cols == 2 * W) {
    for (int m = 0; m < M; ++m) {
      T* to = c + m * ldc;
      if (add) sum[m][0] = V::add(sum[m][0], V::load(to)), sum[m][1] = V::add(sum[m][1], V::load(to + W));
      V::store(to, sum[m][0]);
      V::store(to + W, sum[m][1]);
    }
    return;
  }
  T part[2 * W];
  for (int m = 0; m < M; ++m) {
    V::store(part, sum[m][0]);
    V::store(part + W, sum[m][1]);
    T* to = c + m * ldc;
    for (int j = 0; j < cols; ++j) to[j] = add ? to[j] + part[j] : part[j];
  }
}

template <class T, int M>
void tile_rows(int rows, const T* a, const T* panel, i64 depth, T* c, i64 ldc, int cols, bool add,
          const Ahead<T>& ahead) {
  if constexpr (M > 0) {
    if (rows == M) return tile_of<T, M>(a, panel, depth, c, ldc, cols, add, ahead);
    return tile_rows<T, M - 1>(rows, a, panel, depth, c, ldc, cols, add, ahead);
  }
}

template <class T>
void tile(int rows, const T* a, const T* panel, i64 depth, T* c, i64 ldc, int cols, bool add,
          const Ahead<T>& ahead) {
  tile_rows<T, kTileRows<T>>(rows, a, panel, depth, c, ldc, cols, add, ahead);
}

// -- packing ---------------------------------------------------------------------------------------------

// panel[k][j] = w[k][j] for neighbouring panels, zero for j >= cols. Row by row over all of them: each row is one
// piece of memory, and seldom the same page as the next.
template <class T>
void pack(const T* w, i64 ld, i64 depth, i64 cols, T* panel) {
  using V = Vec<T>;
  constexpr int W = V::W;
  for (i64 k = 0; k < depth; ++k, w += ld, panel += 2 * W) {
    T* to = panel;
    i64 j = 0;
    for (; j + 2 * W <= cols; j += 2 * W, to += depth * 2 * W) {
      prefetch(w + 4 * ld + j);
      prefetch(w + 4 * ld + j + W);
      V::store(to, V::load(w + j));
      V::store(to + W, V::load(w + j + W));
    }
    if (j < cols)
      for (int i = 0; i < 2 * W; ++i) to[i] = j + i < cols ? w[j + i] : T(0);
  }
}

// panel[k][j] = w[j][k] for `vectors` vectors of j, zero for j >= cols
template <class T>
void pack_transposed(const T* w, i64 ld, i64 depth, int cols, int vectors, T* panel) {
  using V = Vec<T>;
  constexpr int W = V::W;
  const i64 wide = i64(vectors) * W;
  for (int v = 0; v < vectors; ++v, w += W * ld, panel += W, cols -= W) {
    i64 k = 0;
    if (cols >= W)
      for (; k + W <= depth; k += W)
        V::load_transposed(w + k, ld, [&](int i, typename V::R column) { V::store(panel + (k + i) * wide, column); });
    for (; k < depth; ++k)
      for (int j = 0; j < W; ++j) panel[k * wide + j] = j < cols ? w[j * ld + k] : T(0);
  }
}

// block[k][m] = a[k][m] for neighbouring blocks of `cols` columns in all. `wide`: so many more columns can be read
// at every row. Vectors overlap in the blocks, which have one to spare: each is put right by the next.
template <class T>
void pack_rows(const T* a, i64 ld, i64 depth, int cols, int wide, T* block) {
  using V = Vec<T>;
  constexpr int M = kTileRows<T>;
  for (i64 k = 0; k < depth; ++k, a += ld, block += M) {
    T* to = block;
    for (int j = 0; j < cols; j += M, to += depth * M)
      if (V::W >= M && j + V::W <= cols + wide && k + 1 < depth)
        V::store(to, V::load(a + j));
      else
        for (int m = 0; m < M && j + m < cols; ++m) to[m] = a[j + m];
  }
}

}  // namespace sparsight::SPS_ISA
