#include "linear.h"

#include <algorithm>

#include "threads.h"
#include "tile.h"

namespace sparsight {

template <class T>
void linear_forward(const Plan& plan, const T* x, i64 batch, const T* values, const T* bias, bool relu, T* y,
                    int threads) {
  const Tiles<T> tiles(batch);
  if (tiles.count == 0 || plan.outputs == 0) return;
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.forward;
  const int block = plan.block;
  const i64 in = plan.inputs, out = plan.outputs * block;
  const i64 group = tiles.group(out);

  parallel(threads, [&](int me, int team) {
    // A task is one of `team` ranges of outputs of one tile; a thread takes tasks that follow one another, so
    // with many tiles it has whole ones, and with one tile a range of it.
    const std::vector<i64> bound = pass.share(team);
    T* yt = scratch(Use::output).get<T>(group * out * tiles.full);
    T* xs = scratch(Use::input).get<T>(group * pass.panel * tiles.full);
    i64 task = split(tiles.count * team, team, me);
    const i64 end = split(tiles.count * team, team, me + 1);
    while (task < end) {
      const i64 t0 = task / team, part = task % team;
      const bool whole = part == 0 && end - task >= team;
      const i64 t1 = whole ? t0 + std::min(group, (end - task) / team) : t0 + 1;
      const i64 stop = whole ? team : std::min<i64>(team, part + end - task);
      const i64 c0 = bound[part], c1 = bound[stop];
      task += (t1 - t0) * (stop - part);
      if (c0 == c1) continue;
      for (i64 q = 0; q < pass.panels; ++q) {
        const i64 i0 = q * pass.panel, width = std::min(pass.panel, in - i0);
        for (i64 t = t0; t < t1; ++t)
          op.load_tile(x + tiles.begin(t) * in + i0, nullptr, in, tiles.rows(t), width,
                       xs + (t - t0) * pass.panel * tiles.full, nullptr);
        // Tile after tile over one cell: its weights come from the nearest cache all but the first time.
        for (i64 c = c0; c < c1; ++c)
          for (i64 t = t0; t < t1; ++t)
            op.gather(pass.cell(q, c), values, xs + (t - t0) * pass.panel * tiles.full,
                      yt + (t - t0) * out * tiles.full, tiles.vectors(t), q == 0);
      }
      const i64 r0 = c0 * pass.chunk * block, r1 = std::min(out, c1 * pass.chunk * block);
      for (i64 t = t0; t < t1; ++t)
        op.store_tile(yt + (t - t0) * out * tiles.full + r0 * tiles.stride(t), tiles.rows(t), r1 - r0,
                      bias ? bias + r0 : nullptr, relu, y + tiles.begin(t) * out + r0, out);
    }
  });
}

template <class T>
void linear_backward(const Plan& plan, const T* dy, const T* gate, const T* x, i64 batch, const T* values, T* dx,
                     T* dvalues, T* dbias, int threads) {
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
  // Threads share out the inputs, so that each weight's gradient is summed by one thread, tile after tile. The
  // transposed dY is made in groups of tiles, in two buffers, so that one barrier a group is enough: whoever
  // writes a buffer again has passed the barrier of the group between.
  const i64 group = tiles.group(out);
  const i64 tile_size = out * tiles.full;
  T* dyt[2];
  dyt[0] = scratch(Use::input).get<T>(2 * group * tile_size);
  dyt[1] = threads > 1 ? dyt[0] + group * tile_size : dyt[0];
  // Values and their gradients in the order of the cells. With one group a cell is done when it was visited, and
  // each thread has a small buffer for it; otherwise they last from the first group to the last.
  const bool once = tiles.count <= group;
  T* packed = once ? nullptr : scratch(Use::values).get<T>(2 * plan.weights * block);
  T* dpacked = once ? nullptr : packed + plan.weights * block;

  parallel(threads, [&](int me, int team) {
    const std::vector<i64> bound = pass.share(team);
    const i64 c0 = bound[me], c1 = bound[me + 1];
    // So many chunks at once that their inputs and gradients, for a group of tiles, stay in the cache too.
    const i64 step = std::max<i64>(1, kGroupBytes / (2 * group * pass.chunk * tiles.full * i64(sizeof(T))));
    const i64 side = std::min(step, std::max<i64>(1, c1 - c0)) * pass.chunk * tiles.full;
    T* xs = scratch(Use::output).get<T>(2 * group * side);
    T* dxs = xs + group * side;
    T* cell_values = once ? scratch(Use::values).get<T>(2 * pass.largest_cell * block) : nullptr;

    for (i64 t0 = 0, turn = 0; t0 < tiles.count; t0 += group, turn ^= 1) {
      const i64 t1 = std::min(tiles.count, t0 + group);
      T* dout = dyt[turn];
      const i64 r0 = split(out, team, me), r1 = split(out, team, me + 1);
      for (i64 t = t0; t < t1; ++t)
        op.load_tile(dy + tiles.begin(t) * out + r0, gate ? gate + tiles.begin(t) * out + r0 : nullptr, out,
                     tiles.rows(t), r1 - r0, dout + (t - t0) * tile_size + r0 * tiles.stride(t),
                     dbias ? dbias + r0 : nullptr);
      barrier(team);

      for (i64 first = c0; first < c1; first += step) {
        const i64 last = std::min(c1, first + step), i0 = first * pass.chunk, i1 = std::min(in, last * pass.chunk);
        if (dvalues)
          for (i64 t = t0; t < t1; ++t)
            op.load_tile(x + tiles.begin(t) * in + i0, nullptr, in, tiles.rows(t), i1 - i0, xs + (t - t0) * side,
                         nullptr);
        for (i64 q = 0; q < pass.panels; ++q)
          for (i64 c = first; c < last; ++c) {
            const i64 k = pass.first_weight(q, c), n = pass.first_weight(q, c + 1) - k;
            T* v = once ? cell_values : packed + k * block;
            T* dv = once ? cell_values + pass.largest_cell * block : dpacked + k * block;
            const i32* source = pass.source.data() + k;
            if (t0 == 0)
              for (i64 i = 0; i < n; ++i)
                for (int b = 0; b < block; ++b) v[i * block + b] = values[source[i] * i64(block) + b];
            for (i64 t = t0; t < t1; ++t) {
              // Cells speak of inputs by number; these pointers are where input 0 would be.
              const i64 shift = (t - t0) * side - i0 * tiles.stride(t);
              op.backward(pass.cell(q, c), v, dout + (t - t0) * tile_size + q * pass.panel * block * tiles.stride(t),
                          xs + shift, dx ? dxs + shift : nullptr, dvalues ? dv : nullptr, tiles.vectors(t),
                          q == 0, t == 0);
            }
            if (dvalues && t1 == tiles.count)
              for (i64 i = 0; i < n; ++i)
                for (int b = 0; b < block; ++b) dvalues[source[i] * i64(block) + b] = dv[i * block + b];
          }
        if (dx)
          for (i64 t = t0; t < t1; ++t)
            op.store_tile(dxs + (t - t0) * side, tiles.rows(t), i1 - i0, nullptr, false,
                          dx + tiles.begin(t) * in + i0, in);
      }
    }
  });
}

#define SPS_INSTANTIATE(T)                                                                             \
  template void linear_forward<T>(const Plan&, const T*, i64, const T*, const T*, bool, T*, int);      \
  template void linear_backward<T>(const Plan&, const T*, const T*, const T*, i64, const T*, T*, T*, T*, int);
SPS_INSTANTIATE(float)
SPS_INSTANTIATE(double)

}  // namespace sparsight
