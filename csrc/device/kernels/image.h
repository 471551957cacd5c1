/* image: the images of the kernels. */
#ifndef FAN_DEVICE_KERNELS_IMAGE_H
#define FAN_DEVICE_KERNELS_IMAGE_H

#include <stddef.h>

/* ptx.c: as PTX. _newer: for GPUs from FAN_KERNELS_NEWER on, with only those kernels that newer instructions make
 * shorter: the folds of float8_e4m3fn. */
extern const char fan_kernels_ptx[], fan_kernels_ptx_newer[];
#define FAN_KERNELS_NEWER 89 /* compute 8.9 */
/* fatbin.c: as machine code for the architectures in fan_kernels_made; 0 bytes and "" if the package was built without
 * nvcc. */
extern const unsigned char fan_kernels_fatbin[];
extern const size_t fan_kernels_fatbin_bytes;
extern const char fan_kernels_made[];

#endif
