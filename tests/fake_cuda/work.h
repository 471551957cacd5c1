/* work: what the machine runs for the driver. */
#ifndef FAN_FAKE_WORK_H
#define FAN_FAKE_WORK_H

#include "fake_cuda/tag.h"
#include "fake_cuda/state.h"

#define FAN__FAKE_ALLOC "allocate" /* the name of a node that allocates memory */

typedef struct fan__fake_work {
    void (*run)(struct fan__fake_work *w);
    const fan_fake_kernel *kernel;
    int64_t threads;
    void *to; /* what else it needs: memory of the host, a pool */
    uint64_t address;
    size_t bytes;
    unsigned char byte;
    fan_device *device;
    char payload[];
} fan__fake_work;

static inline void *fan__host(uint64_t address)
{
    return (void *)(uintptr_t)(address & ~FAN_FAKE_TAG);
}

fan__fake_work *fan__work_new(void (*run)(fan__fake_work *), uint64_t address, size_t bytes,
                              size_t payload);
/* fan__work_queue: puts w behind what s has; the machine frees it. w is NULL where there was no
 * memory for it, which the code says. */
fan_cu_result fan__work_queue(fan_stream *s, const char *name, fan__fake_work *w,
                              fan_array *const *reads, size_t nreads, fan_array *const *writes,
                              size_t nwrites);
fan_array fan__bytes_at(uint64_t address, size_t bytes, int64_t *dims);

#endif
