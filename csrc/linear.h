// The three products of a sparse linear layer. No function allocates anything but scratch.
#pragma once

#include "plan.h"

namespace sparsight {

// y = x Wᵀ (+ bias). bias may be null.
template <class T>
void linear_forward(const Plan& plan, const T* x, i64 batch, const T* values, const T* bias, T* y, int threads);

// dx = dy W, dvalues = (dyᵀ x) at the weights, dbias = sum of dy; each may be null, and x too when dvalues is.
template <class T>
void linear_backward(const Plan& plan, const T* dy, const T* x, i64 batch, const T* values, T* dx, T* dvalues,
                     T* dbias, int threads);

}  // namespace sparsight
