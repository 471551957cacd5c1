/* take_plain: the short path of a take: slots that hold plain entries alone (plain.h), without a
 * lock of a slot or a value, by the constant plan.
 *
 *   one    a slot with a few arrays (take_plain_one), as most takes are
 *   many   1. claim   2. gather: where does each sum go, is what will be read unchanged?
 *          3. sum     4. order: no stream has anything to do with plain entries
 *          5. hand over
 *
 * All other calls go to take.c, and nothing has happened before. */
#include "array/extents.h"
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/plain.h"
#include "buffer/take.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

#include <string.h>

#define TAKE_AHEAD 8
#define TAKE_FEW_OUTS 8
#define TAKE_FAR 500 /* slots that no near cache holds */

/* The divisor of a sum, as one number of the parts of its accumulation dtype. */
typedef struct take_divisor {
    _Alignas(8) char number[8];
} take_divisor;

/* One take of such slots. */
typedef struct take_plain {
    fan_buffer *b;
    fan_span span;
    const fan_take *options;
    const fan_plain_outs *outs;
    void **results;
    /* the arrays of the caller's that are written */
    fan_flat inline_outs[TAKE_FEW_OUTS];
    fan_flat *written;
    /* of each slot: the caller named an array for its sum */
    bool inline_given[TAKE_FEW_OUTS];
    bool *given;
    size_t nwritten;
    /* of a mean: of each slot */
    take_divisor inline_divisor;
    take_divisor *divisors;
    void *scratch; /* for the sum that needs the most of it; owned */
    size_t nscratch;
    _Alignas(16) char number[16]; /* a sum of numbers, before it is made an object */
    bool calls;                   /* some entries are of a kind that is checked at use */
    bool announce; /* some of the arrays that are written are of a library that counts writes */
} take_plain;

static fan_list *take_list(const fan_buffer *b, size_t slot)
{
    return b->slots[slot].list;
}

/* take_defined: the entries of a slot's sum; 0: it is undefined. */
static size_t take_defined(const fan_list *list)
{
    if (!list)
        return 0;
    return fan_list_defined(list);
}

static const fan_scale *take_scale(const fan_take *options)
{
    if (!options->scale.on)
        return NULL;
    return &options->scale;
}

bool fan_plain_scales(const fan_take *options, fan_dtype d, fan_dtype acc)
{
    if (!fan_take_scale_fits(options, d))
        return false;
    bool complex_wider = fan_dtype_kind(d) == 'c' && acc != d;
    return !complex_wider && fan_scale_dtype(&options->scale, acc) == acc;
}

/* take_plain_few: whether a slot has a few small arrays of one kind, or a small wide sum, and
 * nothing else. */
static bool take_plain_few(const fan_buffer *b, const fan_list *list)
{
    const fan_plain_kind *kind = &list->kind;
    bool followed = list->entries[0].wide && list->n > 1;
    if (list->undefined || followed || b->sum_stats)
        return false;
    if (list->n > FAN_PLAIN_TERMS || list->size > FAN_PLAIN_BYTES)
        return false;
    return !kind->scalar && !fan_plain_pitch(kind);
}

/* take_plain_weighs: whether a slot with weights is summed here: a few small arrays of one kind. A
 * lone one whose weight is 1 is handed through, by the general path. */
static bool take_plain_weighs(const fan_buffer *b, const fan_slot *s)
{
    const fan_list *list = s->list;
    if (fan_slot_has_state(s) || !list || !s->weights->n)
        return false;
    if (list->n == 1 && !fan_weight_multiplies(&s->weights->plain[0].weight))
        return false;
    return !list->entries[0].wide && take_plain_few(b, list);
}

/* take_plain_fits: whether weights and the mean of a slot are no affair of the general path. */
static bool take_plain_fits(const fan_buffer *b, size_t slot, const fan_take *options)
{
    const fan_slot *s = &b->slots[slot];
    if (fan_slot_weighted(s))
        return take_plain_weighs(b, s);
    if (!options->mean || fan_slot_has_state(s) || !take_defined(s->list))
        return true;
    return take_plain_few(b, s->list);
}

/* ---- 1. claim ---- */

