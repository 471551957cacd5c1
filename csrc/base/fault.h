/* fault: faults that test builds can plant, by name. A checker counts only if it finds the fault
 * that is planted for it; the tables of docs/proof.md are made from this list, and every name has a
 * test that finds it, or a reason.
 *
 * At most one fault is planted at a time (fan_fault_plant). In other builds FAN_FAULT(NAME) is the
 * constant 0 and the library contains no trace of the list. Waits, records and marks are left out
 * by other means: by the words of a plan (buffer/sync.h). */
#ifndef FAN_BASE_FAULT_H
#define FAN_BASE_FAULT_H

#ifdef FAN_TEST
#include <stdatomic.h>
#endif

/* X(name) and what it breaks. */
/* clang-format off */
/* The buffer: found by the proof program (tests/c/proof.c). */
#define FAN_BUFFER_FAULTS(X) \
    X(SLOT_LOCK) /* the slot's lock is never taken */ \
    X(PARKED_EARLY) /* a contribution counts as parked before its event is recorded */ \
    X(READY_TOO_SOON) /* `ready` does not check whether adds are still under way */ \
    X(WAIT_AFTER_SUM) /* A waits after the sum has been queued, not before */ \
    X(RECORD_BEFORE_SUM) /* the event of a sum is recorded before the sum */ \
    X(SUM_ON_LAST_PRODUCER) /* the sum runs on the last producer's stream */ \
    X(MARK_ON_PRODUCER) /* gradients are marked as used on their producers' streams, not on A */ \
    X(READY_STREAM_STAYS) /* after a sum, the ready stream is still the first producer's */ \
    X(WRITE_SHARED) /* memory that has other references is written in place */ \
    X(WRITE_WITHOUT_WAIT) /* memory is written in place without waiting for its other users */ \
    X(STREAMS_BY_NUMBER) /* streams of different devices are taken for one if their numbers match */ \
    X(EVENT_REUSED) /* an event that is still needed is recorded again, for another gradient */ \
    X(REFCOUNT_IS_ENOUGH) /* a reference count of one is enough to write in place, at once */ \
    X(RECORD_ON_CONSUMER) /* the event is recorded on the consumer's stream, not on the producer's */ \
    X(RECORD_BEFORE_CONVERSION) /* the event is recorded before the conversion, not after it */ \
    X(TAKE_IGNORES_ADDS) /* take does not wait for adds that are under way */ \
    X(SLOT_CLAIMED_TWICE) /* a slot in use by one thread is used by another */ \
    X(STREAMS_BY_DEVICE) /* all streams of a device are taken for one */ \
    X(RECORD_AFTER_FOLD) /* the event is recorded after the fold that waits for it */ \
    X(FOLD_UNORDERED) /* a fold neither waits nor marks */ \
    X(NO_RECORD_BEHIND_SUM) /* no event after a sum where C is not A */ \
    X(ADD_IGNORES_TAKE) /* an add does not wait for a take that is under way */ \
    X(OLDEST_EVENT) /* of several events of one producer the oldest is waited for */ \
    X(SLOT_KEPT) /* a slot is never given back */
/* Batches of sums (tests of add_many), statistics on devices. */
#define FAN_BATCH_FAULTS(X) \
    X(BATCH_LATE) /* an event is recorded before the batch that it follows is queued */ \
    X(BATCH_DEPENDENT) /* jobs of a stream that touch what another of them writes are not kept in order */ \
    X(BATCH_NOT_EXCLUSIVE) /* memory is written in place while a job that reads it waits in the batch */ \
    X(BATCH_FAILURE_IGNORED) /* a sum whose job failed counts as made */ \
    X(STATS_WRONG_STREAM) /* statistics are read in the order of a stream that did not write them */
