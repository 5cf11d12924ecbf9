// Cuts the products of all groups into tasks, packs what a task reads often, and runs tiles over it.
#include "grouped.h"

#include <algorithm>
#include <atomic>

#include "threads.h"

#define SPS_DECLARE(NAME)                              \
  namespace sparsight::NAME {                          \
  extern const ProductOps<float> float_products;       \
  extern const ProductOps<double> double_products;     \
  }
SPS_DECLARE(isa_portable)
#if defined(SPARSIGHT_X86)
SPS_DECLARE(isa_avx2)
SPS_DECLARE(isa_avx512)
#elif defined(SPARSIGHT_ARM)
SPS_DECLARE(isa_neon)
#endif

namespace sparsight {

namespace {

template <class T>
const ProductOps<T>& table(const ProductOps<float>& single, const ProductOps<double>& twice) {
  if constexpr (sizeof(T) == 4)
    return single;
  else
    return twice;
}

template <class T>
const ProductOps<T>& products() {
  switch (isa()) {
#if defined(SPARSIGHT_X86)
    case Isa::avx2: return table<T>(isa_avx2::float_products, isa_avx2::double_products);
    case Isa::avx512: return table<T>(isa_avx512::float_products, isa_avx512::double_products);
#elif defined(SPARSIGHT_ARM)
    case Isa::neon: return table<T>(isa_neon::float_products, isa_neon::double_products);
#endif
    default: return table<T>(isa_portable::float_products, isa_portable::double_products);
  }
}

constexpr i64 kRowBytes = 256 << 10;  // of the rows that a task has packed: part of an L2
constexpr i64 kOutputs = 192;          // outputs whose weights stay in the cache while all rows pass over them
constexpr i64 kDepth = 512;           // rows that a gradient takes in one go
constexpr i64 kSweep = 4;             // blocks of a gradient's rows that are packed together

// A piece of one group's work: rows and panels of a product, or blocks of a gradient's rows.
struct Task {
  i64 group, row, rows, first, last;
};

// Tasks are taken in order by whoever is free.
template <class Body>
void run(const std::vector<Task>& tasks, int threads, Body&& body) {
  std::atomic<std::size_t> next{0};
  const int team = int(std::min<std::size_t>(std::size_t(threads), tasks.size()));
  parallel(team, [&](int, int) {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) body(tasks[i]);
  });
}

// How many steps make up a task, so that every thread gets several tasks.
i64 steps_per_task(i64 steps, i64 groups, int threads) {
  if (threads <= 1) return steps;
  const i64 pieces = std::max<i64>(1, 6 * threads / std::max<i64>(groups, 1));
  return std::max<i64>(2, (steps + pieces - 1) / pieces);
}

}  // namespace

template <class T>
void grouped_product(const std::vector<Group<T>>& groups, const T* x, i64 inputs, i64 outputs, T* y, int threads) {
  const ProductOps<T>& ops = products<T>();
  const i64 wide = 3 * ops.lanes;
  const i64 chunk = std::max<i64>(1, kRowBytes / i64(sizeof(T)) / inputs / wide) * wide;
  const i64 blocks = (outputs + kOutputs - 1) / kOutputs, step = steps_per_task(blocks, i64(groups.size()), threads);
  std::vector<Task> tasks;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (i64 row = 0; row < groups[g].rows; row += chunk)
      for (i64 first = 0; first < blocks; first += step)
        tasks.push_back({i64(g), row, std::min(chunk, groups[g].rows - row), first, std::min(first + step, blocks)});
  run(tasks, threads, [&](const Task& task) {
    const Group<T>& group = groups[std::size_t(task.group)];
    const T* from = x + (group.begin + task.row) * inputs;
    T* to = y + (group.begin + task.row) * outputs;
    // Vectors of rows in threes and twos where it can be: a single one would wait for its own sums.
    struct Part {
      T* packed;
      i64 row;
      int vectors, count;
    };
    const i64 vectors = (task.rows + ops.lanes - 1) / ops.lanes;
    T* packed = scratch(Use::packed).template get<T>(inputs * vectors * ops.lanes);
    std::vector<Part> parts;
    for (i64 left = vectors, row = 0; left > 0;) {
      const int take = int(left == 4 ? 2 : std::min<i64>(left, 3));
      const int count = int(std::min<i64>(take * ops.lanes, task.rows - row));
      ops.pack_transposed(from + row * inputs, inputs, inputs, count, take, packed);
      parts.push_back({packed, row, take, count});
      packed += inputs * take * ops.lanes;
      left -= take, row += count;
    }
    for (i64 b = task.first; b < task.last; ++b) {
      const i64 o = b * kOutputs;
      for (const Part& part : parts)
        ops.times_rows(group.weight + o * inputs, inputs, std::min(kOutputs, outputs - o), part.packed, part.vectors,
                       part.count, to + part.row * outputs + o, outputs);
    }
  });
}