/* False: the slot holds something else, or lacks a contribution. */
static bool take_plain_claim_slot(fan_buffer *b, size_t slot, const fan_take *options)
{
    fan_slot *s = &b->slots[slot];
    fan_list *list = s->list;
    if (fan_slot_has_state(s) || s->busy || s->targets)
        return false;
    if (fan_plain_stats_on_device(b, slot) || fan_slot_missing(s, 0) != 0)
        return false;
    if (list && list->n) {
        bool scaled = options->scale.on && fan_list_defined(list);
        if (scaled && !fan_plain_scales(options, list->kind.dtype, fan_plain_accum(b, slot)))
            return false;
        fan_list_sort(list);
        if (list->undefined)
            fan_list_undefined_last(list);
    }
    fan_plain_claim(s);
    return true;
}

static void take_plain_give_back(fan_buffer *b, fan_span span)
{
    for (size_t i = span.first; i < span.end; i++) {
        fan_list *list = take_list(b, i);
        if (list && list->undefined && list->entries[0].key >= 0)
            fan_list_by_key(list);
    }
    fan_plain_release(b, span);
}

/* take_stays_in_int64: of a sum of Python ints. */
static bool take_stays_in_int64(const fan_list *list, const fan_take *options)
{
    fan_int_run run = {.sum = 0};
    for (size_t k = 0; k < fan_list_defined(list); k++) {
        const char *data = fan_entry_data(&list->kind, &list->entries[k]);
        (void)fan_int_run_put(&run, list->kind.dtype, data);
    }
    return !options->scale.on && !fan_int_run_leaves(&run, NULL, NULL, list->kind.dtype);
}

/* take_fetch: prefetches what belongs to the entries of a slot TAKE_AHEAD of this one. */
static void take_fetch(const take_plain *take, size_t slot, bool memory)
{
    size_t at = slot + TAKE_AHEAD;
    if (at >= take->span.end)
        at = slot;
    const fan_list *list = take_list(take->b, at);
    fan_plain_prefetch(take->b, slot + 2 * TAKE_AHEAD);
    for (size_t k = 0; k < take_defined(list); k++) {
        const fan_entry *one = &list->entries[k];
        if (memory)
            __builtin_prefetch(one->data);
        else
            __builtin_prefetch(one->object);
    }
}

/* take_keys_whole: no key is missing (A15). */
static bool take_keys_whole(const fan_list *list)
{
    const fan_entry *entries = list->entries;
    if (fan_list_keyed(list) < 0)
        return true;
    /* the undefined ones are after the others */
    int64_t last = entries[fan_list_defined(list) - 1].key;
    if (last < entries[list->n - 1].key)
        last = entries[list->n - 1].key;
    return fan_keys_whole(fan_list_next_key(list), (uint64_t)last, fan_list_parked(list));
}

/* ---- 2. gather ---- */

/* How the sum of a slot reaches its taker (A14). */
static inline fan_take_way take_plain_way(const fan_buffer *b, size_t slot, const fan_take *options,
                                          size_t n, fan_dtype acc, bool weighted)
{
    const fan_list *list = b->slots[slot].list;
    const fan_entry *first = &list->entries[0];
    bool product = weighted && n == 1;
    bool scaled = options->scale.on || product;
    bool whole = n == 1 || take_keys_whole(list);
    fan_take_facts facts = {.terms = n,
                            .dense = n,
                            .scaled = scaled,
                            .writable = options->writable,
                            .widened = acc != list->kind.dtype,
                            .whole = whole,
                            .alone = options->one || b->nslots == 1,
                            .first_donated = first->donated,
                            .same_dtype = !first->wide};
    if (n == 1 && !facts.writable)
        facts.writable = fan_is_lent(b, first->object, NULL);
    if (n == 1 && facts.writable)
        facts.reuse = fan_plain_may_write(b, slot, 1, list->kind.dtype);
    return fan_plan_take(&facts).way;
}

/* Returns the object that the sum is written into, or is already: the first entry, or a fresh one,
 * whose hold is the caller's. Sets list->out. NULL: it is for the general path. */
static inline void *take_plain_place(const fan_buffer *b, size_t slot, const fan_take *options,
                                     size_t n, fan_dtype acc, bool weighted)
{
    fan_list *list = b->slots[slot].list;
    fan_take_way way = take_plain_way(b, slot, options, n, acc, weighted);
    list->out = NULL;
    if (way == FAN_TAKE_HAND)
        return list->entries[0].object;
    /* Nothing fails once a donated one is written (FAN_TAKE_LATE). */
    bool reuse = way == FAN_TAKE_COMMIT || way == FAN_TAKE_LATE;
    return fan_plain_place(b, slot, n, acc, reuse, &list->out);
}