/* Decisions about a sum that every way of bringing contributions in must take alike (the law of the ways). */
#define FAN_WAY_FAULTS(X) \
    X(MERGED_BEFORE_CAST) /* entries of a sparse gradient are added in its own dtype, and then cast */ \
    X(SCALED_BEFORE_WIDENED) /* a sum is scaled in the dtype of its last term, not in that of the whole sum */ \
    X(INT_WRAPS) /* a Python int that does not fit the sum's dtype wraps */ \
    X(STATS_OF_STORED) /* statistics are those of stored numbers, also where an index occurs twice */ \
    X(STATS_OF_LEFT_FOLD) /* statistics of a lone sparse gradient of an exact sum are those of its left fold */ \
    X(SUM_LEFT_LOOSE) /* a sparse sum made at an add is returned with the entries of its terms */ \
    X(KIND_OF_LAST) /* a sum is of the kind of its last term */ \
    X(AXES_FORGOTTEN) /* a sum is in C order, whatever the axes of its first contribution */ \
    X(EXPANDED_WRITTEN_OUT) /* an expanded gradient is cast in memory of its full shape */ \
    X(COPY_KEEPS_INDICES) /* a sparse gradient that is copied and cast keeps the caller's indices */ \
    X(SHARED_EVENT_COVERS) /* of terms that share an event none waits for it */ \
    X(WEIGHT_DROPPED) /* of several contributions to a slot in one call the first alone keeps its weight */ \
    X(PRODUCT_FUSED) /* a term times its weight is added without a rounding of its own */
/* Sums with partial terms. */
#define FAN_PARTIAL_FAULTS(X) \
    X(PADDED_ADD) /* a partial term is added to +0 where it is the first to reach an element */ \
    X(PATCH_STEP) /* values along a negative step are stored in the order of memory */ \
    X(FIRST_TOUCH_MISSED) /* a term is stored where another one has reached the element before */
/* Exact sums. */
#define FAN_EXACT_FAULTS(X) \
    X(EXACT_NO_INTEGER_PATH) /* what the fast path cannot prove is taken from it all the same */ \
    X(EXACT_NO_ODD) /* what is lost below the last bit does not break ties */ \
    X(DIVISOR_ROUNDED_EARLY) /* the divisor of an exact mean is rounded before the quotient */ \
    X(EXACT_NO_RANGE) /* exponents outside the window count as inside */ \
    X(WINDOW_NOT_WIDENED) /* a block of a window gets wider words too late */
/* The CUDA backend (the fake driver finds them). */
#define FAN_CUDA_FAULTS(X) \
    X(CUDA_NO_WAIT) /* a stream does not wait for the event */ \
    X(CUDA_NO_RECORD) /* an event is not recorded */ \
    X(CUDA_NO_POP) /* the context stays pushed */ \
    X(CUDA_EARLY_FREE) /* memory is freed while a stream uses it */ \
    X(CUDA_NO_SYNC) /* the host does not wait for the stream */ \
    X(CUDA_NO_POISON) /* after a sticky error the driver is still called */ \
    X(CUDA_CAPTURED_FREE) /* memory of a graph is given back while the graph lives */ \
    X(CUDA_EARLY_TABLE) /* the table of a launch of many sums is freed before it */ \
    X(CUDA_NO_RELAX) /* calls that are unsafe beside a capture are not made in relaxed mode */ \
    X(CUDA_SAME_HANDLE) /* a stream with the handle of a destroyed one is taken for that one */ \
    X(CUDA_EARLY_HOST) /* memory of the host is used again while the device reads it */ \
    X(CUDA_ALWAYS_WIDE) /* 16 bytes at a time are read where they do not lie on a multiple of 16 */ \
    X(CUDA_NARROW_SUM) /* a running sum is read as if it had the dtype of its sources */ \
    X(CUDA_STAYS_CAPTURED) /* a recording that failed leaves its stream captured */ \
    X(CUDA_NOTES_NOTHING) /* what a recording's work touches is not noted */ \
    X(CUDA_ANY_NODE) /* a recording takes graphs that allocate */ \
    X(CUDA_EARLY_LANES) /* what a launch of a sum over axes left is freed before the next one reads it */ \
    X(CUDA_SHORT_SORT) /* COO data are not sorted by the last digit of their rows */ \
    X(CUDA_EARLY_SORT) /* the order of COO data is freed before the launch that sums them */ \
    X(SHARE_ANY_EVENT) /* memory freed in one call shares the event of a stream that did not use it */
