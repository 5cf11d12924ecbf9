#include "plan.h"

#include <algorithm>

namespace sparsight {

namespace {

constexpr i64 kPanelBytes = 48 << 10;  // a first-level cache (48 or 32 KiB): some misses cost less than short segments
// Weights in a segment: with fewer, its own loads and stores outweigh the misses. The backward pass has more of
// them, and the sums over lanes at the end of a segment; row blocks going forward wait for no load at all.
constexpr double kForwardWeights = 16, kBlockWeights = 128, kBackwardWeights = 32;
constexpr i64 kMaxPanel = 1 << 16;     // inner indices are 16 bits
constexpr int kForwardUnit = 4, kBackwardUnit = 16;  // weights that the kernels take at a time

constexpr i64 kWholeBytes = 320 << 10;  // of transposed inner rows that may stay in the second-level cache
constexpr i64 kSlabBytes = 128 << 10;   // of them at a time, where they may not
constexpr i64 kStepBytes = 128 << 10;   // of transposed outer rows at a time
constexpr int kSpare = 8;              // entries past the end that a prefetch may look at

i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }

// Bytes of one index, transposed; the same for double, whose tiles have half as many rows.
i64 row_of_tile() { return ops<float>().lanes * i64(sizeof(float)) * kTileVectors; }

i64 choose_panel(i64 inner, i64 outer, i64 weights, int rows, double segment, i64 wish) {
  const i64 row_bytes = row_of_tile() * rows;
  i64 panel = wish;
  if (panel <= 0) {
    const double mean = double(weights) / std::max<i64>(1, outer * inner);
    const double enough = mean > 0 ? segment / (mean * rows) : double(inner);
    panel = std::max<i64>(kPanelBytes / row_bytes, i64(std::min(enough, double(inner))));
    // Panels of about the same size, none a small remainder.
    const i64 count = std::max<i64>(1, (inner + panel / 2) / panel);
    panel = (inner + count - 1) / count;
  }
  return std::max<i64>(1, std::min({panel, inner, kMaxPanel}));
}

// How a tile goes through the cells. A transposition runs at half its speed when what it writes falls out of the
// second-level cache, so only the smaller side of a layer is held as a whole: either the inner rows, while the outer
// ones come and go in steps of a few chunks, or the outer rows, while the inner ones come and go in slabs.
void choose_walk(Pass& p, i64 inner_row, i64 outer_row) {
  const bool whole = p.inner_size * inner_row <= std::max(kWholeBytes, p.outer_size * outer_row);
  p.slab = whole ? p.panels : std::max<i64>(1, kSlabBytes / (p.panel * inner_row));
  p.slabs = (p.panels + p.slab - 1) / p.slab;
  p.step = p.slabs > 1 ? p.chunks : std::max<i64>(1, kStepBytes / (p.chunk * outer_row));
}

// Where each outer index enters each panel, [outer][panels + 1]. unit > 1: segments of whole units, but for the last of
// a slab.
std::vector<i32> entrances(const Pass& p, const i32* ptr, const i32* idx, int unit) {
  std::vector<i32> enter(p.outer_size * (p.panels + 1));
  for (i64 r = 0; r < p.outer_size; ++r) {
    i32* e = enter.data() + r * (p.panels + 1);
    const i32 end = ptr[r + 1];
    i32 k = ptr[r], slab_begin = k;
    e[0] = k;
    for (i64 q = 1; q < p.panels; ++q) {
      k = i32(std::lower_bound(idx + k, idx + end, i32(q * p.panel)) - idx);
      if (q % p.slab == 0) {
        slab_begin = k;
      } else if (unit > 1) {
        const i64 slab_end = std::min(p.inner_size, (q / p.slab + 1) * p.slab * p.panel);
        const i64 reach = std::min(slab_end, (q - 1) * p.panel + kMaxPanel);
        i32 last = std::min(end, slab_begin + i32(round_up(k - slab_begin, unit)));
        while (last > k && idx[last - 1] >= reach) --last;
        k = last;
      }
      e[q] = k;
    }
    e[p.panels] = end;
  }
  return enter;
}

// ptr, idx: the outer-major index. source: for each weight its CSR position, or null when idx is the CSR itself.
Pass make_pass(i64 outer, i64 inner, const i32* ptr, const i32* idx, const i32* source, int block, i64 unit,
               bool held, i64 wish) {
  Pass p;
  p.block = block;
  p.outer_size = outer;
  p.inner_size = inner;
  const i64 weights = ptr[outer];
  // Going back, an inner index is a whole block of outputs.
  const double forward = held && block > 1 ? kBlockWeights : kForwardWeights;
  const double segment = held && source ? kBackwardWeights : forward;
  p.panel = choose_panel(std::max<i64>(1, inner), outer, weights, source ? block : 1, segment, wish);
  p.panels = std::max<i64>(1, (inner + p.panel - 1) / p.panel);
  // Large chunks make long runs of equal segments, small ones spread over threads.
  p.chunk = round_up(std::min<i64>(256, std::max<i64>(32, round_up(outer / 8, 16))), unit);
  p.chunks = std::max<i64>(1, (outer + p.chunk - 1) / p.chunk);
  const i64 np = p.panels, row = row_of_tile();
  choose_walk(p, source ? row * block : row, source ? 2 * row : row * block);

  // Going back, row blocks make units by themselves.
  const std::vector<i32> enter = entrances(p, ptr, idx, !held ? 1 : source ? kBackwardUnit / block : kForwardUnit);
  std::vector<i32> cell_weights(np * p.chunks + 1, 0);
  for (i64 r = 0; r < outer; ++r)
    for (i64 q = 0; q < np; ++q) {
      const i32* e = enter.data() + r * (np + 1) + q;
      cell_weights[q * p.chunks + r / p.chunk] += e[1] - e[0];
    }
  p.largest_cell = *std::max_element(cell_weights.begin(), cell_weights.end());
  p.marks.reserve(np * p.chunks + 1);
  p.inner.resize(weights);
  if (source) p.source.resize(weights);
  std::vector<i32> count;
  i32 weight = 0;
  for (i64 q = 0; q < np; ++q) {
    for (i64 c = 0; c < p.chunks; ++c) {
      p.marks.push_back({i32(p.runs.size()), i32(p.outer.size()), weight});
      const i64 r0 = c * p.chunk, r1 = std::min(outer, r0 + p.chunk);
      i32 longest = 0;
      for (i64 r = r0; r < r1; ++r) {
        const i32* e = enter.data() + r * (np + 1) + q;
        longest = std::max(longest, e[1] - e[0]);
      }
      count.assign(longest + 1, 0);
      for (i64 r = r0; r < r1; ++r) {
        const i32* e = enter.data() + r * (np + 1) + q;
        ++count[e[1] - e[0]];
      }
      // The first panel also visits outer indices without a weight, because it is the one that writes zeros.
      const i64 base = i64(p.outer.size());
      i32 total = 0;
      for (i32 length = q == 0 ? 0 : 1; length <= longest; ++length) {
        const i32 n = count[length];
        if (n) p.runs.push_back({length, n});
        count[length] = total;
        total += n;
      }
      p.outer.resize(base + total);
      if (!source) p.start.resize(base + total);
      for (i64 r = r0; r < r1; ++r) {
        const i32* e = enter.data() + r * (np + 1) + q;
        const i32 length = e[1] - e[0];
        if (length == 0 && q > 0) continue;
        const i64 at = base + count[length]++;
        p.outer[at] = i32(r);
        if (!source) p.start[at] = e[0];
      }
      for (i64 s = base; s < base + total; ++s) {
        const i32* e = enter.data() + i64(p.outer[s]) * (np + 1) + q;
        for (i32 k = e[0]; k < e[1]; ++k, ++weight) {
          p.inner[weight] = u16(idx[k] - q * p.panel);
          if (source) p.source[weight] = source[k];
        }
      }
    }
  }
  p.marks.push_back({i32(p.runs.size()), i32(p.outer.size()), weight});
  p.outer.resize(p.outer.size() + kSpare, 0);
  if (!source) p.start.resize(p.start.size() + kSpare, 0);
  p.runs.shrink_to_fit();
  p.outer.shrink_to_fit();
  p.start.shrink_to_fit();
  return p;
}

template <class V>
i64 size_of(const V& v) {
  return i64(v.capacity() * sizeof(typename V::value_type));
}

}  // namespace

