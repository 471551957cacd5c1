/* load_kernels.c as of a build that embeds no machine code. */
#define FATBIN_BYTES 0
#include "load_kernels.c"
