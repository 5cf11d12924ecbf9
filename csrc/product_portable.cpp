// The products for portable; CMakeLists.txt gives this file its own flags.
#define SPS_ISA isa_portable
#define SPS_PORTABLE
#include "product_tu.h"
