/* native: arrays of the core on their way through a pass, without an object of Python's around them.
 *
 * The engine and the fast path of buffers carry `void *`: an object, or, with the lowest bit set, a fan_array on the
 * CPU. Holds of such are taken and dropped on any thread, without the interpreter. They become ndarrays where Python
 * sees them: in functions, hooks, leaves and results.
 */
#ifndef FAN_PY_UNBOXED_H
#define FAN_PY_UNBOXED_H

#include "buffer/value.h"
#include "py/py.h"

static inline bool fan_is_unboxed(const void *object) { return (uintptr_t)object & 1; }
static inline fan_array *fan_unboxed_array(void *object) { return (fan_array *)(void *)((char *)object - 1); }
static inline void *fan_unboxed(fan_array *a) { return a ? (char *)a + 1 : NULL; } /* takes the hold */

/* fan_unboxed_fast: what the fast path needs to know of one; false: it is none for it. */
bool fan_unboxed_fast(void *object, fan_fast_kind *kind, char **data);
/* fan_unboxed_fresh: of a kind, as fan_fast_fresh; NULL: no memory. */
void *fan_unboxed_fresh(const fan_fast_kind *kind, char **data);
/* fan_unboxed_is_unique: one hold on the array and on its memory, which is the core's own. */
bool fan_unboxed_is_unique(void *object);
/* fan_unboxed_value: one as a value, with a hold of its own. */
fan_value fan_unboxed_value(void *object);

/* fan_box: *object, where it is a native one, becomes an ndarray over the same memory: 0, or -1 with an
 * exception, and *object as it was. fan_box_all: of n. */
int fan_box(void **object);
int fan_box_all(void **objects, size_t n);

#endif
