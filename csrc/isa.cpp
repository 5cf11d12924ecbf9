// Which instruction set runs: the best the processor has, or a lower one named by SPARSIGHT_ISA.
#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#define SPS_DECLARE(NAME)                 \
  namespace sparsight::NAME {             \
  extern const Ops<float> float_ops;      \
  extern const Ops<double> double_ops;    \
  }
SPS_DECLARE(isa_portable)
#if defined(SPARSIGHT_X86)
SPS_DECLARE(isa_avx2)
SPS_DECLARE(isa_avx512)
#elif defined(SPARSIGHT_ARM)
SPS_DECLARE(isa_neon)
#endif

namespace sparsight {

namespace {

constexpr Isa kAll[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon};

Isa best() {
  Isa found = Isa::portable;
  for (Isa which : kAll)
    if (isa_available(which)) found = which;
  const char* wish = std::getenv("SPARSIGHT_ISA");
  if (!wish || !*wish) return found;
  for (Isa which : kAll)
    if (isa_available(which) && std::string(wish) == isa_name(which)) return which;
  throw std::invalid_argument("SPARSIGHT_ISA=" + std::string(wish) + " is not available here; choose " + isa_choices());
}

Isa& current() {
  static Isa chosen = best();
  return chosen;
}

struct Tables {
  const Ops<float>* single;
  const Ops<double>* twice;
};

Tables tables() {
  switch (current()) {
#if defined(SPARSIGHT_X86)
    case Isa::avx2: return {&isa_avx2::float_ops, &isa_avx2::double_ops};
    case Isa::avx512: return {&isa_avx512::float_ops, &isa_avx512::double_ops};
#elif defined(SPARSIGHT_ARM)
    case Isa::neon: return {&isa_neon::float_ops, &isa_neon::double_ops};
#endif
    default: return {&isa_portable::float_ops, &isa_portable::double_ops};
  }
}

}  // namespace

bool isa_available(Isa which) {
  switch (which) {
    case Isa::portable: return true;
#if defined(SPARSIGHT_X86)
    case Isa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx512: return __builtin_cpu_supports("avx512f");
#elif defined(SPARSIGHT_ARM)
    case Isa::neon: return true;
#endif
    default: return false;
  }
}

const char* isa_name(Isa which) {
  switch (which) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::neon: return "neon";
    default: return "portable";
  }
}

std::string isa_choices() {
  std::string names;
  for (Isa which : kAll)
    if (isa_available(which)) names += (names.empty() ? "" : ", ") + std::string(isa_name(which));
  return names;
}

Isa isa() { return current(); }

bool isa_force(Isa which) {
  if (!isa_available(which)) return false;
  current() = which;
  return true;
}

template <>
const Ops<float>& ops<float>() {
  return *tables().single;
}
template <>
const Ops<double>& ops<double>() {
  return *tables().twice;
}

}  // namespace sparsight
