#include "index.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "select.h"

namespace sparsight {

template <class T>
void best(const T* scores, const i64* positions, i64 n, i64 count, u64 seed, std::uint8_t* mask) {
  std::fill_n(mask, n, std::uint8_t(count >= n));
  if (count <= 0 || count >= n) return;
  // Partition by score alone, which is quick, and settle ties at the boundary by their hash.
  std::vector<T> ranked(scores, scores + n);
  const T threshold = kth_largest(ranked, count);
  std::vector<i64> tied;
  i64 above = 0;
  for (i64 i = 0; i < n; ++i) {
    mask[i] = scores[i] > threshold;
    above += mask[i];
    if (scores[i] == threshold) tied.push_back(i);
  }
  const i64 wanted = count - above;
  const auto first = [positions, seed](i64 a, i64 b) {
    return position_hash(u64(positions[a]), seed) < position_hash(u64(positions[b]), seed);
  };
  if (wanted < i64(tied.size())) std::nth_element(tied.begin(), tied.begin() + wanted - 1, tied.end(), first);
  for (i64 i = 0; i < wanted; ++i) mask[tied[i]] = 1;
}

template void best<float>(const float*, const i64*, i64, i64, u64, std::uint8_t*);
template void best<double>(const double*, const i64*, i64, i64, u64, std::uint8_t*);

void chosen(const i64* positions, const std::uint8_t* mask, i64 n, i64 count, i64* out) {
  i64 next = 0;
  for (i64 i = 0; i < n && next < count; ++i) {
    out[next] = positions[i];
    next += mask[i];
  }
}

template <class T>
bool moved(const T* before, i64 count, const i64* source, i64 n, T* after) {
  for (i64 i = 0; i < n; ++i) {
    if (source[i] >= count) return false;
    after[i] = source[i] < 0 ? T(0) : before[source[i]];
  }
  return true;
}

template bool moved<float>(const float*, i64, const i64*, i64, float*);
template bool moved<double>(const double*, i64, const i64*, i64, double*);

void merge(const i64* a, i64 a_count, const i64* b, i64 b_count, i64* out) {
  std::merge(a, a + a_count, b, b + b_count, out);
}

void csr_of(const i64* positions, i64 n, i64 rows, i64 fan_in, i32* crow, i32* col) {
  i64 i = 0;
  for (i64 row = 0; row < rows; ++row) {
    crow[row] = i32(i);
    const i64 begin = row * fan_in, end = begin + fan_in;
    for (; i < n && positions[i] < end; ++i) col[i] = i32(positions[i] - begin);
  }
  crow[rows] = i32(i);
}

void positions_of(const i32* crow, const i32* col, i64 rows, i64 fan_in, i64* positions) {
  for (i64 row = 0; row < rows; ++row)
    for (i32 i = crow[row]; i < crow[row + 1]; ++i) positions[i] = row * fan_in + col[i];
}

void indices_in(const i64* before, i64 before_count, const i64* after, i64 after_count, i64* out) {
  i64 b = 0;
  for (i64 i = 0; i < after_count; ++i) {
    while (b < before_count && before[b] < after[i]) ++b;
    out[i] = b < before_count && before[b] == after[i] ? b : -1;
  }
}

void uniform(i64 first, i64 n, u64 seed, double* out) {
  for (i64 i = 0; i < n; ++i) {
    // As in chance.py: the order of the hash with its sign bit turned, in the 53 bits of a double.
    const u64 hash = position_hash(u64(first + i), seed) ^ (u64(1) << 63);
    out[i] = double(hash >> 11) * 0x1p-53;
  }
}

void set_bits(const i64* positions, i64 n, std::uint8_t* bits) {
  for (i64 i = 0; i < n; ++i) bits[positions[i] >> 3] |= std::uint8_t(1u << (positions[i] & 7));
}

}  // namespace sparsight
