/* fast_out: may sums be written into these arrays of the caller's, in any order? */
#include "base/mem.h"
#include "buffer/fast_part.h"

#include <stdlib.h>
#include <string.h>

static int by_address(const void *a, const void *b)
{
    const fan_fast_out *x = a, *y = b;
    return (x->data > y->data) - (x->data < y->data);
}

#define DIGIT 11 /* bits; where there are few outs, 8 */
#define FEW 48   /* and less than that are sorted otherwise */

/* By address, a digit at a time: outs of one heap differ in few. */
static void sort_outs(fan_fast_out *outs, size_t n)
{
    uintptr_t least = UINTPTR_MAX, most = 0;
    for (size_t i = 0; i < n; i++) {
        uintptr_t at = (uintptr_t)outs[i].data;
        least = at < least ? at : least;
        most = at > most ? at : most;
    }
    const int bits = n < (size_t)1 << DIGIT ? 8 : DIGIT;
    const size_t digits = (size_t)1 << bits;
    fan_fast_out *room = n >= FEW && n <= UINT32_MAX ? fan_alloc(n * sizeof *room) : NULL, *from = outs, *to = room;
    if (!room) {
        qsort(outs, n, sizeof *outs, by_address);
        return;
    }
    for (int shift = 0; shift < 64 && (most - least) >> shift; shift += bits) {
        FAN_UNCLEARED uint32_t ends[(1 << DIGIT) + 1];
        memset(ends, 0, (digits + 1) * sizeof *ends);
#define DIGIT_OF(one) (((uintptr_t)(one).data - least) >> shift & (digits - 1))
        for (size_t i = 0; i < n; i++)
            ends[DIGIT_OF(from[i]) + 1]++;
        for (size_t i = 0; i < digits; i++)
            ends[i + 1] += ends[i];
        for (size_t i = 0; i < n; i++)
            to[ends[DIGIT_OF(from[i])]++] = from[i];
        fan_fast_out *swap = from;
        from = to;
        to = swap;
    }
    if (from != outs)
        memcpy(outs, from, n * sizeof *outs);
    fan_free(room);
}

/* How many outs begin before `end`, looked for around `from`: terms mostly lie in the order of their slots, and outs
 * too. */
static size_t outs_before(const fan_fast_out *outs, size_t n, const char *end, size_t from)
{
    size_t lo = 0, hi = n;
    if (from < n && outs[from].data < end) {
        lo = from + 1;
        for (size_t step = 1; lo + step <= n; step *= 2) {
            if (outs[lo + step - 1].data >= end) {
                hi = lo + step - 1;
                break;
            }
            lo += step;
        }
    } else {
        hi = from;
        for (size_t step = 1; step <= hi; step *= 2) {
            if (outs[hi - step].data < end) {
                lo = hi - step + 1;
                break;
            }
            hi -= step;
        }
    }
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (outs[mid].data < end)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool fan_fast_outs_apart(const fan_buffer *b, fan_span span, fan_fast_out *outs, size_t n)
{
    size_t near[8] = {0}; /* where the last k-th term was */
    bool sorted = true;
    for (size_t i = 1; i < n; i++)
        sorted = sorted && outs[i - 1].data < outs[i].data;
    if (!sorted)
        sort_outs(outs, n);
    for (size_t i = 1; i < n; i++)
        if (outs[i - 1].data + outs[i - 1].bytes > outs[i].data)
            return false;
    for (size_t i = span.first; n && i < span.end; i++) {
        const fan_fast_list *p = b->slots[i].fast;
        for (size_t k = 0; p && k < fan_fast_list_defined(p); k++) {
            const char *data = p->terms[k].data;
            size_t at = outs_before(outs, n, data + p->bytes, near[k % 8]);
            near[k % 8] = at;
            if (!at || outs[at - 1].data + outs[at - 1].bytes <= data)
                continue;
            if (outs[at - 1].slot != i || outs[at - 1].data != data || p->n > FAN_FAST_TERMS)
                return false;
        }
    }
    return true;
}
