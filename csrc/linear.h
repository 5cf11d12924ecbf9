// The three products of a sparse linear layer. No function allocates anything but scratch.
#pragma once

#include "plan.h"

namespace sparsight {

// y = x Wᵀ (+ bias) (relu). bias may be null.
template <class T>
void linear_forward(const Plan& plan, const T* x, i64 batch, const T* values, const T* bias, bool relu, T* y,
                    int threads);

// dx = dy W, dvalues = (dyᵀ x) at the weights, dbias = sum of dy; each may be null, and x too when dvalues is.
// gate: the output y of a fused relu, or null.
template <class T>
void linear_backward(const Plan& plan, const T* dy, const T* gate, const T* x, i64 batch, const T* values, T* dx,
                     T* dvalues, T* dbias, int threads);

}  // namespace sparsight
