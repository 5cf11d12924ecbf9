// What one core can do, and how near the kernels come: `make limits`, with nothing else running.
//
// Nanoseconds for 16 floats: a multiply-add in registers, a load from each cache, and then, for one weight and 16 rows
// of a batch, the forward and the backward kernel over one tile of 1024→1024, whose rows lie transposed already.
// Transpositions in GB/s, beside a copy. Needs AVX-512. Minima and medians, all taken by turns.
#define SPS_ISA limits
#include "dispatch.h"
#include "plan.h"
#include "tiles.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace sparsight {
template <>
const Ops<float>& ops<float>() {  // a plan wants to know how wide vectors are, no more
  static const Ops<float> table = [] {
    Ops<float> o{};
    o.lanes = 16;
    return o;
  }();
  return table;
}
}  // namespace sparsight

using namespace sparsight;
using namespace sparsight::SPS_ISA;

namespace {

constexpr int kSize = 1024, kRows = 64, kTurns = 200;

struct Case {
  std::string name, unit;
  double work;  // that a call does: vectors, or bytes
  bool rate;    // bytes a nanosecond instead of nanoseconds a vector
  std::function<void()> call;
  std::vector<double> took;
};

float* memory(i64 floats) {
  auto* p = static_cast<float*>(std::aligned_alloc(4096, (floats * 4 + 4095) / 4096 * 4096));
  for (i64 i = 0; i < floats; ++i) p[i] = float(i % 101) * 0.01f - 0.5f;
  return p;
}

void multiply_adds(i64 count) {
  // Of zeros: what happens to lie in the registers may be denormal, and slow.
  asm volatile("vzeroall\n vpxord %%zmm30, %%zmm30, %%zmm30\n vpxord %%zmm31, %%zmm31, %%zmm31\n" ::: "memory");
#define SPS_ONE(n) "vfmadd231ps %%zmm31, %%zmm30, %%zmm" #n "\n"
  for (i64 i = 0; i < count; i += 12)
    asm volatile(SPS_ONE(0) SPS_ONE(1) SPS_ONE(2) SPS_ONE(3) SPS_ONE(4) SPS_ONE(5) SPS_ONE(6) SPS_ONE(7) SPS_ONE(8)
                     SPS_ONE(9) SPS_ONE(10) SPS_ONE(11)::: "memory");
#undef SPS_ONE
}

void loads(const float* from, i64 floats) {
#define SPS_TWO(a, b) "vmovups " #a "(%0), %%zmm0\n vmovups " #b "(%0), %%zmm1\n"
  for (const float* p = from; p < from + floats; p += 128)
    asm volatile(SPS_TWO(0, 64) SPS_TWO(128, 192) SPS_TWO(256, 320) SPS_TWO(384, 448)::"r"(p) : "memory");
#undef SPS_TWO
}

// A layer with this share of its weights, in blocks of so many rows, and both kernels over a tile of it.
void add_kernels(std::vector<Case>& cases, double density, int block) {
  std::vector<i32> crow{0}, col;
  std::mt19937 random(1);
  std::uniform_real_distribution<double> uniform;
  for (int r = 0; r < kSize / block; ++r) {
    for (int c = 0; c < kSize; ++c)
      if (uniform(random) < density) col.push_back(c);
    crow.push_back(i32(col.size()));
  }
  auto* plan = new Plan(kSize / block, kSize, crow.data(), col.data(), block, 1, Kind::linear, 0);
  const double vectors = double(plan->weights) * block * kRows / 16;
  float *values = memory(plan->weights * block), *dvalues = memory(plan->weights * block);
  float *x = memory(kSize * kRows), *y = memory(kSize * kRows), *dx = memory(kSize * kRows), *dy = memory(kSize * kRows);
  char name[64];
  std::snprintf(name, sizeof name, "%g %% sparse, blocks of %d", 100 * (1 - density), block);
  cases.push_back({std::string("forward, ") + name, "ns", vectors, false, [=] {
                     const Pass& p = plan->forward;
                     for (i64 q = 0; q < p.panels; ++q)
                       for (i64 c = 0; c < p.chunks; ++c)
                         gather<float>(p.cell(q, c), values, x + q * p.panel * kRows, y, 4, q == 0);
                   }, {}});
  cases.push_back({std::string("backward, ") + name, "ns", vectors, false, [=] {
                     const Pass& p = plan->backward;
                     for (i64 q = 0; q < p.panels; ++q)
                       for (i64 c = 0; c < p.chunks; ++c) {
                         const i64 k = p.first_weight(q, c) * block;
                         backward<float>(p.cell(q, c), values + k, dy + q * p.panel * block * kRows, x, dx, dvalues + k, 4,
                                         q == 0, false);
                       }
                   }, {}});
}

void add_transpositions(std::vector<Case>& cases, i64 batch, i64 width, i64 step) {
  float *x = memory(batch * width), *y = memory(batch * width), *tile = memory(kRows * width);
  const double bytes = double(batch * width) * 4;
  char name[64];
  std::snprintf(name, sizeof name, ", %.1f MB", bytes / 1e6);
  const auto each = [=](auto&& body) {
    for (i64 b = 0; b < batch; b += kRows)
      for (i64 c = 0; c < width; c += step) body(b * width + c);
  };
  cases.push_back({std::string("transpose into a tile") + name, "GB/s", bytes, true, [=] {
                     each([&](i64 at) { load_tile<float>(x + at, width, kRows, step, tile, nullptr); });
                   }, {}});
  cases.push_back({std::string("transpose out of a tile") + name, "GB/s", bytes, true, [=] {
                     each([&](i64 at) { store_tile<float>(tile, kRows, step, nullptr, y + at, width); });
                   }, {}});
  cases.push_back({std::string("copy") + name, "GB/s", bytes, true, [=] { std::memcpy(y, x, std::size_t(bytes)); }, {}});
}

}  // namespace

int main() {
  std::vector<Case> cases;
  // Long enough that a core which has just copied memory is at full width again.
  cases.push_back({"multiply-add in registers", "ns", 12 << 17, false, [] { multiply_adds(12 << 17); }, {}});
  for (const i64 kilobytes : {32, 512}) {
    const i64 floats = kilobytes * 256;
    float* from = memory(floats);
    const i64 times = (64 << 20) / (4 * floats);
    cases.push_back({"load from " + std::to_string(kilobytes) + " KB", "ns", double(times * floats) / 16, false, [=] {
                       for (i64 i = 0; i < times; ++i) loads(from, floats);
                     }, {}});
  }
  for (const double density : {0.2, 0.1, 0.05, 0.01}) add_kernels(cases, density, 1);
  for (const double density : {0.1, 0.05}) add_kernels(cases, density, 8);
  add_transpositions(cases, 512, 1024, 1024);
  add_transpositions(cases, 1024, 3072, 512);
  for (int turn = 0; turn < kTurns; ++turn)
    for (Case& one : cases) {
      one.call();  // what it needs is in the caches again
      const auto begin = std::chrono::steady_clock::now();
      one.call();
      one.took.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count());
    }
  for (Case& one : cases) {
    std::sort(one.took.begin(), one.took.end());
    const auto shown = [&](double ns) { return one.rate ? one.work / ns : ns / one.work; };
    std::printf("%-36s %7.3f %-4s  (median %.3f)\n", one.name.c_str(), shown(one.took[0]), one.unit.c_str(),
                shown(one.took[kTurns / 2]));
  }
}
