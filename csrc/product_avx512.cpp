// The products for avx512; CMakeLists.txt gives this file its own flags.
#define SPS_ISA isa_avx512
#include "product_tu.h"
