/* image: the kernels as the build embeds them. build.py writes the header that embedded.c
 * includes. */
#ifndef FAN_DEVICE_KERNELS_IMAGE_H
#define FAN_DEVICE_KERNELS_IMAGE_H

#include <stddef.h>

/* Machine code for the architectures that fan_kernels_made names: 0 bytes and "" but in a build
 * with FANIN_NVCC=1. */
extern const unsigned char fan_kernels_fatbin[];
extern const size_t fan_kernels_fatbin_bytes;
extern const char fan_kernels_made[];
/* kernels.cu and the headers that it includes, for NVRTC and nvcc: zlib of JSON, {name: text}. */
extern const unsigned char fan_kernels_source[];
extern const size_t fan_kernels_source_bytes;

#endif
