/* objects: arrays of the core that pass from node to node without a Python object around them.
 *
 * The engine and plain entries of buffers carry `void *`: an object, or, with the lowest bit set, a
 * fan_array on the CPU. Any thread may take and drop holds of the latter, without the interpreter.
 * They become ndarrays where Python code gets them: in functions, hooks, leaves and results. */
#ifndef FAN_PY_OBJECTS_H
#define FAN_PY_OBJECTS_H

#include "buffer/value.h"
#include "py/base/py.h"

static inline bool fan_is_unboxed(const void *object)
{
    return (uintptr_t)object & 1;
}
static inline fan_array *fan_unboxed_array(void *object)
{
    return (fan_array *)(void *)((char *)object - 1);
}
/* fan_unboxed: takes the hold. */
static inline void *fan_unboxed(fan_array *a)
{
    return a ? (char *)a + 1 : NULL;
}

/* fan_unboxed_plain: its data and kind; false: it is no plain contribution. */
bool fan_unboxed_plain(void *object, fan_plain_kind *kind, char **data);
/* fan_unboxed_fresh: a new one of a type, as fan_plain_fresh; NULL: out of memory. */
void *fan_unboxed_fresh(const fan_plain_kind *kind, char **data);
/* fan_unboxed_is_unique: one hold on the array and on its memory, which the core owns. */
bool fan_unboxed_is_unique(void *object);
/* fan_unboxed_drop_if_shared: as fan_plain_frontend has it. */
bool fan_unboxed_drop_if_shared(void *object);
/* fan_unboxed_value: a value with a hold of its own. */
fan_value fan_unboxed_value(void *object);

int fan__box(void **object);
/* fan_box: *object, if it is unboxed, becomes an ndarray over the same memory: 0, or -1 with an
 * exception and *object unchanged. */
static inline int fan_box(void **object)
{
    return fan_is_unboxed(*object) ? fan__box(object) : 0;
}
/* fan_box_all: boxes each of n objects, as fan_box does. */
static inline int fan_box_all(void **objects, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (fan_box(&objects[i]) < 0)
            return -1;
    }
    return 0;
}

#endif
