// The products for neon; CMakeLists.txt gives this file its own flags.
#define SPS_ISA isa_neon
#include "product_tu.h"