/* The sum of numbers, as a number with the caller's hold. */
static void *take_plain_number(take_plain *take, size_t slot, size_t n, fan_dtype acc)
{
    fan_list *list = take_list(take->b, slot);
    const fan_plain_frontend *plain = take->b->frontend->plain;
    if (take_plain_way(take->b, slot, take->options, n, acc, false) == FAN_TAKE_HAND) {
        void *only = list->entries[0].object;
        list->out = NULL;
        plain->hold(only);
        return only;
    }
    list->out = take->number;
    fan_plain_fold(take->b, list, n, acc, take_scale(take->options), list->out, take->scratch,
                   NULL);
    return plain->number(&list->kind, list->out);
}

/* The caller's array, where there is one for this slot; false: it is for the general path. */
static bool take_plain_place_out(take_plain *take, size_t slot)
{
    fan_list *list = take_list(take->b, slot);
    const fan_plain_kind *kind = NULL;
    if (take_defined(list))
        kind = &list->kind;
    fan_flat *to = &take->written[take->nwritten];
    void *object = NULL;
    fan_plain_where where =
        take->outs->at(take->outs->ctx, slot, kind, &object, &to->data, &to->bytes);
    if (where != FAN_PLAIN_THERE)
        return where != FAN_PLAIN_REFUSED;
    size_t at = slot - take->span.first;
    to->owner = slot;
    take->nwritten++;
    take->given[at] = true;
    if (!kind) {
        take->b->frontend->drop(object);
        return true;
    }
    take->announce = take->announce || kind->check_at_use;
    take->results[at] = object;
    list->out = to->data;
    return true;
}

/* D11: whether sums may be written to the outs in any order: none meets another, nor what is still
 * read, but for an entry of its own slot that is all of it. Sorts them by address. */
static bool take_plain_outs_disjoint(const take_plain *take)
{
    size_t near[8] = {0}; /* where the last k-th entry was */
    if (!fan_flats_disjoint(take->written, take->nwritten))
        return false;
    if (!take->nwritten)
        return true;
    for (size_t i = take->span.first; i < take->span.end; i++) {
        const fan_list *list = take_list(take->b, i);
        size_t n = take_defined(list);
        if (n && fan_plain_pitch(&list->kind))
            return false;
        for (size_t k = 0; k < n; k++) {
            const char *data = list->entries[k].data;
            const fan_flat *met =
                fan_flats_last_met(take->written, take->nwritten, data, list->bytes, &near[k % 8]);
            if (!met)
                continue;
            bool own = met->owner == i && met->data == data;
            if (!own || list->n > FAN_PLAIN_TERMS)
                return false;
        }
    }
    return true;
}

/* take_reads_all: a single entry is read, too, and not just handed through. */
static bool take_reads_all(const take_plain *take)
{
    const fan_take *options = take->options;
    if (take->outs || take->b->sum_stats)
        return true;
    return options->scale.on || options->writable || options->mean;
}

/* take_is_far: no near cache holds the slots. */
static bool take_is_far(const take_plain *take)
{
    return take->span.end - take->span.first >= TAKE_FAR;
}

/* Room for a sum that needs more of it than those before it. */
static bool take_plain_grow(take_plain *take, size_t bytes)
{
    if (bytes <= take->nscratch)
        return true;
    fan_free(take->scratch);
    take->nscratch = bytes;
    take->scratch = fan_alloc(bytes);
    return take->scratch != NULL;
}

/* W3: the divisor of the mean of a slot: the one that the caller counted, or the sum of the
 * weights. False: there is none, or the general path divides in another dtype. */
static bool take_plain_divisor(take_plain *take, size_t slot)
{
    FAN_UNINITIALIZED fan_divisor sum;
    const fan_buffer *b = take->b;
    const fan_divisor *divisor = take->options->scale.divisor;
    fan_dtype acc = fan_plain_accum(b, slot);
    char kind = fan_dtype_kind(acc);
    if (kind != 'f' && kind != 'c')
        return false;
    if (!divisor) {
        if (fan_slot_divisor(b, slot, &sum, NULL) != FAN_OK)
            return false;
        divisor = &sum;
    }
    const fan_scale scale = {.divisor = divisor};
    if (fan_scale_dtype(&scale, acc) != acc)
        return false;
    fan_divisor_as(divisor, acc, take->divisors[slot - take->span.first].number);
    return true;
}

