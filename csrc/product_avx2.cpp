// The products for avx2; CMakeLists.txt gives this file its own flags.
#define SPS_ISA isa_avx2
#include "product_tu.h"
