// Beside ops.h, because the kernels must not see the standard library (simd.h says why).
#pragma once

#include <string>

#include "ops.h"

namespace sparsight {

std::string isa_choices();  // the names of those available here, for messages

}  // namespace sparsight
