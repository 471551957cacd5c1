/* The levels of bits of a set (ready.h): making them, setting and clearing a bit, and finding the
 * first one. */
#include "engine/ready.h"

#include "base/mem.h"

#include <assert.h>

int fan_ready_init(fan_ready *ready, size_t n)
{
    size_t offsets[FAN_READY_LEVELS];
    size_t words = n / 64 + 1;
    size_t all = 0;
    *ready = (fan_ready){.levels = 0};
    for (;;) {
        assert(ready->levels < FAN_READY_LEVELS);
        offsets[ready->levels++] = all;
        all += words;
        if (words == 1)
            break;
        words = words / 64 + 1;
    }
    uint64_t *bits = fan_calloc(all * sizeof *bits);
    if (!bits)
        return -1;
    for (unsigned i = 0; i < ready->levels; i++)
        ready->level[i] = bits + offsets[i];
    return 0;
}

void fan_ready_fini(fan_ready *ready)
{
    fan_free(ready->level[0]);
    *ready = (fan_ready){.levels = 0};
}

void fan__ready_set(fan_ready *ready, size_t place)
{
    for (unsigned i = 0; i < ready->levels; i++) {
        uint64_t *word = &ready->level[i][place / 64];
        uint64_t before = *word;
        *word = before | UINT64_C(1) << (place % 64);
        if (before)
            return; /* the levels above are set */
        place /= 64;
    }
}

void fan__ready_unset(fan_ready *ready, size_t place)
{
    for (unsigned i = 0; i < ready->levels; i++) {
        uint64_t *word = &ready->level[i][place / 64];
        uint64_t bit = UINT64_C(1) << (place % 64);
        assert(*word & bit);
        *word &= ~bit;
        if (*word)
            return; /* the word has other elements */
        place /= 64;
    }
}

/* lowest_bit: of a word that is not 0. */
static size_t lowest_bit(uint64_t word)
{
    return (size_t)__builtin_ctzll(word);
}

size_t fan__ready_first_set(const fan_ready *ready, size_t from)
{
    /* up, to a level with a larger element */
    for (unsigned i = 0; i < ready->levels; i++) {
        size_t at = from / 64;
        if (at > 0 && i + 1 == ready->levels)
            break; /* the last level is one word */
        uint64_t word = ready->level[i][at] & (UINT64_MAX << (from % 64));
        if (word) {
            size_t first = 64 * at + lowest_bit(word);
            while (i-- > 0) /* and down to the smallest of them */
                first = 64 * first + lowest_bit(ready->level[i][first]);
            return first;
        }
        from = at + 1;
    }
    return FAN_READY_NONE;
}
