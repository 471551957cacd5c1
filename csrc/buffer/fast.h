/* plain: gradients that need no decision, in slots that hold nothing else: the fast path from add to take.
 *
 * A gap-free host array of the slot's own dtype and shape, with no stream, is parked as its object and the address of
 * its first element; copied first, where that is asked for. As soon as anything else comes to the slot, or more is
 * asked of it than the sum of a few small arrays, what is parked becomes items like any other (fan_slot_materialize),
 * and the rest of the buffer knows nothing of this file. What is decided here is what check.c and take.c decide for
 * such a gradient: S2, S3, A6, A7, A10, A14, A15, A16, S22's scale and out=. One that comes when the budget is passed,
 * to a slot whose sum is the buffer's own, is added to it at once. What is due in a slot that is still plain is summed
 * into its first term, where that is the buffer's alone (A6), or into a fresh one, which stays in the list as the
 * first: so the slot remains plain.
 *
 * The fast path takes no lock. It is for a frontend whose interpreter lets one thread in at a time, as Python's GIL
 * does, and leaves the interpreter only while jobs run and while a thread waits: so all that changes a slot, by
 * whichever way, happens inside the interpreter. Its counters are plain numbers for the same reason. Without a GIL
 * fan_import_plain says no, and there is no fast path.
 */
#ifndef FAN_BUFFER_PLAIN_H
#define FAN_BUFFER_PLAIN_H

#include "base/keys.h"
#include "buffer/buffer.h"

#define FAN_PLAIN_INLINE 4

typedef struct fan_fast_list {
    fan_fast_kind kind;
    uint64_t bytes; /* of one; at least 1 */
    size_t n, cap;
    int64_t summed;     /* contributions that the first of the list is the sum of: it is the buffer's own then, and no
                           longer parked. 0: it is one itself */
    size_t alone;       /* how many of those parked were the buffer's alone when that was asked */
    size_t ask;         /* and how many there must be before it is asked again */
    size_t undefined;   /* of the n; behind all others while a take has the slot */
    fan_fast *list;     /* by key, or by arrival; `few`, or on the heap */
    fan_keys *unsorted; /* NULL: it is so; else keys came that far from their places that it is by arrival for now, and
                           these are they */
    fan_fast few[FAN_PLAIN_INLINE];
} fan_fast_list;

#endif
