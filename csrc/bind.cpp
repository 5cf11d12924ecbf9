// Python's door to the kernels. Tensors come as addresses: src/sparsight/kernels/native.py is the only caller
// and has checked type, shape and layout. (A DLPack capsule, which an ndarray argument needs, costs
// three microseconds, an address sixty nanoseconds, and a small layer passes up to eight of them.)
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "conv.h"
#include "index.h"
#include "isa.h"
#include "linear.h"
#include "topk.h"

namespace nb = nanobind;
using namespace sparsight;

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

Isa isa_of(const std::string& name) {
  for (Isa which : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon})
    if (name == isa_name(which)) return which;
  throw std::invalid_argument("no instruction set is called " + name + "; choose " + isa_choices());
}

template <class T>
void forward(const Plan& plan, Address x, i64 batch, Address values, Address bias, Address y, int threads) {
  linear_forward<T>(plan, at<T>(x), batch, at<T>(values), at<T>(bias), at<T>(y), threads);
}

template <class T>
void backward(const Plan& plan, Address dy, Address x, i64 batch, Address values, Address dx, Address dvalues,
              Address dbias, int threads) {
  if (plan.kind == Kind::direct) throw std::invalid_argument("this plan is for a convolution");
  linear_backward<T>(plan, at<T>(dy), at<T>(x), batch, at<T>(values), at<T>(dx), at<T>(dvalues), at<T>(dbias),
                     threads);
}

ConvShape shape_of(const std::vector<i64>& n) {
  if (n.size() != 14) throw std::invalid_argument("a convolution's shape has 14 numbers");
  return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13]};
}

template <class T>
void convolve(const Plan& plan, const std::vector<i64>& shape, Address x, Address values, Address bias, Address y,
              int threads) {
  conv_forward<T>(plan, shape_of(shape), at<T>(x), at<T>(values), at<T>(bias), at<T>(y), threads);
}

template <class T>
void convolve_backward(const Plan& plan, const std::vector<i64>& shape, Address dy, Address x, Address values,
                       Address dx, Address dvalues, int threads) {
  conv_backward<T>(plan, shape_of(shape), at<T>(dy), at<T>(x), at<T>(values), at<T>(dx), at<T>(dvalues), threads);
}

}  // namespace

void bind_grouped(nb::module_& m);  // bind_grouped.cpp

NB_MODULE(_native, m) {
  // torch.compile keeps what it traced until after the interpreter has gone; that is no leak of ours.
  nb::set_leak_warnings(false);
  using Free = nb::call_guard<nb::gil_scoped_release>;
  m.def("isa", [] { return std::string(isa_name(isa())); });
  m.def("isa_available", [](const std::string& name) { return isa_available(isa_of(name)); });
  m.def("isa_force", [](const std::string& name) { return isa_force(isa_of(name)); });

  nb::class_<Plan>(m, "Plan")
      .def(
          "__init__",
          [](Plan* self, i64 outputs, i64 inputs, i64 weights, Address crow, Address col, int block, i64 unit,
             int kind, i64 panel) {
            const char* wrong = check_csr(outputs, inputs, weights, at<i32>(crow), at<i32>(col));
            if (*wrong) throw std::invalid_argument(wrong);
            new (self) Plan(outputs, inputs, at<i32>(crow), at<i32>(col), block, unit, Kind(kind), panel);
          },
          Free())
      .def_ro("outputs", &Plan::outputs)
      .def_ro("inputs", &Plan::inputs)
      .def_ro("weights", &Plan::weights)
      .def_ro("block", &Plan::block)
      .def_prop_ro("bytes", &Plan::bytes)
      .def_prop_ro("panels", [](const Plan& p) { return nb::make_tuple(p.forward.panels, p.backward.panels); });

  nb::class_<TopK>(m, "TopK")
      .def(
          "__init__",
          [](TopK* self, i64 k, Address kept, i64 count, u64 seed) {
            new (self) TopK(k, at<i64>(kept), count, seed);
          },
          Free())
      .def("update_f32", [](TopK& t, Address s, i64 first, i64 n) { t.update(at<float>(s), first, n); }, Free())
      .def("update_f64", [](TopK& t, Address s, i64 first, i64 n) { t.update(at<double>(s), first, n); }, Free())
      .def("finish", &TopK::finish, Free())
      .def("copy", [](const TopK& t, Address positions) { t.copy(at<i64>(positions)); });

  const auto best_of = [](auto type, Address scores, Address positions, i64 n, i64 count, u64 seed, Address mask) {
    using T = decltype(type);
    best<T>(at<T>(scores), at<i64>(positions), n, count, seed, at<std::uint8_t>(mask));
  };
  m.def("best_f32", [=](Address s, Address p, i64 n, i64 k, u64 seed, Address m) { best_of(float(), s, p, n, k, seed, m); },
        Free());
  m.def("best_f64", [=](Address s, Address p, i64 n, i64 k, u64 seed, Address m) { best_of(double(), s, p, n, k, seed, m); },
        Free());
  m.def("merge", [](Address a, i64 n, Address b, i64 k, Address out) { merge(at<i64>(a), n, at<i64>(b), k, at<i64>(out)); },
        Free());
  m.def("csr_of", [](Address p, i64 n, i64 rows, i64 fan_in, Address crow, Address col) {
    csr_of(at<i64>(p), n, rows, fan_in, at<i32>(crow), at<i32>(col));
  }, Free());
  m.def("chosen", [](Address p, Address mask, i64 n, i64 count, Address out) {
    chosen(at<i64>(p), at<std::uint8_t>(mask), n, count, at<i64>(out));
  }, Free());
  const auto moved_by = [](auto type, Address before, i64 count, Address source, i64 n, Address after) {
    using T = decltype(type);
    return moved<T>(at<T>(before), count, at<i64>(source), n, at<T>(after));
  };
  m.def("moved_f32", [=](Address b, i64 c, Address s, i64 n, Address a) { return moved_by(float(), b, c, s, n, a); }, Free());
  m.def("moved_f64", [=](Address b, i64 c, Address s, i64 n, Address a) { return moved_by(double(), b, c, s, n, a); }, Free());
  m.def("positions_of", [](Address crow, Address col, i64 rows, i64 fan_in, Address p) {
    positions_of(at<i32>(crow), at<i32>(col), rows, fan_in, at<i64>(p));
  }, Free());
  m.def("indices_in", [](Address before, i64 n, Address after, i64 k, Address out) {
    indices_in(at<i64>(before), n, at<i64>(after), k, at<i64>(out));
  }, Free());
  m.def("uniform", [](i64 first, i64 n, u64 seed, Address out) { uniform(first, n, seed, at<double>(out)); }, Free());
  m.def("set_bits", [](Address p, i64 n, Address bits) { set_bits(at<i64>(p), n, at<std::uint8_t>(bits)); }, Free());

  bind_grouped(m);
  m.def("forward_f32", &forward<float>, Free());
  m.def("forward_f64", &forward<double>, Free());
  m.def("backward_f32", &backward<float>, Free());
  m.def("backward_f64", &backward<double>, Free());
  m.def("conv_forward_f32", &convolve<float>, Free());
  m.def("conv_forward_f64", &convolve<double>, Free());
  m.def("conv_backward_f32", &convolve_backward<float>, Free());
  m.def("conv_backward_f64", &convolve_backward<double>, Free());
}
