/* load_kernels.c as of a build without nvcc. */
#define FATBIN_BYTES 0
#include "load_kernels.c"
