/* layout: records how N arrays are laid out in memory, and checks whether N arrays of a later call
 * are laid out the same.
 *
 * Decisions that follow from a layout (which arrays share memory, and where each begins in it) hold
 * for every call with the same layout, wherever the memory is. Recorded are dtype, device, shape,
 * strides, writability, the component (array/overlap.h), and where each array begins in its
 * component. Strides along axes of extent 1, and all strides of an empty array, are ignored. */
#ifndef FAN_ARRAY_LAYOUT_H
#define FAN_ARRAY_LAYOUT_H

#include "array/overlap.h"

typedef struct fan_layout_item {
    fan_region region;
    uint64_t dtype, device; /* any numbers that are equal for equal dtypes or devices */
    bool writable;
} fan_layout_item;

/* fan_layout_regions: allocates a list of the items' regions; NULL: out of memory. */
fan_region *fan_layout_regions(const fan_layout_item *items, size_t n);

typedef struct fan_layout fan_layout;

/* X(NAME, word): the differences, in the order in which they are checked. */
#define FAN_CHANGE_LIST(X)                                                                       \
    X(SAME, "same")                                                                              \
    X(DTYPE, "dtype") /* or the item size */                                                     \
    X(DEVICE, "device")                                                                          \
    X(SHAPE, "shape")                                                                            \
    X(STRIDES, "strides")                                                                        \
    X(READONLY, "read-only") /* it was writable */                                               \
    X(WRITABLE, "writable")  /* it was read-only */                                              \
    X(APART, "apart")        /* it shared memory with `other`'s component, and no longer does */ \
    X(OFFSET, "offset")      /* it is elsewhere in its component, relative to `other` */         \
    X(OVERLAP, "overlap")    /* it shares memory with `other`, which was in another component */

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

/* fan_layout_new: records the layout of n arrays. An unknown verdict counts as an overlap.
 * FAN_ERR_NOMEM. */
fan_status fan_layout_new(const fan_layout_item *items, size_t n, uint64_t budget, fan_layout **out,
                          fan_error *err);
void fan_layout_free(fan_layout *l); /* l may be NULL */

/* fan_layout_component: returns the number of array i's component; components are numbered by their
 * first members. */
size_t fan_layout_component(const fan_layout *l, size_t i);
/* fan_layout_offset: returns the bytes from the first byte of its component to element [0, 0, ..]
 * of array i; 0 if it is empty. */
uint64_t fan_layout_offset(const fan_layout *l, size_t i);

/* fan_layout_check: finds the first difference; `items` has as many items as were recorded. O(n log
 * n) if nothing differs. FAN_ERR_NOMEM. */
fan_status fan_layout_check(const fan_layout *l, const fan_layout_item *items, uint64_t budget,
                            fan_difference *out, fan_error *err);

#endif