template <class T>
void grouped_gradient(const std::vector<Group<T>>& groups, const T* dy, const T* x, i64 inputs, i64 outputs,
                      int threads) {
  const ProductOps<T>& ops = products<T>();
  const i64 panels = (inputs + ops.cols - 1) / ops.cols;
  const i64 blocks = (outputs + ops.rows - 1) / ops.rows;
  const i64 step = steps_per_task(blocks, i64(groups.size()), threads);
  std::vector<Task> tasks;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (i64 first = 0; groups[g].weight && first < blocks; first += step)
      tasks.push_back({i64(g), 0, groups[g].rows, first, std::min(first + step, blocks)});
  run(tasks, threads, [&](const Task& task) {
    const Group<T>& group = groups[std::size_t(task.group)];
    for (i64 row = 0; row < task.rows; row += kDepth) {
      const i64 depth = std::min(kDepth, task.rows - row), begin = group.begin + row;
      T* packed = scratch(Use::packed).template get<T>(panels * depth * ops.cols);
      T* block = scratch(Use::values).template get<T>(kSweep * depth * ops.rows + ops.lanes);
      ops.pack(x + begin * inputs, inputs, depth, inputs, packed);
      for (i64 b = task.first; b < task.last; b += kSweep) {
        const i64 o = b * ops.rows, span = std::min(outputs, std::min(b + kSweep, task.last) * ops.rows) - o;
        const T* from = dy + begin * outputs + o;
        ops.pack_rows(from, outputs, depth, int(span), int(std::min<i64>(ops.lanes, outputs - o - span)), block);
        const i64 line = 64 / i64(sizeof(T));
        i64 turn = 0;
        for (i64 r = 0; r < span; r += ops.rows)
          for (i64 p = 0; p < panels; ++p, ++turn)
            ops.tile(int(std::min<i64>(ops.rows, span - r)), block + r * depth, packed + p * depth * ops.cols, depth,
                     group.weight + (o + r) * inputs + p * ops.cols, inputs,
                     int(std::min<i64>(ops.cols, inputs - p * ops.cols)), row > 0,
                     turn < 4 ? Ahead<T>{from + span + turn * line, outputs, 16 * outputs} : Ahead<T>{packed, 0, 0});
      }
    }
  });
}

template <class T>
void glu(const T* before, i64 rows, i64 hidden, T* out, int threads) {
  parallel(threads, [&](int thread, int team) {
    const i64 a = split(rows, team, thread), b = split(rows, team, thread + 1);
    products<T>().glu(before + a * 2 * hidden, b - a, hidden, out + a * hidden);
  });
}

template <class T>
void glu_backward(const T* before, const T* d_out, i64 rows, i64 hidden, T* d_before, int threads) {
  parallel(threads, [&](int thread, int team) {
    const i64 a = split(rows, team, thread), b = split(rows, team, thread + 1);
    products<T>().glu_backward(before + a * 2 * hidden, d_out + a * hidden, b - a, hidden, d_before + a * 2 * hidden);
  });
}

template <class T>
void spread(const T* grad, const i64* token, const T* scale, const T* out, i64 rows, i64 width, T* back, T* dots,
            int threads) {
  parallel(threads, [&](int thread, int team) {
    const i64 a = split(rows, team, thread), b = split(rows, team, thread + 1);
    products<T>().spread(grad, token + a, scale + a, out + a * width, b - a, width, back + a * width,
                         dots ? dots + a : nullptr);
  });
}

template <class T>
void gather_sum(const T* rows, const i64* place, const T* weight, i64 k, i64 tokens, i64 width, T* y, int threads) {
  parallel(threads, [&](int thread, int team) {
    products<T>().gather_sum(rows, place, weight, k, tokens, split(tokens, team, thread),
                             split(tokens, team, thread + 1), width, y);
  });
}

#define SPS_INSTANTIATE(T)                                                                                       \
  template void grouped_product<T>(const std::vector<Group<T>>&, const T*, i64, i64, T*, int);                   \
  template void grouped_gradient<T>(const std::vector<Group<T>>&, const T*, const T*, i64, i64, int);            \
  template void glu<T>(const T*, i64, i64, T*, int);                                                             \
  template void glu_backward<T>(const T*, const T*, i64, i64, T*, int);                                          \
  template void spread<T>(const T*, const i64*, const T*, const T*, i64, i64, T*, T*, int);                      \
  template void gather_sum<T>(const T*, const i64*, const T*, i64, i64, i64, T*, int);
SPS_INSTANTIATE(float)
SPS_INSTANTIATE(double)

}  // namespace sparsight
