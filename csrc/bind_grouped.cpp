// Python's door to the products of a mixture of experts; src/sparsight/kernels/grouped.py is the only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>

#include "grouped.h"

namespace nb = nanobind;
using namespace sparsight;

namespace {

using Address = std::uintptr_t;
using Free = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

template <class T>
std::vector<Group<T>> groups_of(const std::vector<Address>& weights, const std::vector<i64>& counts) {
  std::vector<Group<T>> groups;
  i64 begin = 0;
  for (std::size_t g = 0; g < weights.size(); ++g) {
    groups.push_back({at<T>(weights[g]), begin, counts[g]});
    begin += counts[g];
  }
  return groups;
}

template <class T>
void bind(nb::module_& m, const std::string& kind) {
  const auto name = [&](const char* stem) { return std::string(stem) + kind; };
  m.def(name("grouped_product").c_str(),
        [](const std::vector<Address>& weights, const std::vector<i64>& counts, Address x, i64 inputs, i64 outputs, Address y,
           int threads) {
          grouped_product<T>(groups_of<T>(weights, counts), at<T>(x), inputs, outputs, at<T>(y), threads);
        },
        Free());
  m.def(name("grouped_gradient").c_str(),
        [](const std::vector<Address>& weights, const std::vector<i64>& counts, Address dy, Address x, i64 inputs,
           i64 outputs, int threads) {
          grouped_gradient<T>(groups_of<T>(weights, counts), at<T>(dy), at<T>(x), inputs, outputs, threads);
        },
        Free());
  m.def(name("glu").c_str(),
        [](Address before, i64 rows, i64 hidden, Address out, int threads) {
          glu<T>(at<T>(before), rows, hidden, at<T>(out), threads);
        },
        Free());
  m.def(name("glu_backward").c_str(),
        [](Address before, Address d_out, i64 rows, i64 hidden, Address d_before, int threads) {
          glu_backward<T>(at<T>(before), at<T>(d_out), rows, hidden, at<T>(d_before), threads);
        },
        Free());
  m.def(name("spread").c_str(),
        [](Address grad, Address token, Address scale, Address out, i64 rows, i64 width, Address back, Address dots,
           int threads) {
          spread<T>(at<T>(grad), at<i64>(token), at<T>(scale), at<T>(out), rows, width, at<T>(back), at<T>(dots),
                    threads);
        },
        Free());
  m.def(name("gather_sum").c_str(),
        [](Address rows, Address place, Address weight, i64 k, i64 tokens, i64 width, Address y, int threads) {
          gather_sum<T>(at<T>(rows), at<i64>(place), at<T>(weight), k, tokens, width, at<T>(y), threads);
        },
        Free());
}

}  // namespace

void bind_grouped(nb::module_& m) {
  bind<float>(m, "_f32");
  bind<double>(m, "_f64");
}
