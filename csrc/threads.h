// Threads and scratch memory for the drivers.
#pragma once

#include <omp.h>

#include <cstdlib>
#include <new>

#include "ops.h"

namespace sparsight {

// Runs body(thread, threads) on `threads` of them, with omp_get_num_threads() the team that really came.
// One thread never enters OpenMP: a forked child of a process that used it would hang there.
template <class Body>
void parallel(int threads, Body&& body) {
  if (threads <= 1) {
    body(0, 1);
    return;
  }
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}

inline void barrier(int threads) {
  if (threads > 1) {
#pragma omp barrier
  }
}

// The k-th of `parts` nearly equal ranges of n.
inline i64 split(i64 n, i64 parts, i64 k) { return n * k / parts; }

// Memory that a thread keeps between calls, because fresh pages cost more than the tiles they hold.
class Scratch {
 public:
  ~Scratch() { std::free(at_); }
  template <class T>
  T* get(i64 count) {
    const std::size_t need = (std::size_t(count > 0 ? count : 1) * sizeof(T) + 4095) / 4096 * 4096;
    if (need > size_) {
      std::free(at_);
      size_ = 0;
      at_ = std::aligned_alloc(4096, need);
      if (!at_) throw std::bad_alloc();
      size_ = need;
    }
    return static_cast<T*>(at_);
  }

 private:
  void* at_ = nullptr;
  std::size_t size_ = 0;
};

enum class Use { input, output, values, packed, index };
inline Scratch& scratch(Use use) {
  thread_local Scratch each[5];
  return each[int(use)];
}

}  // namespace sparsight
