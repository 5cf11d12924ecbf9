// What a translation unit of one instruction set offers to grouped.cpp: a table of plain functions.
#pragma once

#include "ops.h"

namespace sparsight {

// See fetch in product.h.
template <class T>
struct Ahead {
  const T* from;
  i64 near, far;
};

template <class T>
struct ProductOps {
  int rows, cols, lanes;  // of a full tile, of a vector
  // y[t][o] = sum over k of w[o][k] · x[k][t] for t < count, x packed as so many vectors, at most three
  void (*times_rows)(const T* w, i64 inputs, i64 outputs, const T* x, int vectors, int count, T* y, i64 ldy);
  // c[m][j] (+)= sum over k < depth of a[k][m] · panel[k][j], both packed
  void (*tile)(int rows, const T* a, const T* panel, i64 depth, T* c, i64 ldc, int cols, bool add,
               const Ahead<T>& ahead);
  void (*pack)(const T* w, i64 ld, i64 depth, i64 cols, T* panel);  // all panels of so many columns
  void (*pack_rows)(const T* a, i64 ld, i64 depth, int cols, int wide, T* block);
  void (*pack_transposed)(const T* w, i64 ld, i64 depth, int cols, int vectors, T* panel);
  void (*glu)(const T* before, i64 rows, i64 hidden, T* out);
  void (*glu_backward)(const T* before, const T* d_out, i64 rows, i64 hidden, T* d_before);
  void (*spread)(const T* grad, const i64* token, const T* scale, const T* out, i64 rows, i64 width, T* back, T* dots);
  void (*gather_sum)(const T* rows, const i64* place, const T* weight, i64 k, i64 tokens, i64 first, i64 last,
                     i64 width, T* y);
};

}  // namespace sparsight