/* Floating-point modes. */
#define FAN_FLOAT_FAULTS(X) \
    X(FLOAT_MODE_OF_CALLER) /* sums run in the floating-point modes of the thread that calls */ \
    X(FLOAT_MODE_OF_HELPER) /* a helper thread rounds upward */ \
    X(FLOAT_MODE_OF_CALLBACK) /* a signal handler that interrupts a sum runs in the modes of the sum */ \
    X(FLOAT_MODE_OF_JOB) /* a job of the pool runs in the modes that its thread has */
/* Sums over ranks. */
#define FAN_RANKS_FAULTS(X) \
    X(COPY_AS_IT_LIES) /* a gradient with its axes in another order is copied in the order of its memory */
/* Recordings on the CPU. */
#define FAN_RECORDING_FAULTS(X) \
    X(KERNEL_NOT_REPLAYED) /* the last kernel of a recording is not replayed */
/* The footprints that the search of host orders uses (device/sim): one kind left out at a time, in
 * the order of the kinds. */
#define FAN_SEARCH_FAULTS(X) \
    X(USER_OF_ANOTHER_MACHINE) /* a stream of another machine may be a user of memory */ \
    X(STREAM_STAYS_OPEN) /* a stream may be used after the block of its machine */ \
    X(NO_TURNS) /* calls of a spawned thread are no turns */ \
    X(NO_FOOTPRINT_STREAM) /* what a call touches of streams is left out */ \
    X(NO_FOOTPRINT_EVENT) /* .. of events */ \
    X(NO_FOOTPRINT_BLOCK) /* .. of memory blocks */ \
    X(NO_FOOTPRINT_MUTEX) /* .. of locks */ \
    X(NO_FOOTPRINT_PROGRESS) /* .. of how far work has run */ \
    X(NO_FOOTPRINT_FAULTS) /* .. of planted device faults */ \
    X(NO_FOOTPRINT_QUEUED) /* .. of what is queued */ \
    X(NO_FOOTPRINT_CAPTURES) /* .. of captures */ \
    X(NO_FOOTPRINT_MEMORY) /* .. of the memory that is left */ \
    X(NO_FOOTPRINT_CALLS) /* .. of calls that are counted */ \
    X(NO_FOOTPRINT_STREAMS) /* .. of which streams there are */ \
    X(NO_FOOTPRINT_THREAD) /* .. of threads */ \
    X(NO_FOOTPRINT_ACTORS) /* .. of the number of threads */ \
    X(NO_FOOTPRINT_BUDGET) /* .. of the budget */ \
    X(NO_FOOTPRINT_COUNTERS) /* .. of counters */ \
    X(NO_FOOTPRINT_HOST) /* .. of objects of the host */ \
    X(NO_FOOTPRINT_OPTIONS) /* .. of the options of the process */ \
    X(NO_FOOTPRINT_POOL) /* .. of memory that is kept for the next result */ \
    X(NO_FOOTPRINT_GRAPH) /* .. of nodes and passes backward */ \
    X(NO_FOOTPRINT_WAITED) /* .. of what a thread has waited for */
/* The engine. */
#define FAN_ENGINE_FAULTS(X) \
    X(TAKEN_BEFORE_LAST) /* a node's sums are taken before the last gradient has come */ \
    X(RUN_TWICE) /* a node without edges that runs stays among the ready ones */ \
    X(KEY_BY_ARRIVAL) /* a key is the order of arrival, not the edge's index */ \
    X(LEAF_UNCLAIMED) /* a leaf accumulates while another pass does */ \
    X(LEAF_CIRCLE) /* a wait for a leaf in a circle is begun all the same */ \
    X(END_WITHOUT_WAIT) /* the caller's streams do not wait at the end of a pass */ \
    X(LEAF_WITHOUT_WAIT) /* a leaf's stream does not wait for the caller's before it writes */ \
    X(HOOK_ON_CALLER) /* hooks run on the caller's streams, which have not waited */ \
    X(SUM_FOR_PRODUCER) /* a sum is taken for the stream of its first producer */ \
    X(HAND_WITHOUT_WAIT) /* a single gradient is handed through without a wait */ \
    X(SUM_UNGUARDED) /* a function may write a sum that others have, too */ \
    X(COUNT_BEFORE_ADD) /* a count falls before its gradient was added */ \
    X(NODE_TAKEN_TWICE) /* a worker finds a node in one step and takes it in another */ \
    X(BUFFER_TWICE) /* of two workers each puts a buffer of its own in a node's place */ \
    X(WORKER_LEAVES) /* a worker leaves where nothing is ready, though others are at work */ \
    X(GROUP_TWICE) /* a group is not checked for a node that runs */ \
    X(DEVICE_ON_ANY) /* what runs on a device runs on any worker */