/* Where the sum of one slot goes, with the caller's hold. False: it is for the general path. */
static bool take_plain_gather_slot(take_plain *take, size_t slot)
{
    void **result = &take->results[slot - take->span.first];
    const fan_list *list = take_list(take->b, slot);
    const fan_plain_kind *kind = &list->kind;
    size_t n = take_defined(list);
    fan_dtype acc = fan_plain_accum(take->b, slot);
    take->calls = take->calls || kind->check_at_use;
    /* A large array is handed through at most, and of Python ints the general path reports what
     * does not fit. */
    if (fan_plain_is_large(list->size) && take_reads_all(take))
        return false;
    if (!take_plain_grow(take, fan_plain_scratch(list, n, acc, take->b->sum_stats)))
        return false;
    bool ints = kind->weak && kind->dtype == FAN_DT_INT64;
    if (ints && !take_stays_in_int64(list, take->options))
        return false;
    if (take->options->mean && !take_plain_divisor(take, slot))
        return false;
    if (*result)
        return true;
    if (kind->scalar) {
        *result = take_plain_number(take, slot, n, acc);
        return *result != NULL;
    }
    bool weighted = fan_slot_weighted(&take->b->slots[slot]) || take->options->mean;
    *result = take_plain_place(take->b, slot, take->options, n, acc, weighted);
    if (*result && *result == list->entries[0].object)
        take->b->frontend->plain->hold(*result);
    return *result != NULL;
}

static bool take_plain_gather(take_plain *take)
{
    bool far = take_is_far(take);
    for (size_t i = take->span.first; take->outs && i < take->span.end; i++) {
        if (!take_plain_place_out(take, i))
            return false;
    }
    if (take->outs && !take_plain_outs_disjoint(take))
        return false;
    for (size_t i = take->span.first; i < take->span.end; i++) {
        if (far)
            take_fetch(take, i, false);
        if (take_defined(take_list(take->b, i)) && !take_plain_gather_slot(take, i))
            return false;
    }
    return true;
}

/* The array that the k-th of the outs is; NULL: its slot's sum is undefined. */
static void *take_plain_out(const take_plain *take, size_t k)
{
    return take->results[take->written[k].owner - take->span.first];
}

/* Checks with the libraries that what will be read has its value, and reports the writes to those
 * that count them. They may run arbitrary code. */
static bool take_plain_ask(const take_plain *take)
{
    for (size_t i = take->span.first; take->calls && i < take->span.end; i++) {
        const fan_list *list = take_list(take->b, i);
        size_t n = take_defined(list);
        if (!n)
            continue;
        bool first = take->results[i - take->span.first] == list->entries[0].object;
        if (!fan_plain_has_values(take->b, list, n, first))
            return false;
    }
    for (size_t k = 0; take->announce && k < take->nwritten; k++) {
        void *to = take_plain_out(take, k);
        if (to && !take->b->frontend->plain->wrote(to))
            return false;
    }
    return true;
}

/* Checks that what will be read is unchanged. Calls the libraries first, also those that count
 * writes to their arrays. */
static bool take_plain_readable(const take_plain *take)
{
    bool reads = take_reads_all(take);
    bool far = take_is_far(take);
    if (!take_plain_ask(take))
        return false;
    for (size_t i = take->span.first; i < take->span.end; i++) {
        const fan_list *list = take_list(take->b, i);
        size_t n = take_defined(list);
        if (far)
            take_fetch(take, i, false);
        if (n == 0 || list->kind.scalar)
            continue;
        bool product = fan_slot_weighted(&take->b->slots[i]);
        bool read = n > 1 || reads || product;
        if (read && !fan_plain_all_unchanged(take->b, list, n))
            return false;
    }
    if (!take->calls && !take->announce)
        return true;
    for (size_t k = 0; k < take->nwritten; k++) {
        void *to = take_plain_out(take, k);
        const fan_plain_kind *kind = &take_list(take->b, take->written[k].owner)->kind;
        if (to && !fan_plain_unchanged(take->b, to, kind, take->written[k].data))
            return false;
    }
    return true;
}

/* ---- 3. sum ---- */

static void take_keep_stats(fan_buffer *b, size_t slot, const fan_stats *stats)
{
    fan_sum_stats *kept = &b->sum_stats[slot];
    *kept = (fan_sum_stats){.valid = true, .stats = {.count = UINT64_MAX}};
    if (!stats)
        return;
    kept->stats = *stats;
    if (stats->nonfinite && stats->bad != SIZE_MAX)
        fan_sum_stats_blame(kept, take_list(b, slot)->entries[stats->bad].key);
}

