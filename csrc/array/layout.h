/* layout: how N arrays lie in memory, recorded, and whether N arrays of a later call lie the same way.
 *
 * What is decided from a layout once (which arrays share memory, and where in it each lies) holds for every call with
 * the same layout, wherever the memory itself is. Recorded are dtype, device, shape, strides, may it be written, the
 * component (array/overlap_list.h), and where in its component each array begins. Strides along axes of extent 1, and
 * all of an empty array's, mean nothing and are not looked at.
 */
#ifndef FAN_ARRAY_LAYOUT_H
#define FAN_ARRAY_LAYOUT_H

#include "array/overlap_list.h"

typedef struct fan_layout_item {
    fan_region region;
    uint64_t dtype, device; /* any numbers that are equal for equal ones */
    bool writable;
} fan_layout_item;

typedef struct fan_layout fan_layout;

/* X(NAME, word): what differs, in the order in which it is looked for. */
#define FAN_CHANGE_LIST(X)                                                                     \
    X(SAME, "same")                                                                            \
    X(DTYPE, "dtype") /* or the item size */                                                   \
    X(DEVICE, "device")                                                                        \
    X(SHAPE, "shape")                                                                          \
    X(STRIDES, "strides")                                                                      \
    X(READONLY, "read-only") /* it could be written */                                         \
    X(WRITABLE, "writable")  /* it could not */                                                \
    X(APART, "apart")        /* it shared memory with `other`'s component, and does no more */ \
    X(OFFSET, "offset")      /* it lies elsewhere in its component, seen from `other` */       \
    X(OVERLAP, "overlap")    /* it shares memory with `other`, which was of another component */

typedef enum fan_change {
#define X(NAME, word) FAN_CHANGE_##NAME,
    FAN_CHANGE_LIST(X)
#undef X
} fan_change;

const char *fan_change_word(fan_change c);

#define FAN_NO_OTHER SIZE_MAX

typedef struct fan_difference {
    fan_change what;
    size_t index; /* the first array that differs */
    size_t other; /* FAN_NO_OTHER: none */
} fan_difference;

/* fan_layout_new: the layout of n arrays. A verdict that nobody could tell counts as an overlap. FAN_ERR_NOMEM. */
fan_status fan_layout_new(const fan_layout_item *items, size_t n, uint64_t budget, fan_layout **out, fan_error *err);
void fan_layout_free(fan_layout *l); /* NULL is fine */

size_t fan_layout_count(const fan_layout *l);
/* fan_layout_component: the number of the component of array i; they are numbered by their first members. */
size_t fan_layout_component(const fan_layout *l, size_t i);
/* fan_layout_offset: bytes from the first byte of its component to element [0, 0, ..] of array i; 0 where it is empty.
 */
uint64_t fan_layout_offset(const fan_layout *l, size_t i);

/* fan_layout_check: what differs first; `items` are as many as were recorded. O(n log n) where nothing differs.
 * FAN_ERR_NOMEM. */
fan_status fan_layout_check(const fan_layout *l, const fan_layout_item *items, uint64_t budget, fan_difference *out,
                            fan_error *err);

#endif
