#include "fake_cuda/traffic.h"

#include "base/mem.h"

#include <stdatomic.h>
#include <string.h>

#define SECTOR 32 /* bytes */
#define PLACES ((uint64_t)1 << 18)

/* What a block has touched of 32 bytes. */
typedef struct traffic_sector {
    uint64_t number, block; /* block: which one it was; another one's counts for nothing */
    uint32_t read, written; /* a bit for each byte */
} traffic_sector;

static _Atomic(traffic_sector *) sectors; /* NULL: traffic is not counted */
static uint64_t block, used, bytes_read, bytes_written;

bool fan__traffic_begin(void)
{
    fan__traffic_end();
    traffic_sector *new = fan_calloc(PLACES * sizeof *new);
    block = 1;
    used = bytes_read = bytes_written = 0;
    atomic_store(&sectors, new);
    return new != NULL;
}

void fan__traffic_end(void)
{
    fan_free(atomic_exchange(&sectors, NULL));
}

bool fan__traffic_counts(void)
{
    return atomic_load_explicit(&sectors, memory_order_relaxed) != NULL;
}

void fan__traffic_block(void)
{
    block++;
    used = 0;
}

/* traffic_find: the place of a sector. A block that touches too many forgets them all, as a cache
 * does. */
static traffic_sector *traffic_find(uint64_t number)
{
    traffic_sector *all = atomic_load_explicit(&sectors, memory_order_relaxed);
    if (used > PLACES / 2)
        fan__traffic_block();
    uint64_t at = number * UINT64_C(0x9E3779B97F4A7C15) >> 46;
    while (all[at].block == block && all[at].number != number)
        at = (at + 1) % PLACES;
    if (all[at].block != block) {
        all[at] = (traffic_sector){.number = number, .block = block};
        used++;
    }
    return &all[at];
}

void fan__traffic_touch(uint64_t address, size_t bytes, bool reads)
{
    while (bytes) {
        size_t from = address % SECTOR;
        size_t here = SECTOR - from < bytes ? SECTOR - from : bytes;
        uint32_t mask = (here == SECTOR ? UINT32_MAX : (UINT32_C(1) << here) - 1) << from;
        traffic_sector *s = traffic_find(address / SECTOR);
        if (reads) {
            bytes_read += (uint64_t)__builtin_popcount(mask & ~s->read);
            s->read |= mask;
        } else {
            bytes_written += (uint64_t)__builtin_popcount(mask & ~s->written);
            s->written |= mask;
        }
        address += here;
        bytes -= here;
    }
}

uint64_t fan__traffic_read(void)
{
    return bytes_read;
}

uint64_t fan__traffic_written(void)
{
    return bytes_written;
}
