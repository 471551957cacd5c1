#include "engine/ready.h"

#include "base/mem.h"

#include <assert.h>

int fan_ready_init(fan_ready *r, size_t n)
{
    size_t words = n / 64 + 1, all = 0;
    *r = (fan_ready){.levels = 0};
    for (size_t w = words;; w = w / 64 + 1) {
        all += w;
        r->levels++;
        if (w == 1)
            break;
    }
    assert(r->levels <= FAN_READY_LEVELS);
    r->level[0] = fan_calloc(all * sizeof *r->level[0]);
    if (!r->level[0])
        return -1;
    for (unsigned i = 1; i < r->levels; i++, words = words / 64 + 1)
        r->level[i] = r->level[i - 1] + words;
    return 0;
}

void fan_ready_fini(fan_ready *r)
{
    fan_free(r->level[0]);
    *r = (fan_ready){.levels = 0};
}

void fan__ready_set(fan_ready *r, size_t place)
{
    for (unsigned i = 0; i < r->levels; i++, place /= 64) {
        uint64_t *word = &r->level[i][place / 64], before = *word;
        *word = before | UINT64_C(1) << (place % 64);
        if (before)
            return; /* the levels above are set */
    }
}

void fan__ready_unset(fan_ready *r, size_t place)
{
    for (unsigned i = 0; i < r->levels; i++, place /= 64) {
        assert(r->level[i][place / 64] >> (place % 64) & 1);
        if (r->level[i][place / 64] &= ~(UINT64_C(1) << (place % 64)))
            return; /* the word has other elements */
    }
}

/* first_bit: the lowest set bit of a word that is at least `from`; 64: none. */
static unsigned first_bit(uint64_t word, size_t from)
{
    word = from < 64 ? word & (UINT64_MAX << from) : 0;
    return word ? (unsigned)__builtin_ctzll(word) : 64;
}

size_t fan__ready_first_set(const fan_ready *r, size_t from)
{
    /* up, to a level with a larger element */
    for (unsigned i = 0; i < r->levels; i++, from = from / 64 + 1) {
        unsigned bit;
        if (i + 1 == r->levels && from / 64 > 0)
            break;
        bit = first_bit(r->level[i][from / 64], from % 64);
        if (bit == 64)
            continue;
        from = from / 64 * 64 + bit;
        while (i-- > 0) /* and down to the smallest of them */
            from = from * 64 + (unsigned)__builtin_ctzll(r->level[i][from]);
        return from;
    }
    return FAN_READY_NONE;
}
