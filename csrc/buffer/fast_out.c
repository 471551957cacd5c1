/* fast_out: may sums be written into these arrays of the caller's, in any order? */
#include "buffer/fast_part.h"

bool fan_fast_outs_disjoint(const fan_buffer *b, fan_span span, fan_flat *outs, size_t n)
{
    size_t near[8] = {0}; /* where the last k-th term was */
    if (!fan_flats_disjoint(outs, n))
        return false;
    for (size_t i = span.first; n && i < span.end; i++) {
        const fan_list *p = b->slots[i].list;
        for (size_t k = 0; p && k < fan_list_defined(p); k++) {
            const char *data = p->entries[k].data;
            const fan_flat *met = fan_flats_last_met(outs, n, data, p->bytes, &near[k % 8]);
            if (met && (met->owner != i || met->data != data || p->n > FAN_FAST_TERMS))
                return false;
        }
    }
    return true;
}
