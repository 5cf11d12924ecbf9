// Products of a mixture of experts: many small matrices, each with its own rows, in one call.
#pragma once

#include <vector>

#include "product_ops.h"

namespace sparsight {

// Rows `begin` to `begin + rows` of the inputs and outputs belong to this matrix.
template <class T>
struct Group {
  T* weight;
  i64 begin, rows;
};

// y = x·Wᵀ group by group, W [outputs][inputs].
template <class T>
void grouped_product(const std::vector<Group<T>>& groups, const T* x, i64 inputs, i64 outputs, T* y, int threads);

// W = dyᵀ·x, group by group: [outputs][inputs]. A group whose weight is null is passed over.
template <class T>
void grouped_gradient(const std::vector<Group<T>>& groups, const T* dy, const T* x, i64 inputs, i64 outputs,
                      int threads);

template <class T>
void glu(const T* before, i64 rows, i64 hidden, T* out, int threads);
template <class T>
void glu_backward(const T* before, const T* d_out, i64 rows, i64 hidden, T* d_before, int threads);
template <class T>
void spread(const T* grad, const i64* token, const T* scale, const T* out, i64 rows, i64 width, T* back, T* dots,
            int threads);
template <class T>
void gather_sum(const T* rows, const i64* place, const T* weight, i64 k, i64 tokens, i64 width, T* y, int threads);

}  // namespace sparsight
