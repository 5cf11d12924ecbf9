// Every instruction set of a machine against plain loops, without Python: for machines that only an emulator stands for.
// `make neon` builds it for aarch64 and runs it. Exits with 1 where a kernel is wrong.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "conv.h"
#include "grouped.h"
#include "isa.h"
#include "linear.h"

using namespace sparsight;

namespace {

std::mt19937 random_bits(7);
int wrong = 0, checks = 0;

template <class T>
std::vector<T> numbers(i64 count) {
  std::normal_distribution<double> normal;
  std::vector<T> out(count);
  for (T& x : out) x = T(normal(random_bits));
  return out;
}

template <class T>
void same(const char* what, const std::vector<T>& got, const std::vector<double>& want) {
  const double close = sizeof(T) == 4 ? 1e-3 : 1e-10;
  ++checks;
  for (std::size_t i = 0; i < want.size(); ++i)
    if (!(std::fabs(double(got[i]) - want[i]) <= close * (1 + std::fabs(want[i])))) {
      std::printf("%s, %s, %zu bytes a number: element %zu is %g, not %g\n", isa_name(isa()), what, sizeof(T), i,
                  double(got[i]), want[i]);
      ++wrong;
      return;
    }
}

struct Index {
  std::vector<i32> crow{0}, col;
  Index(i64 rows, i64 columns, double density) {
    std::uniform_real_distribution<double> uniform;
    for (i64 r = 0; r < rows; ++r) {
      for (i64 c = 0; c < columns; ++c)
        if (uniform(random_bits) < density) col.push_back(i32(c));
      crow.push_back(i32(col.size()));
    }
  }
  // Calls body(output, input, place of the value) for each weight.
  template <class Body>
  void each(int block, Body&& body) const {
    for (std::size_t r = 0; r + 1 < crow.size(); ++r)
      for (i32 k = crow[r]; k < crow[r + 1]; ++k)
        for (int b = 0; b < block; ++b) body(i64(r) * block + b, i64(col[k]), i64(k) * block + b);
  }
};

template <class T>
void check_linear(i64 batch, i64 in, i64 rows, int block, double density, i64 panel, int threads) {
  const i64 out = rows * block;
  const Index index(rows, in, density);
  const Plan plan(rows, in, index.crow.data(), index.col.data(), block, 1, Kind::linear, panel);
  const i64 count = plan.weights * block;
  const auto x = numbers<T>(batch * in), dy = numbers<T>(batch * out), values = numbers<T>(count), bias = numbers<T>(out);
  std::vector<T> y(batch * out), dx(batch * in), dvalues(count), dbias(out);
  std::vector<double> wy(batch * out), wdx(batch * in, 0), wdv(count, 0), wdb(out, 0);
  for (i64 b = 0; b < batch; ++b)
    for (i64 o = 0; o < out; ++o) wy[b * out + o] = bias[o], wdb[o] += dy[b * out + o];
  index.each(block, [&](i64 o, i64 i, i64 k) {
    for (i64 b = 0; b < batch; ++b) {
      wy[b * out + o] += double(values[k]) * x[b * in + i];
      wdx[b * in + i] += double(values[k]) * dy[b * out + o];
      wdv[k] += double(dy[b * out + o]) * x[b * in + i];
    }
  });
  linear_forward<T>(plan, x.data(), batch, values.data(), bias.data(), y.data(), threads);
  linear_backward<T>(plan, dy.data(), x.data(), batch, values.data(), dx.data(), dvalues.data(), dbias.data(), threads);
  same("linear y", y, wy);
  same("linear dx", dx, wdx);
  same("linear dvalues", dvalues, wdv);
  same("linear dbias", dbias, wdb);
}

template <class T>
void check_conv(i64 size, i64 stride, Kind kind) {
  const i64 batch = 2, channels = 5, outputs = 6, kernel = 3, taps = 9, pad = 1, o_size = (size + 2 - 3) / stride + 1;
  const ConvShape s{batch, channels, size, size, kernel, kernel, stride, stride, pad, pad, 1, 1, o_size, o_size};
  const Index index(outputs, channels * taps, 0.3);
  const Plan plan(outputs, channels * taps, index.crow.data(), index.col.data(), 1, taps, kind, 0);
  const auto x = numbers<T>(batch * channels * size * size), dy = numbers<T>(batch * outputs * s.area());
  const auto values = numbers<T>(plan.weights), bias = numbers<T>(outputs);
  std::vector<T> y(dy.size()), dx(x.size()), dvalues(plan.weights);
  std::vector<double> wy(dy.size()), wdx(x.size(), 0), wdv(plan.weights, 0);
  for (std::size_t i = 0; i < wy.size(); ++i) wy[i] = bias[i / s.area() % outputs];
  index.each(1, [&](i64 o, i64 f, i64 k) {
    const i64 c = f / taps, down = f % taps / kernel, across = f % kernel;
    for (i64 b = 0; b < batch; ++b)
      for (i64 p = 0; p < s.area(); ++p) {
        const i64 r = p / o_size * stride + down - pad, q = p % o_size * stride + across - pad;
        if (r < 0 || r >= size || q < 0 || q >= size) continue;
        const i64 from = ((b * channels + c) * size + r) * size + q, to = (b * outputs + o) * s.area() + p;
        wy[to] += double(values[k]) * x[from];
        wdx[from] += double(values[k]) * dy[to];
        wdv[k] += double(dy[to]) * x[from];
      }
  });
  conv_forward<T>(plan, s, x.data(), values.data(), bias.data(), y.data(), 2);
  conv_backward<T>(plan, s, dy.data(), x.data(), values.data(), dx.data(), dvalues.data(), 2);
  same("convolution y", y, wy);
  same("convolution dx", dx, wdx);
  same("convolution dvalues", dvalues, wdv);
}

template <class T>
void check_grouped(i64 in, i64 out) {
  const i64 sizes[] = {1, 0, 7, 40, 3}, rows = 51;
  std::vector<std::vector<T>> weights, gradients;
  std::vector<Group<T>> groups, wanted;
  const auto x = numbers<T>(rows * in), dy = numbers<T>(rows * out);
  std::vector<T> y(rows * out);
  std::vector<double> wy(rows * out, 0);
  for (int e = 0; e < 5; ++e) weights.push_back(numbers<T>(in * out)), gradients.emplace_back(in * out);
  std::vector<std::vector<double>> wg(5, std::vector<double>(in * out, 0));
  for (i64 e = 0, begin = 0; e < 5; begin += sizes[e], ++e) {
    groups.push_back({weights[e].data(), begin, sizes[e]});
    wanted.push_back({gradients[e].data(), begin, sizes[e]});
    for (i64 r = begin; r < begin + sizes[e]; ++r)
      for (i64 o = 0; o < out; ++o)
        for (i64 i = 0; i < in; ++i) {
          wy[r * out + o] += double(weights[e][o * in + i]) * x[r * in + i];
          wg[e][o * in + i] += double(dy[r * out + o]) * x[r * in + i];
        }
  }
  grouped_product<T>(groups, x.data(), in, out, y.data(), 2);
  same("experts' product", y, wy);
  grouped_gradient<T>(wanted, dy.data(), x.data(), in, out, 2);
  for (int e = 0; e < 5; ++e)
    if (sizes[e]) same("experts' gradient", gradients[e], wg[e]);
}

template <class T>
void check_all() {
  for (const i64 batch : {1, 7, 16, 33, 64, 150})
    for (const int block : {1, 4, 8})
      for (const double density : {0.02, 0.3}) {
        check_linear<T>(batch, 77, 40 / block, block, density, 0, 1);
        check_linear<T>(batch, 130, 64 / block, block, density, 11, 3);
      }
  for (const i64 size : {3, 8, 19})
    for (const i64 stride : {1, 2}) {
      check_conv<T>(size, stride, Kind::unfolded);
      if (stride == 1) check_conv<T>(size, stride, Kind::direct);
    }
  check_grouped<T>(24, 40);
  check_grouped<T>(33, 7);
}

}  // namespace

int main() {
  for (const Isa which : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (!isa_available(which)) continue;
    isa_force(which);
    const int before = checks;
    check_all<float>();
    check_all<double>();
    std::printf("%s: %d checks\n", isa_name(which), checks - before);
  }
  std::printf(wrong ? "%d wrong\n" : "all right\n", wrong);
  return wrong ? 1 : 0;
}
