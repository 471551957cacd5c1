/* The kernels as machine code, if the package was built with nvcc: setup.py makes device/kernels/fatbin.h by
 * build.py. */
#include "device/kernels/image.h"

#ifdef FAN_FATBIN
#include "device/kernels/fatbin.h"
#else
const unsigned char fan_kernels_fatbin[] = {0};
const size_t fan_kernels_fatbin_bytes = 0;
const char fan_kernels_made[] = "";
#endif
