// The k largest |scores| outside a kept set, from blocks of rows of a matrix that is never held whole.
//
// The order is total: score descending, then a hash of the position ascending. So the answer is that of one sort
// over the whole matrix, whatever the blocks and their order.
#pragma once

#include <cstdint>
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
  // crow, col: the kept set, validated CSR over (rows, cols); copied.
  TopK(i64 k, i64 rows, i64 cols, const i32* crow, const i32* col, u64 seed);

  // scores: `count` rows of the matrix from first_row on. A NaN never enters.
  template <class T>
  void update(const T* scores, i64 first_row, i64 count);

  // Sorts and trims; then positions and scores can be read. More updates may follow.
  i64 finish();
  void copy(std::int64_t* positions, double* scores) const;

  i64 rows() const { return rows_; }
  i64 cols() const { return cols_; }

 private:
  struct Entry {
    double score;
    u64 hash;
    i64 position;
    bool operator<(const Entry& o) const { return score != o.score ? score > o.score : hash < o.hash; }
  };
  void trim();

  i64 k_, rows_, cols_;
  u64 seed_;
  std::vector<i32> crow_, col_;
  std::vector<Entry> found_;
  double floor_ = 0;  // a score below it cannot be among the k; 0 admits all
};

}  // namespace sparsight