static void take_plain_sum_slot(take_plain *take, size_t slot)
{
    FAN_UNINITIALIZED fan_stats sum_stats;
    fan_buffer *b = take->b;
    const fan_take *options = take->options;
    const fan_list *list = take_list(b, slot);
    size_t at = slot - take->span.first;
    size_t n = take_defined(list);
    fan_stats *stats = NULL;
    if (b->sum_stats)
        stats = &sum_stats;
    if (!n) {
        if (stats)
            take_keep_stats(b, slot, NULL);
        return;
    }
    bool number = list->kind.scalar;
    bool first = !number && take->results[at] == list->entries[0].object;
    bool is_out = take->outs && take->given[at];
    bool anew = options->scale.on || options->mean;
    bool lone = n == 1 && !anew && !list->entries[0].weighted;
    bool is_there = is_out && first && lone;
    char *out = list->out;
    if (!out)
        out = number ? take->number : list->entries[0].data;
    bool made = list->out && !is_there;
    bool weighs = options->mean || fan_slot_weighted(&b->slots[slot]);
    if (made && weighs) {
        const char *divisor = NULL;
        if (options->mean)
            divisor = take->divisors[at].number;
        fan_plain_fold_weighted(b, slot, n, divisor, take_scale(options), out);
    } else if (stats || (!number && made)) {
        fan_plain_fold(b, list, n, fan_plain_accum(b, slot), take_scale(options), out,
                       take->scratch, stats);
    }
    if (stats)
        take_keep_stats(b, slot, stats);
    if (made)
        fan_plain_count(b, list, n, first && !is_out, n == 1 && !is_out, false);
}

static void take_plain_sum(take_plain *take)
{
    bool far = take_is_far(take);
    for (size_t i = take->span.first; i < take->span.end; i++) {
        if (far)
            take_fetch(take, i, true);
        take_plain_sum_slot(take, i);
    }
}

/* ---- 5. hand over ----
 *
 * The slots are empty and free. What they held is dropped last, when the buffer is ready for any
 * call of a finalizer. */

/* References to drop after all slots are released. If this list cannot grow, drop immediately: a
 * call back into a slot that is still claimed is then refused. */
typedef struct take_drops {
    void *inline_objects[64];
    void **all;
    size_t n;
    size_t cap;
} take_drops;

static bool take_defer_drop(take_drops *drops, void *object)
{
    if (drops->n == drops->cap) {
        bool small = drops->all == drops->inline_objects;
        void **more = fan_realloc(small ? NULL : drops->all, 2 * drops->cap * sizeof *more);
        if (!more)
            return false;
        if (small)
            memcpy(more, drops->inline_objects, sizeof drops->inline_objects);
        drops->all = more;
        drops->cap *= 2;
    }
    drops->all[drops->n++] = object;
    return true;
}

static void take_plain_empty(fan_buffer *b, fan_list *list, take_drops *drops)
{
    for (size_t k = 0; k < list->n; k++) {
        void *object = list->entries[k].object;
        if (!object || b->frontend->plain->drop_if_shared(object))
            continue;
        if (!take_defer_drop(drops, object))
            b->frontend->drop(object);
    }
    fan_list_unpark(b, list, fan_list_parked(list) - list->undefined);
    fan_list_empty(list);
    fan_list_shrink(list);
}

static void take_plain_hand_over(fan_buffer *b, fan_span span)
{
    FAN_UNINITIALIZED take_drops drops;
    drops.all = drops.inline_objects;
    drops.n = 0;
    drops.cap = sizeof drops.inline_objects / sizeof *drops.inline_objects;
    for (size_t i = span.first; i < span.end; i++) {
        fan_list *list = take_list(b, i);
        if (list && list->n)
            take_plain_empty(b, list, &drops);
    }
    fan_plain_release(b, span);
    for (size_t i = 0; i < drops.n; i++)
        b->frontend->drop(drops.all[i]);
    if (drops.all != drops.inline_objects)
        fan_free(drops.all);
}

/* ---- one slot with a few arrays ---- */

/* Whether a slot has a few arrays, as most have: 1 to FAN_PLAIN_TERMS small ones, and nothing
 * else. */
static bool take_plain_is_few(const fan_buffer *b, const fan_list *list, size_t n)
{
    if (n == 0 || n > FAN_PLAIN_TERMS || list->undefined)
        return false;
    return !list->kind.scalar && list->size <= FAN_PLAIN_BYTES && !b->sum_stats;
}

/* The same steps for one slot with a few arrays, as most takes are, without what several slots need
 * between them. *result NULL: it is not that, and nothing happened. False: it is for the general
 * path. */