/* Digests (tests of digests and of `compare`). */
#define FAN_DIGEST_FAULTS(X) \
    X(DIGEST_WITHOUT_PLACE) /* the digest of an array does not depend on the places of its elements */ \
    X(DIGEST_WITHOUT_SHAPE) /* the digest of an array does not depend on its shape */ \
    X(DIGEST_WITHOUT_DTYPE) /* the digest of an array does not depend on its dtype */
/* Graph trees. */
#define FAN_GRAPH_FAULTS(X) \
    X(TREE_DEAD_BIT) /* an output that lives counts as dead: its memory is given to the next recording */ \
    X(TREE_ALIVE_FITS) /* a recording fits though an output lives that was gone when it was made */ \
    X(TREE_NO_RESTORE) /* the block table is not put back before another branch grows */ \
    X(TREE_NO_JOIN) /* the tree's stream does not wait for the caller's */ \
    X(TREE_ADOPTED) /* tree memory that a function keeps is not searched for */ \
    X(TREE_GENERATION_STAYS) /* what a step handed out stays usable after its end */ \
    X(TREE_OUTSIDE_FREED) /* memory from beyond a full tree is given back before what was recorded runs */ \
    X(TREE_FULL_REPLAYED) /* a recording for which there was no room is replayed */ \
    X(TREE_VERIFY_TWICE) /* verify= leaves operands as the function made them, and the replay writes them again */ \
    X(TREE_GONE_STAYS) /* recordings of functions that are gone are not given back */ \
    X(TREE_FORK_WHOLE) /* in a forked child a tree counts as whole though another thread was in a call of it */
/* The C API. */
#define FAN_API_FAULTS(X) \
    X(API_RELEASE_LOCKED) /* the releases at the end of a call run while the thread has the interpreter's lock */ \
    X(API_DROP_AT_ONCE) /* drop calls a release at once, whatever lock the thread has */
#define FAN_FAULTS(X) \
    FAN_BUFFER_FAULTS(X) FAN_BATCH_FAULTS(X) FAN_WAY_FAULTS(X) \
    FAN_PARTIAL_FAULTS(X) FAN_EXACT_FAULTS(X) FAN_FLOAT_FAULTS(X) \
    FAN_CUDA_FAULTS(X) FAN_SEARCH_FAULTS(X) FAN_RECORDING_FAULTS(X) \
    FAN_ENGINE_FAULTS(X) FAN_GRAPH_FAULTS(X) FAN_API_FAULTS(X) \
    FAN_DIGEST_FAULTS(X) FAN_RANKS_FAULTS(X)
/* clang-format on */

#define FAN_FAULT_ENUM(name) FAN_FAULT_##name,
typedef enum {
    FAN_FAULT_NONE,
    FAN_FAULTS(FAN_FAULT_ENUM) FAN_FAULT_COUNT
} fan_fault_id;
#undef FAN_FAULT_ENUM

#ifdef FAN_TEST
extern atomic_int fan_fault_planted;
#define FAN_FAULT_IS(id) \
    (atomic_load_explicit(&fan_fault_planted, memory_order_relaxed) == (int)(id))

/* fan_fault_plant: plants `id` in place of any earlier one; FAN_FAULT_NONE plants none. */
static inline void fan_fault_plant(fan_fault_id id)
{
    atomic_store(&fan_fault_planted, (int)id);
}
/* fan_fault_named: returns FAN_FAULT_NONE for an unknown name. */
fan_fault_id fan_fault_named(const char *name);
#else
#define FAN_FAULT_IS(id) 0
#endif
#define FAN_FAULT(name) FAN_FAULT_IS(FAN_FAULT_##name)

#endif
