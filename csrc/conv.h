// Sparse convolution in two dimensions, NCHW, one group.
//
// A tile is a run of output positions. NCHW already has positions innermost, so nothing is transposed: a tile of
// the unfolded input, [channels*kh*kw][stride], is copied row by row, and the linear kernels do the rest.
#pragma once

#include "plan.h"

namespace sparsight {

struct ConvShape {
  i64 batch, channels, height, width;  // of the input
  i64 kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  i64 out_h, out_w;
  i64 area() const { return out_h * out_w; }
  i64 taps() const { return kernel_h * kernel_w; }
};

// y [batch, outputs, out_h, out_w]; the plan is that of the weight seen as (outputs, channels*kh*kw).
template <class T>
void conv_forward(const Plan& plan, const ConvShape& shape, const T* x, const T* values, const T* bias, T* y,
                  int threads);

// dx and dvalues may be null. The plan's unit must have been kernel_h * kernel_w: threads share out channels.
template <class T>
void conv_backward(const Plan& plan, const ConvShape& shape, const T* dy, const T* x, const T* values, T* dx,
                   T* dvalues, int threads);

}  // namespace sparsight
