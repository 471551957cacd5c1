/* image: the kernels as the driver takes them. */
#ifndef FAN_DEVICE_KERNELS_IMAGE_H
#define FAN_DEVICE_KERNELS_IMAGE_H

#include <stddef.h>

/* ptx.c: as PTX. _newer: for GPUs from FAN_KERNELS_NEWER on, and only the kernels that their instructions make shorter:
 * those that fold float8_e4m3fn. */
extern const char fan_kernels_ptx[], fan_kernels_ptx_newer[];
#define FAN_KERNELS_NEWER 89 /* compute 8.9 */
/* fatbin.c: the same for the architectures that fan_kernels_made names; no bytes and "" where the package was
 * built without nvcc. */
extern const unsigned char fan_kernels_fatbin[];
extern const size_t fan_kernels_fatbin_bytes;
extern const char fan_kernels_made[];

#endif
