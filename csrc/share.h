// How threads share out a pass.
#pragma once

#include <algorithm>
#include <vector>

#include "plan.h"

namespace sparsight {

// The backward passes cut their tiles into so many groups, the same whatever the number of threads. A group sums its
// own gradients of the weights, tile after tile, and the groups are added up at the end, in their order: so threads with
// groups of their own share nothing, and the result does not depend on how many there are.
constexpr i64 kGroups = 4;

// A task is one of `team` ranges of the chunks of one item (a tile, or a group of tiles). A thread takes tasks that
// follow one another: with many items whole ones, with one item a range of it. body(item, first chunk, last chunk).
template <class Body>
void share_out(const Pass& pass, i64 items, int me, int team, Body&& body) {
  const std::vector<i64> bound = pass.share(team);
  for (i64 task = items * me, next; task < items * (me + 1); task = next) {
    const i64 part = task % team, stop = std::min<i64>(team, part + items * (me + 1) - task);
    next = task + stop - part;
    if (bound[part] < bound[stop]) body(task / team, bound[part], bound[stop]);
  }
}

}  // namespace sparsight
