/* plain: the facts that each step of plain entries (plain.h) needs: may this memory be written, has
 * it its value, is it unchanged; and how their sums are counted. */
#include "buffer/plain.h"

size_t fan_plain_scratch(const fan_list *list, size_t n, fan_dtype acc, bool stats)
{
    if (n <= FAN_PLAIN_TERMS)
        return 0;
    bool other_dtype = acc != list->kind.dtype && !list->entries[0].wide;
    if (!stats && !fan_plain_pitch(&list->kind) && !other_dtype)
        return 0;
    return (n + 1) * (sizeof(fan_array) + sizeof(fan_operand) + sizeof(char *));
}

/* ---- may it be written (A6)? ---- */

bool fan_plain_unshared(const fan_buffer *b, const fan_entry *one, bool owned)
{
    return !owned && !one->donated && b->frontend->plain->unshared(one->object);
}

fan_reuse_answer fan_plain_may_write(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc)
{
    const fan_list *list = b->slots[slot].list;
    const fan_entry *first = &list->entries[0];
    bool scalar = list->kind.scalar;
    bool owned = list->summed > 1 || first->owned;
    fan_reuse facts = {.dense = !fan_plain_pitch(&list->kind),
                       .writable = !scalar,
                       .same_dtype = acc == list->kind.dtype || first->wide,
                       .disjoint = true,
                       .owned = owned,
                       .exposed = first->exposed,
                       .donated = first->donated,
                       .unshared = !scalar && fan_plain_unshared(b, first, owned),
                       .host = true};
    if (first->donated && !owned && !scalar)
        facts.writable = b->frontend->plain->writable(first->object, &list->kind);
    bool free = fan_reuse_free(&facts); /* if not, as mostly, it matters no more what it meets */
    for (size_t k = 1; free && k < n && facts.disjoint; k++) {
        const char *other = list->entries[k].data;
        facts.disjoint = !fan_flats_meet(other, list->bytes, first->data, list->bytes);
    }
    return fan_reusable(&facts);
}

void *fan_plain_place(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc, bool reuse,
                      char **data)
{
    const fan_list *list = b->slots[slot].list;
    void *first = list->entries[0].object;
    *data = list->entries[0].data;
    if (reuse && fan_plain_may_write(b, slot, n, acc) == FAN_REUSE_YES)
        return first;
    return b->frontend->plain->fresh(first, &list->kind, data);
}

/* ---- is it what it was? ---- */

bool fan_plain_has_value(const fan_buffer *b, const fan_entry *one, bool handed)
{
    const fan_plain_frontend *plain = b->frontend->plain;
    if (one->owned)
        return true;
    if (handed && !plain->is_detached(one->object))
        return false;
    return plain->has_own_value(one->object);
}

bool fan_plain_all_unchanged(const fan_buffer *b, const fan_list *list, size_t n)
{
    bool wide = n && list->entries[0].wide;
    for (size_t k = wide; k < n; k++) {
        const fan_entry *one = &list->entries[k];
        if (!fan_plain_unchanged(b, one->object, &list->kind, one->data))
            return false;
    }
    if (!wide)
        return true;
    const fan_entry *sum = &list->entries[0];
    fan_plain_kind kind = fan_entry_kind(&list->kind, sum);
    return fan_plain_unchanged(b, sum->object, &kind, sum->data);
}

void fan_plain_give_up(const fan_buffer *b, void *object)
{
    if (object)
        b->frontend->drop(object);
    if (b->frontend->clear_error)
        b->frontend->clear_error();
}

/* ---- what is counted ---- */

uint64_t fan_plain_sum_size(const fan_list *list, bool wide)
{
    fan_dtype dtype = list->kind.dtype;
    if (!wide)
        return list->size;
    return list->size / fan_dtype_size(dtype) * fan_dtype_size(fan_sum_flat_upper(dtype));
}

void fan_plain_count(fan_buffer *b, const fan_list *list, size_t n, bool in_place, bool copied,
                     bool wide)
{
    fan_counter_store *counters = &b->counters;
    uint64_t first = fan_plain_sum_size(list, list->entries[0].wide);
    fan_counter_add(&counters->passes, 1);
    fan_counter_add(&counters->bytes_read, (n - 1) * list->size + first);
    fan_counter_add(&counters->bytes_written, fan_plain_sum_size(list, wide));
    fan_counter_add(&counters->folds, n > 1);
    fan_counter_add(&counters->in_place, in_place ? n - 1 : 0);
    fan_counter_add(&counters->copies, copied);
}
