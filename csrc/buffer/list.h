/* list: the contributions that wait in one slot, by key or by arrival. A data structure, without
 * buffers, budgets or takes.
 *
 * Keys that come out of order move the entries after them as long as these are few; else the list
 * is by arrival for the time being, beside a set of the keys that are in it, until a reader calls
 * fan_list_sort.
 *
 * In this order: the kind of plain contributions and the geometry of their memory; items and
 * entries; the list: its counts, its keys, what is put in and taken out. */
#ifndef FAN_BUFFER_LIST_H
#define FAN_BUFFER_LIST_H

#include "array/sum.h"
#include "base/keys.h"
#include "buffer/value.h"

/* ---- the kind of plain contributions (value.h) ---- */

/* fan_plain_pitch: returns the elements from one place to the next along the axis that has gaps.
 *   0: no axis has gaps */
static inline int64_t fan_plain_pitch(const fan_plain_kind *kind)
{
    return kind->order >> 10;
}
/* fan_plain_same: whether two arrays are of one kind, and so may wait in one list. */
static inline bool fan_plain_same(const fan_plain_kind *a, const fan_plain_kind *b)
{
    if (a->dtype != b->dtype || a->origin != b->origin)
        return false;
    return a->order == b->order && fan_shape_same(a->ndim, a->shape, b->ndim, b->shape);
}

/* fan_plain_elements: returns how many elements a gradient of a kind has. */
size_t fan_plain_elements(const fan_plain_kind *kind);
/* fan_plain_bytes: returns the bytes of these. */
uint64_t fan_plain_bytes(const fan_plain_kind *kind);
/* fan_plain_kind_bytes: what one of a kind counts against a budget: at least 1. */
uint64_t fan_plain_kind_bytes(const fan_plain_kind *kind);
/* fan_plain_order: the order of an array that is not in C order. `unit`: the stride between two
 * neighbours in memory.
 *   bits 0 to 7     its axes from the fastest to the slowest, two bits each
 *   bits 8 and 9    how many of the fastest have no gap between them
 *   from bit 10 on  the pitch beyond those; 0: no axis has gaps
 *   false: its memory is neither gap-free nor, where `gaps` is set, has gaps along one axis alone
 */
bool fan_plain_order(int ndim, const int64_t *shape, const int64_t *strides, int64_t unit,
                     bool gaps, uint32_t *order);
/* fan_plain_strides: the strides of gap-free memory in the order of a kind. */
void fan_plain_strides(const fan_plain_kind *kind, int64_t unit, int64_t *strides);
/* fan_plain_reach: the bytes from the first element to the end of the last one. */
uint64_t fan_plain_reach(const fan_plain_kind *kind);
/* fan_plain_rows: the extents of an array of a kind with gaps, seen as one of two axes. */
void fan_plain_rows(const fan_plain_kind *kind, int64_t *rows, int64_t *row);

/* ---- items and entries ---- */

/* A contribution that is more than a plain one: converted, on a stream, sparse, an object, or on
 * its way. Owned by its slot from reservation on; only the slot's folder takes it away again. */
typedef struct fan_item {
    fan_value value;
    int64_t key;          /* -1: none */
    fan_stream *producer; /* held; where the value is ready. NULL on devices without streams */
    fan_event *event;     /* held; on P. NULL: no stream will wait for it */
    /* false while its add still carries out its plan; true of the sum, whose `bytes` are 0 */
    bool parked;
    bool donated;
    bool owned;        /* a copy or conversion that the buffer made */
    bool exposed;      /* .. and its producer has it, too (target), or `shown` */
    bool shown;        /* .. it was shown to the user by a take */
    fan_dtype_set own; /* the dtype that it had when it was added (A10) */
    /* of a Python int or bool, or a sum of such, its value in two's complement (D5); else 0 */
    int64_t number;
    bool alone;        /* only the buffer holds it, as far as is known */
    fan_weight weight; /* W1; not on: none was given */
    uint64_t bytes;
    uint64_t hash; /* with debug: of its elements at add */
    bool hashed;
} fan_item;

/* One contribution. A plain one is a host array of the list's kind, or undefined, and all that is
 * known of it is here; of any other `general` is set, and it is an item. */
