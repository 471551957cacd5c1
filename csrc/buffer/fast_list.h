/* fast_list: the gradients that the fast path has parked in one slot, by key or by arrival. A data structure: it knows
 * nothing of buffers, budgets or takes.
 *
 * Keys that come out of order move what is behind them as long as that is little; else the list is by arrival for the
 * time being, beside a set of the keys that are in it, until fan_fast_list_sort is called by whoever reads it.
 */
#ifndef FAN_BUFFER_FAST_LIST_H
#define FAN_BUFFER_FAST_LIST_H

#include "base/keys.h"
#include "buffer/value.h"

static inline bool fan_fast_same(const fan_fast_kind *a, const fan_fast_kind *b)
{
    if (a->dtype != b->dtype || a->origin != b->origin || a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i])
            return false;
    return true;
}

/* fan_fast_elements, fan_fast_bytes: of one gradient of a kind. fan_fast_kind_bytes: what it counts against a budget:
 * at least 1. */
size_t fan_fast_elements(const fan_fast_kind *k);
uint64_t fan_fast_bytes(const fan_fast_kind *k);
uint64_t fan_fast_kind_bytes(const fan_fast_kind *k);

/* One gradient. */
typedef struct fan_fast_term {
    void *object;     /* the frontend's; held; NULL: undefined (S2) */
    char *data;       /* the address of its first element; or the value itself (fan_fast_kind.inside) */
    int64_t key : 62; /* -1: none */
    uint64_t donated : 1;
    uint64_t ours : 1; /* a copy that was made for the buffer */
} fan_fast_term;
#define FAN_FAST_KEY_MAX (INT64_MAX >> 2)

static inline fan_fast_term fan_fast_term_of(void *object, char *data, int64_t key, bool donated, bool ours)
{
    fan_fast_term one = {.object = object, .data = data, .donated = donated, .ours = ours};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
    one.key = key; /* at most FAN_FAST_KEY_MAX */
#pragma GCC diagnostic pop
    return one;
}

/* fan_fast_data: where a term's elements are. */
static inline const char *fan_fast_data(const fan_fast_kind *kind, const fan_fast_term *one)
{
    return kind->inside ? (const char *)&one->data : one->data;
}

#define FAN_FAST_INLINE 4

typedef struct fan_fast_list {
    fan_fast_kind kind; /* of all that are defined; none are: unset */
    uint64_t size;      /* of one, in bytes .. */
    uint64_t bytes;     /* .. and what it counts against a budget: at least 1 */
    size_t n, cap;
    /* 0: the first of the list is a contribution like the others. Else it is the sum of so many contributions, and no
     * longer parked; of several it is memory of the buffer, of one it is that contribution itself. */
    int64_t summed;
    uint64_t rules;       /* by which that sum was made; where `summed` is 0 they mean nothing */
    size_t alone;         /* how many of those parked were the buffer's alone when that was asked */
    size_t ask;           /* and the length of the list from which on it is asked again */
    size_t undefined;     /* how many of the n are undefined; while a take has the slot they stand behind the others */
    char *out;            /* where the sum goes; set while a take has the slot */
    fan_fast_term *terms; /* by key, or by arrival; `inline_terms`, or on the heap */
    /* NULL: the list is in the order of keys. Else it is in the order of arrival for now, and these are its keys. */
    fan_keys *unsorted;
    fan_fast_term inline_terms[FAN_FAST_INLINE];
} fan_fast_list;
_Static_assert(sizeof(fan_fast_list) <= 240, "a used slot takes at most 240 bytes more than an idle one");

void fan_fast_list_init(fan_fast_list *p);
void fan_fast_list_fini(fan_fast_list *p); /* its memory; what it holds is the caller's to drop before */
/* fan_fast_list_count: contributions, those summed already too; NULL: 0. fan_fast_list_parked: those that wait. */
int64_t fan_fast_list_count(const fan_fast_list *p);
static inline size_t fan_fast_list_parked(const fan_fast_list *p) { return p->n - (p->summed > 0); }
static inline size_t fan_fast_list_defined(const fan_fast_list *p) { return p->n - p->undefined; }
/* fan_fast_list_empty: nothing is in it, as far as it knows; nothing is dropped, its memory stays. */
void fan_fast_list_empty(fan_fast_list *p);
/* fan_fast_list_insert: puts a term where its key has it; false: the key is there already, or there is no memory. */
bool fan_fast_list_put(fan_fast_list *p, const fan_fast_term *one);
static inline bool fan_fast_list_insert(fan_fast_list *p, const fan_fast_term *one)
{
    if (p->n == p->cap || p->unsorted || (one->key >= 0 && p->n && p->terms[p->n - 1].key >= one->key))
        return fan_fast_list_put(p, one);
    p->terms[p->n++] = *one; /* behind all others, as mostly */
    p->undefined += !one->object;
    return true;
}
/* fan_fast_list_remove_last: the newest term with this object and key is taken out; false: there is none. */
bool fan_fast_list_remove_last(fan_fast_list *p, const void *object, int64_t key);
/* fan_fast_list_sort: it is by key from now on. fan_fast_list_undefined_last: those that are undefined go behind the
 * others, which keep their order; fan_fast_list_by_key undoes that. */
void fan_fast_list_sort(fan_fast_list *p);
void fan_fast_list_undefined_last(fan_fast_list *p);
void fan_fast_list_by_key(fan_fast_list *p);
/* fan_fast_list_begins: whether what a fold would begin with is there. fan_fast_list_prefix: of a sorted list: how many
 * of the first terms have no gap between them. */
bool fan_fast_list_begins(const fan_fast_list *p);
size_t fan_fast_list_prefix(const fan_fast_list *p);

/* fan_fast_list_detach: the list is empty afterwards; what it held is in *to, whose terms are dropped by the caller,
 * who calls fan_fast_detached_fini last. */
typedef struct fan_fast_detached {
    fan_fast_term inline_terms[FAN_FAST_INLINE], *heap; /* heap: NULL: it is in `inline_terms` */
    size_t n, cap;
} fan_fast_detached;
void fan_fast_list_detach(fan_fast_list *p, fan_fast_detached *to);
/* fan_fast_detached_fini: a list that stayed empty gets its memory back, for the next pass. */
void fan_fast_detached_fini(fan_fast_detached *d, fan_fast_list *p);
/* fan_fast_list_shrink: of an empty list: memory for very many terms is not kept for the next pass. */
void fan_fast_list_shrink(fan_fast_list *p);

#endif
