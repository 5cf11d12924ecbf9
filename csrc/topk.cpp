#include "topk.h"

#include <algorithm>
#include <cmath>

namespace sparsight {

TopK::TopK(i64 k, i64 rows, i64 cols, const i32* crow, const i32* col, u64 seed)
    : k_(k), rows_(rows), cols_(cols), seed_(seed), crow_(crow, crow + rows + 1), col_(col, col + crow[rows]) {}

// Keeps the best k and raises the floor to the worst of them.
void TopK::trim() {
  if (i64(found_.size()) <= k_) return;
  std::nth_element(found_.begin(), found_.begin() + k_ - 1, found_.end());
  found_.resize(k_);
  floor_ = found_[k_ - 1].score;
}

template <class T>
void TopK::update(const T* scores, i64 first_row, i64 count) {
  if (k_ <= 0) return;
  // Trimming when twice k have come makes its cost linear in what was admitted.
  const std::size_t full = std::size_t(std::max<i64>(2 * k_, 1024));
  for (i64 i = 0; i < count; ++i) {
    const i64 row = first_row + i;
    const T* s = scores + i * cols_;
    i32 kept = crow_[row];
    const i32 kept_end = crow_[row + 1];
    i64 c = 0;
    while (c < cols_) {
      const i64 stop = kept < kept_end ? col_[kept] : cols_;
      for (; c < stop; ++c) {
        const double score = std::fabs(double(s[c]));
        if (!(score >= floor_)) continue;
        const i64 position = row * cols_ + c;
        found_.push_back({score, position_hash(u64(position), seed_), position});
        if (found_.size() >= full) trim();
      }
      ++c;  // over the kept one
      ++kept;
    }
  }
}

i64 TopK::finish() {
  trim();
  if (k_ <= 0) found_.clear();
  std::sort(found_.begin(), found_.end());
  return i64(found_.size());
}

void TopK::copy(std::int64_t* positions, double* scores) const {
  for (std::size_t i = 0; i < found_.size(); ++i) {
    positions[i] = found_[i].position;
    scores[i] = found_[i].score;
  }
}

template void TopK::update<float>(const float*, i64, i64);
template void TopK::update<double>(const double*, i64, i64);

}  // namespace sparsight