typedef struct fan_entry {
    union {
        void *object;   /* the frontend's; held; NULL: undefined (S2) */
        fan_item *item; /* owned */
    };
    char *data; /* the address of its first element; or the value itself (fan_plain_kind.inside) */
    uint64_t donated : 1;
    uint64_t owned : 1;   /* a copy that was made for the buffer .. */
    uint64_t exposed : 1; /* .. and shown to the user by a take */
    uint64_t general : 1;
    /* of a plain one, on arrival: but for its call only the buffer holds it .. */
    uint64_t alone : 1;
    uint64_t copy : 1;     /* .. and the buffer is to keep a copy, not the object */
    uint64_t wide : 1;     /* a plain sum in the dtype that fan_sum_flat_upper has for the list's */
    uint64_t weighted : 1; /* of a plain one: it has a weight (weights.h) */
    int64_t key : 56;      /* of a plain one; -1: none */
} fan_entry;
#define FAN_ENTRY_KEY_MAX (INT64_MAX >> 8)

/* fan_entry_key: its key; -1: none. */
static inline int64_t fan_entry_key(const fan_entry *one)
{
    if (one->general)
        return one->item->key;
    return one->key;
}
/* fan_entry_parked: a fold may sum it. */
static inline bool fan_entry_parked(const fan_entry *one)
{
    return !one->general || one->item->parked;
}
/* fan_entry_same: the two are one contribution. */
static inline bool fan_entry_same(const fan_entry *a, const fan_entry *b)
{
    if (a->object != b->object || a->general != b->general)
        return false;
    return a->general || a->key == b->key;
}

/* fan_entry_of: a plain entry; its other bits are the caller's to set. */
static inline fan_entry fan_entry_of(void *object, char *data, int64_t key, bool donated,
                                     bool owned)
{
    fan_entry one = {
        .object = object,
        .data = data,
        .donated = donated,
        .owned = owned,
    };
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
    one.key = key; /* at most FAN_ENTRY_KEY_MAX */
#pragma GCC diagnostic pop
    return one;
}

/* fan_entry_data: where a term's elements are. */
static inline const char *fan_entry_data(const fan_plain_kind *kind, const fan_entry *one)
{
    if (kind->inside)
        return (const char *)&one->data;
    return one->data;
}

/* fan_entry_kind: of a plain entry of a list of `kind`. */
static inline fan_plain_kind fan_entry_kind(const fan_plain_kind *kind, const fan_entry *one)
{
    fan_plain_kind own = *kind;
    if (one->wide)
        own.dtype = fan_sum_flat_upper(kind->dtype);
    return own;
}

/* ---- the list ---- */

#define FAN_LIST_INLINE 4

typedef struct fan_list {
    fan_plain_kind kind; /* of all that are defined; none are: unset */
    uint64_t size;       /* of one, in bytes .. */
    uint64_t bytes;      /* .. and what it counts against a budget: at least 1 */
    size_t n;
    size_t cap;
    /* 0: no sum: the first of the list is a contribution like the others. Else the first is the
     * sum, and no longer parked:
     * 1: it is the only contribution itself;
     * more: memory of the buffer, the sum of several (the exact number only in a slot of plain
     * entries). */
    int64_t summed;
    uint64_t rules;    /* by which that sum was made; where `summed` is 0 they mean nothing */
    size_t alone;      /* how many of those parked were the buffer's alone at the last check */
    size_t recheck_at; /* and the length of the list from which on that is checked again */
    /* how many of the n are undefined; while a take has the slot they are after the others */
    size_t undefined;
    /* where the sum goes, NULL: the only entry is handed through; set while a take has the slot */
    char *out;
    fan_entry *entries; /* by key, or by arrival; `inline_entries`, or on the heap */
    /* NULL: the list is in the order of keys. Else it is in the order of arrival for now, and these
     * are its keys. */
    fan_keys *unsorted;
    fan_entry inline_entries[FAN_LIST_INLINE];
} fan_list;
_Static_assert(sizeof(fan_list) <= 240,
               "a used slot takes at most 240 bytes more than an idle one");

/* fan_entry_bytes: what an entry counts against the budget. */
static inline uint64_t fan_entry_bytes(const fan_list *list, const fan_entry *one)
{
    if (one->general)
        return one->item->bytes;
    return one->object ? list->bytes : 0;
}

void fan_list_init(fan_list *list);
/* fan_list_fini: frees its memory; what it holds is the caller's to drop before. */
void fan_list_fini(fan_list *list);
/* fan_list_count: returns how many contributions came, those summed already too.
 *   0: also where the list is NULL */
