// Any stride and row blocks. A tile is a run of output positions; a tile of the unfolded input,
// [channels*kh*kw][stride], is copied row by row, and the linear kernels do the rest.
#include "conv.h"

#include <algorithm>
#include <cstring>

#include "pack.h"
#include "threads.h"
#include "tile.h"

namespace sparsight {

namespace {

constexpr i64 kSlack = 64;  // elements after an image or a tile that whole vectors may touch

// One image, padded, and the tiles of its output. Tiles never cross images, so every tap reads full lines.
template <class T>
class Frame {
 public:
  explicit Frame(const ConvShape& shape)
      : s(shape), width(s.width + 2 * s.pad_w), size((s.height + 2 * s.pad_h) * width), tiles(s.area()),
        offset(s.taps() * tiles.full), at(tiles.full + 1) {}

  i64 padded(i64 channels) const { return channels * size + kSlack; }

  void pad(const T* x, i64 image, i64 c0, i64 c1, T* to) const {
    std::fill(to, to + padded(c1 - c0), T(0));
    each_line(image, c0, c1, [&](i64 dense, i64 inside) {
      std::memcpy(to + inside, x + dense, std::size_t(s.width) * sizeof(T));
    });
  }

  void unpad(const T* from, i64 image, i64 c0, i64 c1, T* x) const {
    each_line(image, c0, c1, [&](i64 dense, i64 inside) {
      std::memcpy(x + dense, from + inside, std::size_t(s.width) * sizeof(T));
    });
  }

  Window look(i64 t) {
    const int rows = tiles.rows(t);
    int n = 0;
    for (int p = 0; p < rows; ++n) {
      at[n] = p;
      p += int(std::min<i64>(rows - p, s.out_w - (tiles.begin(t) + p) % s.out_w));
    }
    at[n] = rows;
    for (i64 tap = 0; tap < s.taps(); ++tap)
      for (int i = 0; i < n; ++i) {
        const i64 position = tiles.begin(t) + at[i];
        const i64 y = position / s.out_w * s.stride_h + tap / s.kernel_w * s.dilation_h;
        const i64 x = position % s.out_w * s.stride_w + tap % s.kernel_w * s.dilation_w;
        offset[tap * n + i] = y * width + x;
      }
    return {s.taps(), size, n, s.stride_w, offset.data(), at.data()};
  }

 private:
  template <class Copy>
  void each_line(i64 image, i64 c0, i64 c1, Copy&& copy) const {
    for (i64 c = c0; c < c1; ++c)
      for (i64 row = 0; row < s.height; ++row)
        copy(((image * s.channels + c) * s.height + row) * s.width, (c - c0) * size + (row + s.pad_h) * width + s.pad_w);
  }

 public:
  const ConvShape& s;
  i64 width, size;  // of a padded line, of a padded channel
  Tiles<T> tiles;

