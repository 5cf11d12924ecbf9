// Sparse convolution in two dimensions, NCHW, one group.
//
// NCHW already has positions innermost, so nothing is transposed. There are two ways: conv_direct.cpp for a stride of
// 1 without row blocks, and conv_unfold.cpp for everything.
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

// y [batch, outputs, out_h, out_w]; the plan is that of the weight seen as (outputs, channels*kh*kw), and its unit
// kernel_h * kernel_w.
template <class T>
void conv_forward(const Plan& plan, const ConvShape& shape, const T* x, const T* values, const T* bias, T* y,
                  int threads);

// dx and dvalues may be null. The plan says which way to go; the direct one needs a stride of 1.
template <class T>
void conv_backward(const Plan& plan, const ConvShape& shape, const T* dy, const T* x, const T* values, T* dx,
                   T* dvalues, int threads);

// The two ways, called by the functions above.
template <class T>
void direct_forward(const Plan&, const ConvShape&, const T* x, const T* values, const T* bias, T* y, int threads);
template <class T>
void direct_backward(const Plan&, const ConvShape&, const T* dy, const T* x, const T* values, T* dx, T* dvalues,
                     int threads);
template <class T>
void unfolded_forward(const Plan&, const ConvShape&, const T* x, const T* values, const T* bias, T* y, int threads);
template <class T>
void unfolded_backward(const Plan&, const ConvShape&, const T* dy, const T* x, const T* values, T* dx, T* dvalues,
                       int threads);

}  // namespace sparsight