int64_t fan_list_count(const fan_list *list);
/* fan_list_parked: returns how many of these wait. */
static inline size_t fan_list_parked(const fan_list *list)
{
    return list->n - (list->summed > 0);
}
/* fan_list_defined: returns how many entries are defined, the sum too. */
static inline size_t fan_list_defined(const fan_list *list)
{
    return list->n - list->undefined;
}
/* fan_list_keyed: A15: returns whether the entries have keys.
 *   1: they have keys
 *   -1: they have none
 *   0: there is no entry yet */
static inline int fan_list_keyed(const fan_list *list)
{
    if (!list->n)
        return 0;
    return list->entries[0].key < 0 ? -1 : 1;
}
/* fan_list_next_key: returns the lowest key that is not in the sum of a list with keys. */
static inline uint64_t fan_list_next_key(const fan_list *list)
{
    if (!list->summed)
        return 0;
    return (uint64_t)list->entries[0].key + 1;
}
/* fan_keys_mix: A15: whether a key (-1: none) is another kind than those before it, of which
 * `keyed` is as fan_list_keyed returns it. */
static inline bool fan_keys_mix(int keyed, int64_t key)
{
    return keyed && (keyed > 0) != (key >= 0);
}
/* fan_key_is_next: whether a contribution has no key, or the key `next`. */
static inline bool fan_key_is_next(uint64_t next, int64_t key)
{
    return key < 0 || (uint64_t)key == next;
}
/* fan_keys_whole: whether no key is missing: there are `n` different keys from `next` on, of which
 * `last` is the greatest. */
static inline bool fan_keys_whole(uint64_t next, uint64_t last, size_t n)
{
    return last + 1 == next + n;
}
/* fan_list_empty: the list has no entries; nothing is dropped, its memory stays. */
static inline void fan_list_empty(fan_list *list)
{
    list->n = list->undefined = list->alone = list->recheck_at = 0;
    list->summed = 0;
}
/* fan_list_put: puts an entry where its key has it. Returns false, and changes nothing, where the
 * key is there already or memory is lacking. */
bool fan_list_put(fan_list *list, const fan_entry *one);
/* fan_list_insert: the same, quick where the entry comes last. */
static inline bool fan_list_insert(fan_list *list, const fan_entry *one)
{
    if (list->n == list->cap || list->unsorted)
        return fan_list_put(list, one);
    if (one->key >= 0 && list->n && list->entries[list->n - 1].key >= one->key)
        return fan_list_put(list, one);
    list->entries[list->n++] = *one; /* after all others, as mostly */
    list->undefined += !one->object;
    return true;
}
/* fan_list_remove: takes out the newest entry that is the same. Returns whether there was one. */
bool fan_list_remove(fan_list *list, const fan_entry *one);
/* fan_list_has: A16: returns whether an entry has this key, or the sum contains it. */
bool fan_list_has(const fan_list *list, int64_t key);
/* fan_list_ready: sorts the list, and returns how many of the first contributions a fold may sum
 * now: they are parked and, with keys, none between them and `next_key` is missing.
 *   0: also where the list is NULL */
size_t fan_list_ready(fan_list *list, uint64_t next_key, bool keyed);
/* fan_list_begins: returns whether the first of these has come, parked or not; of a list of plain
 * entries. */
bool fan_list_begins(const fan_list *list);
/* fan_list_sort: it is by key from now on. */
void fan__list_sort(fan_list *list);
static inline void fan_list_sort(fan_list *list)
{
    if (list->unsorted)
        fan__list_sort(list);
}
/* fan_list_undefined_last: moves the undefined entries to the end; the others keep their order. */
void fan_list_undefined_last(fan_list *list);
/* fan_list_by_key: undoes that. */
void fan_list_by_key(fan_list *list);

/* The former contents of a list, and its memory on the heap. */
typedef struct fan_detached {
    fan_entry inline_entries[FAN_LIST_INLINE];
    fan_entry *heap; /* NULL: the entries are in `inline_entries` */
    size_t n;
    size_t cap;
} fan_detached;
/* fan_list_detach: moves all that the list holds to *to, for the caller to drop. The list is empty
 * afterwards. */
void fan_list_detach(fan_list *list, fan_detached *to);
/* fan_list_shrink: of an empty list: memory for very many terms is not kept for the next pass. */
#define FAN_LIST_KEPT 64
void fan__list_shrink(fan_list *list);
static inline void fan_list_shrink(fan_list *list)
{
    if (list->cap > FAN_LIST_KEPT)
        fan__list_shrink(list);
}

#endif
