// The k best scores outside a kept set, from pieces of a vector that is never held whole.
//
// The order is total: score descending, then a hash of the position ascending. So the answer is that of one sort
// over the whole vector, however it was cut.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "ops.h"

namespace sparsight {

using u64 = std::uint64_t;

// splitmix64's finaliser: a bijection, so two positions never tie.
inline u64 position_hash(u64 position, u64 seed) {
  u64 z = position + seed * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

class TopK {
 public:
  // kept: positions that must not be chosen, sorted; copied.
  TopK(i64 k, const i64* kept, i64 kept_count, u64 seed) : k_(k), seed_(seed), kept_(kept, kept + kept_count) {}

  // scores of the positions first, first + 1, … A NaN never enters.
  template <class T>
  void update(const T* scores, i64 first, i64 count);

  // How many were found, at most k; then they can be read, sorted by position. More updates may follow.
  i64 finish();
  void copy(i64* positions) const;

 private:
  struct Entry {
    double score;
    i64 position;
  };
  template <class T>
  T guess(const T* scores, i64 count) const;
  bool holds(double floor) const;
  template <class T>
  bool scan(const T* scores, i64 first, i64 count, T guess);
  void trim();

  i64 k_;
  u64 seed_;
  std::vector<i64> kept_;
  std::vector<Entry> found_;  // room for three times k and a line; the first size_ are there
  i64 size_ = 0;
  double floor_ = -std::numeric_limits<double>::infinity();  // what is below it cannot be among the k
};

}  // namespace sparsight