static bool take_plain_one(fan_buffer *b, size_t slot, const fan_take *options, void **result)
{
    const fan_span span = {slot, slot + 1};
    if (fan_slot_has_state(&b->slots[slot]))
        return false; /* the list may have no plain entry, and then no kind */
    fan_list *list = take_list(b, slot);
    size_t n = take_defined(list);
    if (!take_plain_is_few(b, list, n) || fan_slot_weighted(&b->slots[slot]))
        return true;
    if (!take_plain_claim_slot(b, slot, options))
        return false;
    fan_dtype acc = fan_plain_accum(b, slot);
    void *to = take_plain_place(b, slot, options, n, acc, false);
    bool first = to == list->entries[0].object;
    bool sums = list->out;
    bool reads = sums || options->writable;
    bool good = to && fan_plain_has_values(b, list, n, first);
    if (good && reads)
        good = fan_plain_all_unchanged(b, list, n);
    if (good) {
        if (sums) {
            fan_plain_fold(b, list, n, acc, take_scale(options), list->out, NULL, NULL);
            fan_plain_count(b, list, n, first, n == 1, false);
        }
        if (first) /* the list's hold is the caller's from now on */
            list->entries[0].object = NULL;
        take_plain_hand_over(b, span);
        *result = to;
        return true;
    }
    fan_plain_release(b, span);
    fan_plain_give_up(b, first ? NULL : to);
    return false;
}

/* ---- all slots of a span ---- */

/* As if there had been no take. The general path reports what is wrong, if anything is. */
static void take_plain_undo(const take_plain *take)
{
    take_plain_give_back(take->b, take->span);
    for (size_t i = 0; i < take->span.end - take->span.first; i++) {
        fan_plain_give_up(take->b, take->results[i]);
        take->results[i] = NULL;
    }
}

/* False: some slot is for the general path, and none is claimed. */
static bool take_plain_claim(fan_buffer *b, fan_span span, const fan_take *options)
{
    for (size_t i = span.first; i < span.end; i++) {
        bool weighs = options->mean || fan_slot_weighted(&b->slots[i]);
        bool fits = !weighs || take_plain_fits(b, i, options);
        if (fits && take_plain_claim_slot(b, i, options))
            continue;
        take_plain_give_back(b, (fan_span){span.first, i});
        return false;
    }
    return true;
}

/* Room for the facts of each slot. */
static bool take_plain_begin(take_plain *take)
{
    size_t n = take->span.end - take->span.first;
    take->written = take->inline_outs;
    take->given = take->inline_given;
    take->nwritten = 0;
    take->divisors = &take->inline_divisor;
    take->calls = false;
    take->announce = false;
    take->scratch = NULL;
    take->nscratch = 0;
    if (take->options->mean && n > 1)
        take->divisors = fan_alloc(n * sizeof *take->divisors);
    if (!take->divisors)
        return false;
    if (!take->outs)
        return true;
    memset(take->inline_given, 0, sizeof take->inline_given);
    if (n > TAKE_FEW_OUTS) {
        take->written = fan_alloc(n * sizeof *take->written);
        take->given = fan_calloc(n * sizeof *take->given);
    }
    return take->written && take->given;
}

static void take_plain_end(take_plain *take)
{
    fan_free(take->scratch);
    if (take->divisors != &take->inline_divisor)
        fan_free(take->divisors);
    if (take->written != take->inline_outs) {
        fan_free(take->written);
        fan_free(take->given);
    }
}

bool fan_plain_take(fan_buffer *b, fan_span span, const fan_take *options,
                    const fan_plain_outs *outs, void **results)
{
    FAN_UNINITIALIZED take_plain take;
    if (!fan_plain_allowed() || !fan_buffer_is_usable(b))
        return false;
    bool one = !outs && span.end - span.first == 1;
    if (one && !options->mean) {
        bool good = take_plain_one(b, span.first, options, results);
        if (!good || results[0])
            return good;
    }
    if (!take_plain_claim(b, span, options))
        return false;
    take.b = b;
    take.span = span;
    take.options = options;
    take.outs = outs;
    take.results = results;
    bool good = take_plain_begin(&take) && take_plain_gather(&take) && take_plain_readable(&take);
    if (good) {
        take_plain_sum(&take);
        for (size_t i = span.first; i < span.end; i++)
            fan_slot_weights_clear(&b->slots[i]);
        take_plain_hand_over(b, span);
    } else {
        take_plain_undo(&take);
    }
    take_plain_end(&take);
    return good;
}
