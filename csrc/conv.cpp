#include "conv.h"

#include <algorithm>

namespace sparsight {

template <class T>
void conv_forward(const Plan& plan, const ConvShape& s, const T* x, const T* values, const T* bias, T* y,
                  int threads) {
  if (s.batch == 0 || plan.outputs == 0) return;
  (plan.kind == Kind::direct ? direct_forward<T> : unfolded_forward<T>)(plan, s, x, values, bias, y, threads);
}

template <class T>
void conv_backward(const Plan& plan, const ConvShape& s, const T* dy, const T* x, const T* values, T* dx, T* dvalues,
                   int threads) {
  if (s.batch == 0) {
    if (dvalues) std::fill(dvalues, dvalues + plan.weights * plan.block, T(0));
    return;
  }
  (plan.kind == Kind::direct ? direct_backward<T> : unfolded_backward<T>)(plan, s, dy, x, values, dx, dvalues, threads);
}

#define SPS_INSTANTIATE(T)                                                                             \
  template void conv_forward<T>(const Plan&, const ConvShape&, const T*, const T*, const T*, T*, int); \
  template void conv_backward<T>(const Plan&, const ConvShape&, const T*, const T*, const T*, T*, T*, int);
SPS_INSTANTIATE(float)
SPS_INSTANTIATE(double)

}  // namespace sparsight
