// What a rewiring does to sorted positions, in one pass each.
#pragma once

#include <cstdint>

#include "topk.h"

namespace sparsight {

// mask[i] = 1 for the `count` best of n: score descending, then hash of the position ascending.
template <class T>
void best(const T* scores, const i64* positions, i64 n, i64 count, u64 seed, std::uint8_t* mask);

// The positions whose mask is 1; `count` of them.
void chosen(const i64* positions, const std::uint8_t* mask, i64 n, i64 count, i64* out);

// after[i] = before[source[i]], zero where the source is negative; false where one lies outside.
template <class T>
bool moved(const T* before, i64 count, const i64* source, i64 n, T* after);

// Two sorted vectors without a common element into one.
void merge(const i64* a, i64 a_count, const i64* b, i64 b_count, i64* out);

// CSR of sorted positions (row * fan_in + column).
void csr_of(const i64* positions, i64 n, i64 rows, i64 fan_in, i32* crow, i32* col);

// And back.
void positions_of(const i32* crow, const i32* col, i64 rows, i64 fan_in, i64* positions);

// For each of `after`, its index in `before` or -1; both sorted.
void indices_in(const i64* before, i64 before_count, const i64* after, i64 after_count, i64* out);

// For the positions first, first + 1, ... a number in [0, 1) from their hash.
void uniform(i64 first, i64 n, u64 seed, double* out);

// Sets one bit for each position.
void set_bits(const i64* positions, i64 n, std::uint8_t* bits);

}  // namespace sparsight