 private:
  std::vector<i64> offset;
  std::vector<int> at;
};

}  // namespace

template <class T>
void unfolded_forward(const Plan& plan, const ConvShape& s, const T* x, const T* values, const T* bias, T* y,
                      int threads) {
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.forward;
  const i64 out = plan.outputs * plan.block;
  parallel(threads, [&](int me, int team) {
    Frame<T> frame(s);
    const Tiles<T>& tiles = frame.tiles;
    T* image = scratch(Use::values).get<T>(frame.padded(s.channels));
    T* xs = scratch(Use::input).get<T>(pass.panel * tiles.full + kSlack);
    T* yt = scratch(Use::output).get<T>(out * tiles.full);
    const i64 all = s.batch * tiles.count;
    i64 held = -1;
    for (i64 task = split(all, team, me); task < split(all, team, me + 1); ++task) {
      const i64 b = task / tiles.count, t = task % tiles.count;
      const int rows = tiles.rows(t), stride = tiles.stride(t);
      if (b != held) frame.pad(x, b, 0, s.channels, image);
      held = b;
      const Window window = frame.look(t);
      for (i64 q = 0; q < pass.panels; ++q) {
        const i64 f0 = q * pass.panel, f1 = std::min(plan.inputs, f0 + pass.panel);
        op.unfold(window, image, f0, f1, rows, stride, xs);
        for (i64 c = 0; c < pass.chunks; ++c) op.gather(pass.cell(q, c), values, xs, yt, tiles.vectors(t), q == 0);
      }
      for (i64 o = 0; o < out; ++o) {
        const T shift = bias ? bias[o] : T(0);
        const T* from = yt + o * stride;
        T* to = y + (b * out + o) * s.area() + tiles.begin(t);
        for (int j = 0; j < rows; ++j) to[j] = from[j] + shift;
      }
    }
  });
}

template <class T>
void unfolded_backward(const Plan& plan, const ConvShape& s, const T* dy, const T* x, const T* values, T* dx,
                       T* dvalues, int threads) {
  const Ops<T>& op = ops<T>();
  const Pass& pass = plan.backward;
  const int block = plan.block;
  const i64 out = plan.outputs * block;
  T* packed = scratch(Use::packed).get<T>(2 * plan.weights * block);
  T* dpacked = packed + plan.weights * block;
  // A thread owns channels: their part of dx and of dvalues is summed by it alone, tile after tile.
  parallel(threads, [&](int me, int team) {
    const std::vector<i64> bound = pass.share(team);
    const i64 c0 = bound[me], c1 = bound[me + 1];
    if (c0 == c1) return;
    Frame<T> frame(s);
    const Tiles<T>& tiles = frame.tiles;
    const i64 f0 = c0 * pass.chunk, f1 = std::min(plan.inputs, c1 * pass.chunk);
    const i64 first = f0 / s.taps(), last = f1 / s.taps(), side = (f1 - f0) * tiles.full + kSlack;
    for (i64 q = 0; q < pass.panels; ++q)
      pack(pass, pass.first_weight(q, c0), pass.first_weight(q, c1), values, packed + pass.first_weight(q, c0) * block);
    T* xs = scratch(Use::output).get<T>(2 * side);
    T* dxs = xs + side;
    T* dout = scratch(Use::input).get<T>(out * tiles.full);
    T* image = scratch(Use::values).get<T>(2 * frame.padded(last - first));
    T* dimage = image + frame.padded(last - first);
    for (i64 b = 0; b < s.batch; ++b) {
      if (dvalues) frame.pad(x, b, first, last, image);
      if (dx) std::fill(dimage, dimage + frame.padded(last - first), T(0));
      for (i64 t = 0; t < tiles.count; ++t) {
        const int rows = tiles.rows(t), stride = tiles.stride(t);
        const Window window = frame.look(t);
        for (i64 o = 0; o < out; ++o) {
          std::memcpy(dout + o * stride, dy + (b * out + o) * s.area() + tiles.begin(t), std::size_t(rows) * sizeof(T));
          std::fill(dout + o * stride + rows, dout + (o + 1) * stride, T(0));
        }
        if (dvalues) op.unfold(window, image, 0, f1 - f0, rows, stride, xs);
        for (i64 q = 0; q < pass.panels; ++q)
          for (i64 c = c0; c < c1; ++c) {
            const i64 k = pass.first_weight(q, c) * block;
            op.backward(pass.cell(q, c), packed + k, dout + q * pass.panel * block * stride, xs - f0 * stride,
                        dx ? dxs - f0 * stride : nullptr, dvalues ? dpacked + k : nullptr, tiles.vectors(t), q == 0,
                        b == 0 && t == 0);
          }
        if (dx) op.fold(window, dxs, last - first, stride, dimage);
      }
      if (dx) frame.unpad(dimage, b, first, last, dx);
    }
    if (dvalues)
      for (i64 q = 0; q < pass.panels; ++q)
        unpack(pass, pass.first_weight(q, c0), pass.first_weight(q, c1), dpacked + pass.first_weight(q, c0) * block,
               dvalues);
  });
}

#define SPS_INSTANTIATE(T)                                                                                 \
  template void unfolded_forward<T>(const Plan&, const ConvShape&, const T*, const T*, const T*, T*, int); \
  template void unfolded_backward<T>(const Plan&, const ConvShape&, const T*, const T*, const T*, T*, T*, int);
SPS_INSTANTIATE(float)
SPS_INSTANTIATE(double)

}  // namespace sparsight
