#include "linear.h"

#include <algorithm>

#include "pack.h"
#include "share.h"
#include "threads.h"
#include "tile.h"

namespace sparsight {

template <class T>
void linear_forward(const Plan& plan, const T* x, i64 batch, const T* values, const T* bias, T* y, int threads) {
  const Tiles<T> tiles(batch);
  if (tiles.count == 0 || plan.outputs == 0) return;
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.forward;
  const int block = plan.block;
  const i64 in = plan.inputs, out = plan.outputs * block;

  parallel(threads, [&](int me, int team) {
    T* xs = scratch(Use::input).get<T>(pass.slab * pass.panel * tiles.full);
    T* ys = scratch(Use::output).get<T>(std::min(pass.step, pass.chunks) * pass.chunk * block * tiles.full);
    share_out(pass, tiles.count, me, team, [&](i64 t, i64 c0, i64 c1) {
      const int stride = tiles.stride(t);
      for (i64 s = 0; s < pass.slabs; ++s) {
        const i64 q0 = s * pass.slab, q1 = std::min(pass.panels, q0 + pass.slab);
        const i64 i0 = q0 * pass.panel, i1 = std::min(in, q1 * pass.panel);
        op.load_tile(x + tiles.begin(t) * in + i0, in, tiles.rows(t), i1 - i0, xs, nullptr);
        for (i64 first = c0; first < c1; first += pass.step) {
          const i64 last = std::min(c1, first + pass.step);
          const i64 r0 = first * pass.chunk * block, r1 = std::min(out, last * pass.chunk * block);
          for (i64 q = q0; q < q1; ++q)
            for (i64 c = first; c < last; ++c)  // cells speak of outputs by number: ys - r0 * stride is where 0 would be
              op.gather(pass.cell(q, c), values, xs + (q - q0) * pass.panel * stride, ys - r0 * stride,
                        tiles.vectors(t), q == 0);
          if (q1 == pass.panels)
            op.store_tile(ys, tiles.rows(t), r1 - r0, bias ? bias + r0 : nullptr, y + tiles.begin(t) * out + r0, out);
        }
      }
    });
  });
}

namespace {

// The backward pass. Where several threads share one group of tiles, each transposes its dY.
template <class T>
struct Backward {
  const Plan& plan;
  const T *dy, *x, *values;
  T *dx, *dvalues, *dbias;
  const Tiles<T> tiles;
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.backward;
  const int block = plan.block;
  const i64 in = plan.inputs, out = plan.outputs * block, count = plan.weights * block;
  const i64 groups = std::min(kGroups, tiles.count);
  // With one tile a cell is done when it was visited, and a small buffer is enough. Otherwise values and the sums
  // of each group are kept in the order of the cells, beside the group's sums of dy.
  const bool once = tiles.count == 1;
  T* packed = once ? nullptr : scratch(Use::packed).template get<T>(count + groups * (count + out));

  T* sums(i64 group) const { return packed + count + group * count; }
  T* bias_sums(i64 group) const { return once ? dbias : packed + count + groups * count + group * out; }

  // One of two passes over a share of the weights: before the tiles, and after them.
  void pack_values(int me, int team) const {
    const i64 k0 = split(plan.weights, team, me), k1 = split(plan.weights, team, me + 1);
    pack(pass, k0, k1, values, packed + k0 * block);
  }
  void add_groups(int me, int team) const {
    if (dvalues) {
      const i64 k0 = split(plan.weights, team, me), k1 = split(plan.weights, team, me + 1);
      add_to_first(sums(0), count, k0 * block, k1 * block);
      unpack(pass, k0, k1, sums(0) + k0 * block, dvalues);
    }
    if (dbias) {
      const i64 o0 = split(out, team, me), o1 = split(out, team, me + 1);
      add_to_first(bias_sums(0), out, o0, o1);
      std::copy(bias_sums(0) + o0, bias_sums(0) + o1, dbias + o0);
    }
  }
  void add_to_first(T* first, i64 apart, i64 begin, i64 end) const {
    for (i64 g = 1; g < groups; ++g)
      for (i64 i = begin; i < end; ++i) first[i] += first[g * apart + i];
  }

