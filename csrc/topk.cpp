#include "topk.h"

#include <algorithm>
#include <cmath>

namespace sparsight {

namespace {

constexpr i64 kStep = 16;
constexpr i64 kLine = 64 * kStep;

// The floor may have come from a piece of another type: round it down, never up.
template <class T>
T at_most(double bound) {
  const T rounded = T(bound);
  return double(rounded) > bound ? std::nextafter(rounded, -std::numeric_limits<T>::infinity()) : rounded;
}

}  // namespace

// Keeps the best k and raises the floor to the worst of them.
void TopK::trim() {
  if (i64(found_.size()) <= k_) return;
  std::nth_element(found_.begin(), found_.begin() + k_ - 1, found_.end(), before());
  found_.resize(k_);
  floor_ = found_[k_ - 1].score;
}

template <class T>
void TopK::update(const T* scores, i64 first, i64 count) {
  if (k_ <= 0) return;
  // Trimming when twice k have come makes its cost linear in what was admitted.
  const std::size_t full = std::size_t(std::max<i64>(2 * k_, 1024));
  const T nothing = std::numeric_limits<T>::quiet_NaN();
  found_.reserve(full);
  T line[kLine];
  auto kept = std::lower_bound(kept_.begin(), kept_.end(), first);
  for (i64 at = 0; at < count; at += kLine) {
    const i64 size = std::min(kLine, count - at);
    std::copy_n(scores + at, size, line);
    std::fill(line + size, line + kLine, nothing);
    for (; kept != kept_.end() && *kept < first + at + size; ++kept) line[*kept - first - at] = nothing;
    // Soon nearly every step lies below the floor as a whole, which is seen without a branch for each score.
    for (i64 c0 = 0; c0 < size; c0 += kStep) {
      const T floor = at_most<T>(floor_);
      int any = 0;
      for (i64 c = c0; c < c0 + kStep; ++c) any |= line[c] >= floor;
      if (!any) continue;
      for (i64 c = c0; c < c0 + kStep; ++c) {
        if (!(double(line[c]) >= floor_)) continue;
        found_.push_back({double(line[c]), first + at + c});
        if (found_.size() >= full) trim();
      }
    }
  }
}

i64 TopK::finish() {
  trim();
  std::sort(found_.begin(), found_.end(), [](const Entry& a, const Entry& b) { return a.position < b.position; });
  return i64(found_.size());
}

void TopK::copy(i64* positions) const {
  for (std::size_t i = 0; i < found_.size(); ++i) positions[i] = found_[i].position;
}

template void TopK::update<float>(const float*, i64, i64);
template void TopK::update<double>(const double*, i64, i64);

}  // namespace sparsight
