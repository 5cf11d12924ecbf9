// What the kernels want to know about a topology, worked out once for each topology.
//
// The weight is CSR over (outputs, inputs). A Pass orders its weights for one kernel: cut into panels of inner
// indices (so that the activations of a panel stay in the first-level cache) and chunks of outer indices (the
// unit that threads share out), and, inside such a cell, segments sorted by length.
//
// Kernels like segments whose length is a multiple of 4 or 16. In a linear layer, where the rows of a slab of panels are
// all there, a segment takes the few weights it lacks from the next panel: their inner indices then lie past the
// panel's end, but never past the slab's.
#pragma once

#include <vector>

#include "ops.h"

namespace sparsight {

struct Pass {
  int block = 1;
  i64 outer_size = 0, inner_size = 0;
  i64 panel = 0, panels = 0;  // inner indices in a panel
  i64 chunk = 0, chunks = 0;  // outer indices in a chunk
  i64 slab = 0, slabs = 0;    // panels whose inner rows a linear layer holds at a time
  i64 step = 0;               // chunks whose outer rows it holds at a time
  i64 largest_cell = 0;       // weights in it
  struct Mark {
    i32 run, segment, weight;
  };
  std::vector<Mark> marks;  // where each cell begins, [panels][chunks], and one end
  std::vector<Run> runs;
  std::vector<i32> outer;   // per segment, with a few spare ones that prefetching may read
  std::vector<i32> start;   // per segment, first position among the weights in CSR order; forward pass only
  std::vector<u16> inner;   // per weight
  std::vector<i32> source;  // per weight, its position in CSR order; backward pass only

  Cell cell(i64 panel_at, i64 chunk_at) const {
    const Mark& m = marks[panel_at * chunks + chunk_at];
    const Mark& end = marks[panel_at * chunks + chunk_at + 1];
    return {runs.data() + m.run, runs.data() + end.run, outer.data() + m.segment,
            start.empty() ? nullptr : start.data() + m.segment, inner.data() + m.weight, block};
  }
  i64 first_weight(i64 panel_at, i64 chunk_at) const { return marks[panel_at * chunks + chunk_at].weight; }
  // Boundaries of `parts` ranges of chunks with about equal work; the same for every call.
  std::vector<i64> share(int parts) const;
  i64 bytes() const;
};

enum class Kind { linear, unfolded, direct };  // a linear layer, or one of two ways to convolve (conv.h)

struct Plan {
  i64 outputs, inputs, weights;  // of the index: outputs counts row blocks when block > 1
  int block;                     // rows that share their columns
  Kind kind;
  Pass forward, backward;

  // crow and col must have been validated; panel = 0 chooses. A unit is the taps of a channel. The backward pass has an
  // outer index for each input and an inner one for each output, and its chunks are made of whole units; or, of the
  // direct kind, an outer index for each unit and an inner one for each (output, input of the unit), which makes its
  // segments longer (block = 1 only).
  Plan(i64 outputs, i64 inputs, const i32* crow, const i32* col, int block, i64 unit, Kind kind, i64 panel);
  i64 bytes() const { return forward.bytes() + backward.bytes(); }
};

// An empty string, or what is wrong with the index.
const char* check_csr(i64 outputs, i64 inputs, i64 weights, const i32* crow, const i32* col);

}  // namespace sparsight