  // The chunks c0 to c1 of one group's tiles. Whoever has the first chunk sums dy too.
  void group(i64 g, i64 c0, i64 c1) const {
    T* bias = dbias && c0 == 0 ? bias_sums(g) : nullptr;
    if (bias) std::fill(bias, bias + out, T(0));
    const i64 side = std::min(pass.step, c1 - c0) * pass.chunk * tiles.full;
    T* dys = scratch(Use::input).template get<T>(pass.slab * pass.panel * block * tiles.full);
    T* xs = scratch(Use::output).template get<T>(2 * side);
    const i64 first = split(tiles.count, groups, g), end = split(tiles.count, groups, g + 1);
    for (i64 t = first; t < end; ++t)
      for (i64 q0 = 0; q0 < pass.panels; q0 += pass.slab) {
        const i64 q1 = std::min(pass.panels, q0 + pass.slab);
        const i64 o0 = q0 * pass.panel * block, o1 = std::min(out, q1 * pass.panel * block);
        op.load_tile(dy + tiles.begin(t) * out + o0, out, tiles.rows(t), o1 - o0, dys, bias ? bias + o0 : nullptr);
        for (i64 c = c0; c < c1; c += pass.step)
          step(g, t, t == first, q0, q1, c, std::min(c1, c + pass.step), dys, xs, xs + side);
      }
  }

  // One tile: the panels q0 to q1, whose dY lies transposed in dys, with the inputs of the chunks c0 to c1.
  void step(i64 g, i64 t, bool first_tile, i64 q0, i64 q1, i64 c0, i64 c1, const T* dys, T* xs, T* dxs) const {
    const int rows = tiles.rows(t), stride = tiles.stride(t);
    const i64 i0 = c0 * pass.chunk, i1 = std::min(in, c1 * pass.chunk);
    if (dvalues && q0 == 0) op.load_tile(x + tiles.begin(t) * in + i0, in, rows, i1 - i0, xs, nullptr);
    T* own = once ? scratch(Use::values).template get<T>(2 * pass.largest_cell * block) : nullptr;
    for (i64 q = q0; q < q1; ++q)
      for (i64 c = c0; c < c1; ++c) {
        const i64 k = pass.first_weight(q, c), end = pass.first_weight(q, c + 1);
        T* v = once ? own : packed + k * block;
        T* dv = once ? own + pass.largest_cell * block : sums(g) + k * block;
        if (once) pack(pass, k, end, values, v);
        // Cells speak of inputs by number; these pointers are where input 0 would be.
        op.backward(pass.cell(q, c), v, dys + (q - q0) * pass.panel * block * stride, xs - i0 * stride,
                    dx ? dxs - i0 * stride : nullptr, dvalues ? dv : nullptr, tiles.vectors(t), q == 0, first_tile);
        if (once && dvalues) unpack(pass, k, end, dv, dvalues);
      }
    if (dx && q1 == pass.panels) op.store_tile(dxs, rows, i1 - i0, nullptr, dx + tiles.begin(t) * in + i0, in);
  }

  void run(int threads) const {
    parallel(threads, [&](int me, int team) {
      if (!once) {
        pack_values(me, team);
        barrier(team);
      }
      share_out(pass, groups, me, team, [&](i64 g, i64 c0, i64 c1) { group(g, c0, c1); });
      if (once) return;
      barrier(team);
      add_groups(me, team);
    });
  }
};

}  // namespace

template <class T>
void linear_backward(const Plan& plan, const T* dy, const T* x, i64 batch, const T* values, T* dx, T* dvalues,
                     T* dbias, int threads) {
  if (batch == 0) {
    if (dvalues) std::fill(dvalues, dvalues + plan.weights * plan.block, T(0));
    if (dbias) std::fill(dbias, dbias + plan.outputs * plan.block, T(0));
    return;
  }
  Backward<T>{plan, dy, x, values, dx, dvalues, dbias, Tiles<T>(batch)}.run(threads);
}

#define SPS_INSTANTIATE(T)                                                                         \
  template void linear_forward<T>(const Plan&, const T*, i64, const T*, const T*, T*, int);        \
  template void linear_backward<T>(const Plan&, const T*, const T*, i64, const T*, T*, T*, T*, int);
SPS_INSTANTIATE(float)
SPS_INSTANTIATE(double)

}  // namespace sparsight
