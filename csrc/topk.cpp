#include "topk.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "select.h"

namespace sparsight {

namespace {

constexpr i64 kStep = 16;
constexpr i64 kLine = 64 * kStep;
constexpr i64 kSample = 2048;

// The floor may have come from a piece of another type: round it down, never up.
template <class T>
T at_most(double bound) {
  const T rounded = T(bound);
  return double(rounded) > bound ? std::nextafter(rounded, -std::numeric_limits<T>::infinity()) : rounded;
}

}  // namespace

// Keeps the best k, in the order in which they came, and raises the floor to the worst of them.
void TopK::trim() {
  if (size_ <= k_) return;
  std::vector<double> scores(size_);
  for (i64 i = 0; i < size_; ++i) scores[i] = found_[i].score;
  floor_ = kth_largest(scores, k_);
  std::vector<u64> tied;
  i64 above = 0;
  for (i64 i = 0; i < size_; ++i) {
    above += found_[i].score > floor_;
    if (found_[i].score == floor_) tied.push_back(position_hash(u64(found_[i].position), seed_));
  }
  // Among equals those with the smallest hash stay; no two hashes are the same.
  const i64 wanted = k_ - above;
  std::nth_element(tied.begin(), tied.begin() + wanted - 1, tied.end());
  const u64 last = tied[wanted - 1];
  i64 kept = 0;
  for (i64 i = 0; i < size_; ++i) {
    const Entry entry = found_[i];
    found_[kept] = entry;
    kept += entry.score > floor_ || (entry.score == floor_ && position_hash(u64(entry.position), seed_) <= last);
  }
  size_ = kept;
}

// A floor that a bit more than k of what was found and of these scores reach, as far as a sample can tell; minus
// infinity where a sample would spare no work.
template <class T>
T TopK::guess(const T* scores, i64 count) const {
  const T none = -std::numeric_limits<T>::infinity();
  if (count < 4 * kSample) return none;
  std::vector<std::pair<T, double>> sample;  // a score, and how many it stands for
  sample.reserve(2 * kSample);
  const double each = double(count) / kSample, found = double(size_) / kSample;
  for (i64 i = 0; i < kSample; ++i) {
    const T score = scores[count * i / kSample];
    if (score == score) sample.push_back({score, each});
    if (size_) sample.push_back({at_most<T>(found_[size_ * i / kSample].score), found});
  }
  std::sort(sample.begin(), sample.end(), std::greater<std::pair<T, double>>());
  double missing = double(k_) + 4 * std::sqrt(double(k_) * each) + 8 * each;
  for (const auto& [score, weight] : sample)
    if ((missing -= weight) <= 0) return score;
  return none;
}

// Whether k of those found reach it: then whatever does not can be passed over.
bool TopK::holds(double floor) const {
  i64 reached = 0;
  for (i64 i = 0; i < size_; ++i) reached += found_[i].score >= floor;
  return reached >= k_;
}

template <class T>
void TopK::update(const T* scores, i64 first, i64 count) {
  if (k_ <= 0) return;
  const i64 before = size_;
  if (scan(scores, first, count, guess(scores, count))) return;
  size_ = before;  // too high a guess: what was passed over may be needed
  scan(scores, first, count, -std::numeric_limits<T>::infinity());
}

// False where the guess turned out too high; what was found before is then untouched.
template <class T>
bool TopK::scan(const T* scores, i64 first, i64 count, T guess) {
  // Trimming when several times k have come makes its cost linear in what was admitted.
  const i64 full = std::max(3 * k_, kLine);
  const T nothing = std::numeric_limits<T>::quiet_NaN();
  bool safe = guess == -std::numeric_limits<T>::infinity();
  if (found_.empty()) found_.resize(full + kLine);
  T line[kLine];
  auto kept = std::lower_bound(kept_.begin(), kept_.end(), first);
  for (i64 at = 0; at < count; at += kLine) {
    const i64 size = std::min(kLine, count - at);
    std::copy_n(scores + at, size, line);
    std::fill(line + size, line + kLine, nothing);
    for (; kept != kept_.end() && *kept < first + at + size; ++kept) line[*kept - first - at] = nothing;
    const T floor = std::max(guess, at_most<T>(floor_));
    Entry* next = found_.data() + size_;
    for (i64 c0 = 0; c0 < size; c0 += kStep) {
      // Soon most steps lie below the floor as a whole; in the others no branch is worth its misprediction.
      int any = 0;
      for (i64 c = c0; c < c0 + kStep; ++c) any |= line[c] >= floor;
      if (!any) continue;
      for (i64 c = c0; c < c0 + kStep; ++c) {
        *next = {double(line[c]), first + at + c};
        next += line[c] >= floor;
      }
    }
    size_ = next - found_.data();
    if (size_ < full) continue;
    if (!safe && !(safe = holds(double(guess)))) return false;
    trim();
  }
  return safe || holds(double(guess));
}

i64 TopK::finish() {
  trim();
  const auto before = [](const Entry& a, const Entry& b) { return a.position < b.position; };
  const auto end = found_.begin() + size_;  // sorted already, unless the pieces came out of order
  if (!std::is_sorted(found_.begin(), end, before)) std::sort(found_.begin(), end, before);
  return size_;
}

void TopK::copy(i64* positions) const {
  for (i64 i = 0; i < size_; ++i) positions[i] = found_[i].position;
}

template void TopK::update<float>(const float*, i64, i64);
template void TopK::update<double>(const double*, i64, i64);

}  // namespace sparsight
