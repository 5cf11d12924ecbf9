// The kernels for avx2; CMakeLists.txt gives this file its own flags.
#define SPS_ISA isa_avx2
#include "isa_tu.h"
