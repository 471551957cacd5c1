/* The kernels that the build embeds: setup.py has build.py write device/kernels/embedded.h and
 * defines FAN_EMBEDDED. C programs of the tests are compiled without them. */
#include "device/kernels/image.h"

#ifdef FAN_EMBEDDED
#include "device/kernels/embedded.h"
#else
const unsigned char fan_kernels_fatbin[] = {0};
const size_t fan_kernels_fatbin_bytes = 0;
const unsigned char fan_kernels_source[] = {0};
const size_t fan_kernels_source_bytes = 0;
const char fan_kernels_made[] = "";
#endif
