// The k-th largest of many numbers, without sorting them.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "ops.h"

namespace sparsight {

// 1 <= k <= values.size(); no NaN. Reorders `values`.
//
// A sample gives two numbers between which the answer almost surely lies; one pass without branches counts what is
// above and collects what is between, and only that is partitioned. Where the sample misled, everything is.
template <class T>
T kth_largest(std::vector<T>& values, i64 k) {
  constexpr i64 kSample = 1024, kMargin = 64;  // a rank in the sample has a deviation of at most 16
  const i64 n = i64(values.size());
  const auto nth = [](std::vector<T>& all, i64 rank) {
    std::nth_element(all.begin(), all.begin() + rank - 1, all.end(), std::greater<T>());
    return all[rank - 1];
  };
  if (n < 8 * kSample) return nth(values, k);
  std::vector<T> sample(kSample);
  for (i64 i = 0; i < kSample; ++i) sample[i] = values[n * i / kSample];
  std::sort(sample.begin(), sample.end(), std::greater<T>());
  const i64 rank = k * kSample / n;
  const T high = rank < kMargin ? std::numeric_limits<T>::infinity() : sample[rank - kMargin];
  const T low = rank + kMargin >= kSample ? -std::numeric_limits<T>::infinity() : sample[rank + kMargin];
  std::vector<T> between(n);
  i64 above = 0, inside = 0;
  for (i64 i = 0; i < n; ++i) {
    const T v = values[i];
    above += v > high;
    between[inside] = v;
    inside += (v <= high) & (v >= low);
  }
  if (above >= k || above + inside < k) return nth(values, k);
  between.resize(inside);
  return nth(between, k - above);
}

}  // namespace sparsight