std::vector<i64> Pass::share(int parts) const {
  // A chunk weighs its weights plus what every outer index costs anyway (its transposition, its store).
  std::vector<i64> upto(chunks + 1, 0);
  for (i64 c = 0; c < chunks; ++c) {
    i64 work = 4 * std::min(chunk, outer_size - c * chunk);
    for (i64 q = 0; q < panels; ++q) work += marks[q * chunks + c + 1].weight - marks[q * chunks + c].weight;
    upto[c + 1] = upto[c] + work;
  }
  std::vector<i64> bound(parts + 1, chunks);
  bound[0] = 0;
  for (int k = 1; k < parts; ++k) {
    const i64 target = upto[chunks] * k / parts;
    i64 c = std::lower_bound(upto.begin(), upto.end(), target) - upto.begin();
    if (c > 0 && target - upto[c - 1] < upto[c] - target) --c;
    bound[k] = std::max(c, bound[k - 1]);
  }
  return bound;
}

i64 Pass::bytes() const {
  return size_of(marks) + size_of(runs) + size_of(outer) + size_of(start) + size_of(inner) + size_of(source);
}

Plan::Plan(i64 outputs_, i64 inputs_, const i32* crow, const i32* col, int block_, i64 unit, Kind kind_, i64 panel)
    : outputs(outputs_), inputs(inputs_), weights(crow[outputs_]), block(block_), kind(kind_) {
  const bool held = kind == Kind::linear;
  forward = make_pass(outputs, inputs, crow, col, nullptr, block, 1, held, panel);
  // The transposed index, by counting. An input is the `rest`-th of its outer index.
  const i32 group = kind == Kind::direct ? i32(unit) : 1;
  const i64 outer = inputs / group;
  std::vector<i32> ptr(outer + 2, 0), inner(weights), source(weights);
  for (i64 k = 0; k < weights; ++k) ++ptr[col[k] / group + 2];
  for (i64 c = 0; c < outer; ++c) ptr[c + 2] += ptr[c + 1];
  for (i64 r = 0; r < outputs; ++r)
    for (i32 k = crow[r]; k < crow[r + 1]; ++k) {
      const i32 c = col[k] / group, rest = col[k] - c * group;
      const i32 at = ptr[c + 1]++;
      inner[at] = i32(r) * group + rest;
      source[at] = k;
    }
  const i64 whole = kind == Kind::direct ? 1 : unit;
  backward = make_pass(outer, outputs * group, ptr.data(), inner.data(), source.data(), block, whole, held, panel);
}

const char* check_csr(i64 outputs, i64 inputs, i64 weights, const i32* crow, const i32* col) {
  if (crow[0] != 0) return "crow must begin with 0";
  if (crow[outputs] != weights) return "crow must end with the number of weights";
  for (i64 r = 0; r < outputs; ++r)
    if (crow[r + 1] < crow[r] || crow[r + 1] > weights) return "crow must not decrease";
  for (i64 r = 0; r < outputs; ++r)
    for (i32 k = crow[r]; k < crow[r + 1]; ++k) {
      if (col[k] < 0 || col[k] >= inputs) return "a column lies outside the layer's inputs";
      if (k > crow[r] && col[k] <= col[k - 1]) return "columns must increase within each row";
    }
  return "";
}

}  // namespace sparsight
