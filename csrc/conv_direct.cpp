// Stride 1. Of the planes that a panel reads, shifted copies are made (see Shifts); then the activations of every
// weight are contiguous, and results go straight to their NCHW place: no unfolding, no folding. The backward pass is
// a convolution of dy with the kernel turned round, grouped by channel, so that x and dx are used in place too.
#include <algorithm>

#include "conv.h"
#include "pack.h"
#include "share.h"
#include "strips.h"
#include "threads.h"

namespace sparsight {

namespace {

// The rows of outer indices o0 to o1 between a plane and a tile that does not end with a whole vector.
template <class T>
void from_plane(const T* plane, i64 apart, i64 o0, i64 o1, int rows, int stride, T* tile) {
  for (i64 o = o0; o < o1; ++o)
    for (int j = 0; j < stride; ++j) tile[o * stride + j] = j < rows ? plane[o * apart + j] : T(0);
}
template <class T>
void to_plane(const T* tile, int stride, i64 o0, i64 o1, int rows, T* plane, i64 apart) {
  for (i64 o = o0; o < o1; ++o) std::copy_n(tile + o * stride, rows, plane + o * apart);
}

// What both passes do with a strip: copies of one panel after another, and with each all tiles.
template <class T, class Work>
void each_tile(const Strips<T>& strips, i64 item, const T* planes, i64 size, i64 batch, Work&& work) {
  const Ops<T>& op = ops<T>();
  const Shifts& shifts = strips.shifts;
  const i64 strip = item % strips.count;
  const T *image = planes + item / strips.count * size, *end = planes + batch * size;
  const Tiles<T> tiles = strips.tiles(strip);
  T* copies = scratch(Use::input).get<T>(strips.copies_size());
  const i64 r0 = strip * strips.rows, r1 = std::min(strips.height, r0 + strips.rows) + strips.halo;
  for (i64 q = 0; q < strips.pass.panels; ++q) {
    const i64 p0 = strips.first_plane(q), p1 = strips.last_plane(q);
    op.shift(shifts, planes, end, image + p0 * shifts.height * shifts.width, p1 - p0, r0, r1, copies);
    // Offsets count from plane 0: this pointer is where that would be.
    for (i64 t = 0; t < tiles.count; ++t)
      work(q, t, tiles, r0 * strips.width + tiles.begin(t), copies - p0 * strips.plane() + tiles.begin(t));
  }
}

template <class T>
struct Backward {
  const Plan& plan;
  const ConvShape& s;
  const T *dy, *x, *values;
  T *dx, *dvalues;
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.backward;
  const Strips<T> strips{pass, s, true};
  const i64 count = plan.weights, area = s.height * s.width, items = s.batch * strips.count;
  const i64 groups = std::min(kGroups, items);
  T* packed = scratch(Use::packed).template get<T>(count + groups * count);
  i32* offset = scratch(Use::index).template get<i32>(count);

  T* sums(i64 group) const { return packed + count + group * count; }

  // The chunks c0 to c1 of one strip.
  void strip(i64 g, i64 item, bool first_item, i64 c0, i64 c1) const {
    const i64 image = item / strips.count, from = image * s.channels * area;
    const i64 o0 = c0 * pass.chunk, o1 = std::min(pass.outer_size, c1 * pass.chunk);
    const i64 side = s.channels * Tiles<T>(1).full;
    T* xs = scratch(Use::output).template get<T>(2 * side);
    T* dxs = xs + side;
    each_tile(strips, item, dy, plan.outputs * s.area(), s.batch,
              [&](i64 q, i64 t, const Tiles<T>& tiles, i64 at, const T* copies) {
                const int rows = tiles.rows(t), stride = tiles.stride(t);
                const bool whole = rows == stride;
                if (!whole && q == 0) from_plane(x + from + at, area, o0, o1, rows, stride, xs);
                const T* in = whole ? x + from + at : xs;
                T* din = !dx ? nullptr : whole ? dx + from + at : dxs;
                for (i64 c = c0; c < c1; ++c) {
                  const i64 k = pass.first_weight(q, c);
                  op.backward_plane(pass.cell(q, c), {offset + k, whole ? area : stride, nullptr}, packed + k, copies,
                                    in, din, dvalues ? sums(g) + k : nullptr, tiles.vectors(t), q == 0,
                                    first_item && t == 0);
                }
                if (dx && !whole && q + 1 == pass.panels)
                  to_plane(dxs, stride, o0, o1, rows, dx + from + at, area);
              });
  }

  void run(int threads) const {
    parallel(threads, [&](int me, int team) {
      const i64 k0 = split(count, team, me), k1 = split(count, team, me + 1);
      pack(pass, k0, k1, values, packed + k0);
      strips.offsets(k0, k1, offset);
      barrier(team);
      share_out(pass, groups, me, team, [&](i64 g, i64 c0, i64 c1) {
        const i64 first = split(items, groups, g), end = split(items, groups, g + 1);
        for (i64 item = first; item < end; ++item) strip(g, item, item == first, c0, c1);
      });
      barrier(team);
      if (!dvalues) return;
      for (i64 g = 1; g < groups; ++g)
        for (i64 k = k0; k < k1; ++k) sums(0)[k] += sums(g)[k];
      unpack(pass, k0, k1, sums(0) + k0, dvalues);
    });
  }
};

}  // namespace

template <class T>
void direct_forward(const Plan& plan, const ConvShape& s, const T* x, const T* values, const T* bias, T* y,
                    int threads) {
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.forward;
  const Strips<T> strips(pass, s, false);
  const i64 area = s.area();
  i32* offset = scratch(Use::index).get<i32>(plan.weights);
  parallel(threads, [&](int me, int team) {
    strips.offsets(split(plan.weights, team, me), split(plan.weights, team, me + 1), offset);
    barrier(team);
    T* ys = scratch(Use::output).get<T>(plan.outputs * Tiles<T>(1).full);
    share_out(pass, s.batch * strips.count, me, team, [&](i64 item, i64 c0, i64 c1) {
      const i64 image = item / strips.count;
      const i64 o0 = c0 * pass.chunk, o1 = std::min(plan.outputs, c1 * pass.chunk);
      each_tile(strips, item, x, s.channels * s.height * s.width, s.batch,
                [&](i64 q, i64 t, const Tiles<T>& tiles, i64 at, const T* copies) {
                  const int rows = tiles.rows(t), stride = tiles.stride(t);
                  const bool whole = rows == stride;
                  T* place = y + image * plan.outputs * area + at;
                  for (i64 c = c0; c < c1; ++c)
                    op.gather_plane(pass.cell(q, c), {offset + pass.first_weight(q, c), whole ? area : stride, bias},
                                    values, copies, whole ? place : ys, tiles.vectors(t), q == 0);
                  if (!whole && q + 1 == pass.panels) to_plane(ys, stride, o0, o1, rows, place, area);
                });
    });
  });
}

template <class T>
void direct_backward(const Plan& plan, const ConvShape& s, const T* dy, const T* x, const T* values, T* dx,
                     T* dvalues, int threads) {
  Backward<T>{plan, s, dy, x, values, dx, dvalues}.run(threads);
}

#define SPS_INSTANTIATE(T)                                                                               \
  template void direct_forward<T>(const Plan&, const ConvShape&, const T*, const T*, const T*, T*, int); \
  template void direct_backward<T>(const Plan&, const ConvShape&, const T*, const T*, const T*, T*, T*, int);
SPS_INSTANTIATE(float)
SPS_INSTANTIATE(double)

}  // namespace sparsight
