#include "linear.h"

#include <algorithm>

#include "pack.h"
#include "threads.h"
#include "tile.h"

namespace sparsight {

namespace {

constexpr i64 kWholeBytes = 320 << 10;  // of transposed inner rows that may stay in the second-level cache
constexpr i64 kSlabBytes = 128 << 10;   // of them at a time, where they may not
constexpr i64 kStepBytes = 128 << 10;   // of transposed outer rows at a time

// How a tile goes through the cells of a pass. A transposition runs at half its speed when what it writes falls
// out of the second-level cache, so only the smaller side of a layer is held as a whole: either the inner rows,
// while the outer ones come and go in steps of a few chunks, or the outer rows, while the inner ones come and go
// in slabs of a few panels.
struct Walk {
  i64 slab, slabs;  // panels in a slab
  i64 step;         // chunks in a step

  Walk(const Pass& pass, i64 inner_row, i64 outer_row) {  // bytes of one index, transposed
    const i64 inner = pass.inner_size * inner_row, outer = pass.outer_size * outer_row;
    const bool whole = inner <= std::max(kWholeBytes, outer);
    slab = whole ? pass.panels : std::max<i64>(1, kSlabBytes / (pass.panel * inner_row));
    slabs = (pass.panels + slab - 1) / slab;
    step = slabs > 1 ? pass.chunks : std::max<i64>(1, kStepBytes / (pass.chunk * outer_row));
  }
};

}  // namespace

template <class T>
void linear_forward(const Plan& plan, const T* x, i64 batch, const T* values, const T* bias, T* y, int threads) {
  const Tiles<T> tiles(batch);
  if (tiles.count == 0 || plan.outputs == 0) return;
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.forward;
  const int block = plan.block;
  const i64 in = plan.inputs, out = plan.outputs * block;
  const i64 row = tiles.full * i64(sizeof(T));
  const Walk walk(pass, row, row * block);

  parallel(threads, [&](int me, int team) {
    // A task is one of `team` ranges of outputs of one tile; a thread takes tasks that follow one another, so
    // with many tiles it has whole ones, and with one tile a range of it.
    const std::vector<i64> bound = pass.share(team);
    T* xs = scratch(Use::input).get<T>(walk.slab * pass.panel * tiles.full);
    T* ys = scratch(Use::output).get<T>(std::min(walk.step, pass.chunks) * pass.chunk * block * tiles.full);
    const i64 end = split(tiles.count * team, team, me + 1);
    for (i64 task = split(tiles.count * team, team, me), next; task < end; task = next) {
      const i64 t = task / team, part = task % team;
      const i64 stop = std::min<i64>(team, part + end - task);
      next = task + stop - part;
      const i64 c0 = bound[part], c1 = bound[stop];
      const int stride = tiles.stride(t);
      for (i64 s = 0; s < walk.slabs && c0 < c1; ++s) {
        const i64 q0 = s * walk.slab, q1 = std::min(pass.panels, q0 + walk.slab);
        const i64 i0 = q0 * pass.panel, i1 = std::min(in, q1 * pass.panel);
        op.load_tile(x + tiles.begin(t) * in + i0, in, tiles.rows(t), i1 - i0, xs, nullptr);
        for (i64 first = c0; first < c1; first += walk.step) {
          const i64 last = std::min(c1, first + walk.step);
          const i64 r0 = first * pass.chunk * block, r1 = std::min(out, last * pass.chunk * block);
          for (i64 q = q0; q < q1; ++q)
            for (i64 c = first; c < last; ++c)  // cells speak of outputs by number: ys - r0 * stride is where 0 would be
              op.gather(pass.cell(q, c), values, xs + (q - q0) * pass.panel * stride, ys - r0 * stride,
                        tiles.vectors(t), q == 0);
          if (q1 == pass.panels)
            op.store_tile(ys, tiles.rows(t), r1 - r0, bias ? bias + r0 : nullptr, y + tiles.begin(t) * out + r0, out);
        }
      }
    }
  });
}

template <class T>
void linear_backward(const Plan& plan, const T* dy, const T* x, i64 batch, const T* values, T* dx, T* dvalues,
                     T* dbias, int threads) {
  const Tiles<T> tiles(batch);
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.backward;
  const int block = plan.block;
  const i64 in = plan.inputs, out = plan.outputs * block;
  if (dbias) std::fill(dbias, dbias + out, T(0));
  if (tiles.count == 0) {
    if (dvalues) std::fill(dvalues, dvalues + plan.weights * block, T(0));
    return;
  }
  const i64 row = tiles.full * i64(sizeof(T));
  const Walk walk(pass, row * block, 2 * row);
  // Threads share out the inputs, so that each weight's gradient is summed by one thread, tile after tile. The
  // transposed dY is made by all of them, in two buffers, so that one barrier a slab is enough: whoever writes a
  // buffer again has passed the barrier of the slab between.
  const i64 slab_size = walk.slab * pass.panel * block * tiles.full;
  T* dys[2];
  dys[0] = scratch(Use::input).get<T>((threads > 1 ? 2 : 1) * slab_size);
  dys[1] = threads > 1 ? dys[0] + slab_size : dys[0];
  // Values and their gradients in the order of the cells. With one tile a cell is done when it was visited, and
  // each thread has a small buffer for it; otherwise they last from the first tile to the last.
  const bool once = tiles.count == 1;
  T* packed = once ? nullptr : scratch(Use::packed).get<T>(2 * plan.weights * block);

  parallel(threads, [&](int me, int team) {
    const std::vector<i64> bound = pass.share(team);
    const i64 c0 = bound[me], c1 = bound[me + 1];
    const i64 side = std::min(walk.step, c1 - c0) * pass.chunk * tiles.full;
    T* xs = scratch(Use::output).get<T>(2 * side);
    T* dxs = xs + side;
    T* cell_values = once ? scratch(Use::values).get<T>(2 * pass.largest_cell * block) : nullptr;
    int turn = 0;

    for (i64 t = 0; t < tiles.count; ++t) {
      const int rows = tiles.rows(t), stride = tiles.stride(t);
      const T* x_tile = x + tiles.begin(t) * in;
      const T* dy_tile = dy + tiles.begin(t) * out;
      for (i64 q0 = 0, q1; q0 < pass.panels; q0 = q1, turn ^= 1) {
        q1 = std::min(pass.panels, q0 + walk.slab);
        // Whole vectors of outputs for each thread: the rest of a transposition goes one by one.
        const i64 o0 = q0 * pass.panel * block, o1 = std::min(out, q1 * pass.panel * block);
        const i64 units = (o1 - o0 + op.lanes - 1) / op.lanes;
        const i64 r0 = o0 + split(units, team, me) * op.lanes;
        const i64 r1 = std::min(o1, o0 + split(units, team, me + 1) * op.lanes);
        op.load_tile(dy_tile + r0, out, rows, r1 - r0, dys[turn] + (r0 - o0) * stride, dbias ? dbias + r0 : nullptr);
        barrier(team);

        for (i64 first = c0; first < c1; first += walk.step) {
          const i64 last = std::min(c1, first + walk.step);
          const i64 i0 = first * pass.chunk, i1 = std::min(in, last * pass.chunk);
          if (dvalues && q0 == 0) op.load_tile(x_tile + i0, in, rows, i1 - i0, xs, nullptr);
          for (i64 q = q0; q < q1; ++q)
            for (i64 c = first; c < last; ++c) {
              const i64 k = pass.first_weight(q, c), end = pass.first_weight(q, c + 1);
              T* v = once ? cell_values : packed + k * block;
              T* dv = once ? v + pass.largest_cell * block : v + plan.weights * block;
              if (t == 0) pack(pass, k, end, values, v);
              // Cells speak of inputs by number; these pointers are where input 0 would be.
              op.backward(pass.cell(q, c), v, dys[turn] + (q - q0) * pass.panel * block * stride, xs - i0 * stride,
                          dx ? dxs - i0 * stride : nullptr, dvalues ? dv : nullptr, tiles.vectors(t), q == 0, t == 0);
              if (dvalues && t + 1 == tiles.count) unpack(pass, k, end, dv, dvalues);
            }
          if (dx && q1 == pass.panels)
            op.store_tile(dxs, rows, i1 - i0, nullptr, dx + tiles.begin(t) * in + i0, in);
        }
      }
    }
  });
}

#define SPS_INSTANTIATE(T)                                                                         \
  template void linear_forward<T>(const Plan&, const T*, i64, const T*, const T*, T*, int);        \
  template void linear_backward<T>(const Plan&, const T*, const T*, i64, const T*, T*, T*, T*, int);
SPS_INSTANTIATE(float)
SPS_INSTANTIATE(double)

}  // namespace sparsight
