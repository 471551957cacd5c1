/* internal: the parts of a tree. Callers hold the tree's lock unless the comment states
 * otherwise. */
#ifndef FAN_GRAPH_INTERNAL_H
#define FAN_GRAPH_INTERNAL_H

#include "array/extents.h"
#include "base/thread.h"
#include "device/job.h"
#include "device/memory.h"
#include "graph/pool.h"
#include "graph/tree.h"

typedef struct fan_tree_node fan_tree_node;
typedef struct fan_tree_block fan_tree_block;
typedef struct fan_tree_run fan_tree_run;

/* The context of a storage that the tree lends; freed with it. */
typedef struct fan_tree_lease {
    fan_storage *arena; /* held: keeps the memory mapped */
    const fan_tree *tree;
    fan_tree_block *block; /* NULL: the storage has left the tree */
    char made[64];         /* the line of the call that made it */
    char why[256];         /* .. why it ended */
} fan_tree_lease;

struct fan_tree_block {
    uint64_t offset;
    uint64_t bytes;
    fan_storage *storage; /* held; NULL: the last one ended while it had other references */
    fan_tree_lease *lease;
    fan_tree_node *node; /* whose output it is; NULL: it belongs to the current call */
    bool listed;         /* the block table contains it, at times when that is accurate */
};

/* An output: a view of a block, a view of an operand, or None. */
typedef struct fan_tree_output {
    fan_tree_block *block; /* NULL: no memory of its own */
    int operand;           /* .. then the operand that it is a view of; -1: None */
    bool keep;
    fan_array *array; /* held; handed out. After the end of the storage only its geometry is used */
} fan_tree_output;

/* per function; one more evicts the one that was not called for longest */
#define FAN_TREE_SIGNATURES 64
/* Per function; with these, a call that fits none runs eagerly */
#define FAN_TREE_RECORDINGS 2048

/* The facts about an operand of a signature. */
typedef struct fan_tree_operand_facts {
    bool demoted; /* it moved too often, and is copied */
    bool written; /* the function writes into it */
    bool shown;   /* an output is a view of a part of it */
} fan_tree_operand_facts;

/* The type of a call's operands: their number, dtypes, shapes, strides, and the key. */
typedef struct fan_tree_signature {
    struct fan_tree_signature *next;
    fan_tree_function *function; /* borrowed: it holds this */
    uint64_t key;
    size_t nwords;
    size_t n;
    bool warm;
    bool known;
    bool warned_writes;
    /* the function no longer lists it: freed with its last recording */
    bool evicted;
    uint64_t warmings;             /* fan_tree.warmings when it was made */
    unsigned full;                 /* calls in which the tree's memory ran out */
    bool few;                      /* its recording had fewer kernels than min_kernels .. */
    size_t kernels;                /* .. this many */
    fan_tree_operand_facts *facts; /* of each operand */
    int form;                      /* of the result; meaningless before it is warm */
    size_t nout;
    int64_t words[]; /* dtypes, shapes and strides (signature_words); the facts follow them */
} fan_tree_signature;

/* Warnings of a function, each given once. */
typedef enum fan_tree_warning {
    FAN_TREE_WARN_REPEATS = 1,
    FAN_TREE_WARN_SIGNATURES = 2,
    FAN_TREE_WARN_DEMOTED = 4,
    FAN_TREE_WARN_MOVES = 8,
    FAN_TREE_WARN_ROOM = 16,
    FAN_TREE_WARN_RECORDINGS = 32
} fan_tree_warning;

struct fan_tree_function {
    atomic_size_t refs;
    fan_tree *tree; /* held */
    int64_t *only;  /* these four follow the struct */
    char *name;
    uint8_t *roles;
    bool *keep;
    size_t nroles;
    size_t nkeep;
    size_t nonly;
    size_t min_kernels;
    unsigned warned; /* FAN_TREE_WARN bits */
    size_t recordings;
    fan_tree_function_stats stats;
    fan_tree_signature *signatures; /* the one used last comes first */
    /* listed; with the evicted ones, whose last frees a dropped function */
    size_t nsignatures;
    size_t kept;
};

/* fan__tree_keeps: whether the caller gets a copy of the i-th output. */
static inline bool fan__tree_keeps(const fan_tree_function *f, size_t i)
{
    return f->nkeep == SIZE_MAX || (i < f->nkeep && f->keep[i]);
}

/* fan__tree_role: the role of the i-th operand. */
static inline fan_tree_role fan__tree_role(const fan_tree_function *f, size_t i)
{
    return f->roles[f->nroles ? i : 0];
}

/* How one call treats an operand. */
typedef enum fan_tree_placement {
    FAN_PLACE_NONE,   /* no array */
    FAN_PLACE_COPY,   /* copied into the arena */
    FAN_PLACE_STATIC, /* used where it lies */
    FAN_PLACE_ADD,    /* the caller's memory, which is added into */
    FAN_PLACE_POOL    /* memory of the arena */
} fan_tree_placement;

typedef struct fan_tree_operand {
    fan_tree_placement placement;
    const void *data;    /* its address; NULL: it is copied */
    fan_array *staged;   /* held; COPY: the copy's place */
    const void *checked; /* COPY: its address at the last overlap check */
} fan_tree_operand;

/* The recordings of one signature after one node. */
typedef struct fan_tree_children {
    fan_tree_signature *signature;
    fan_tree_node **children;
    size_t n;
    size_t cap;
    /* recordings made because an operand moved; because an output was alive */
    unsigned moved;
    unsigned alive;
} fan_tree_children;

struct fan_tree_node {
    fan_tree_node *parent; /* NULL: the root, which is no recording */
    fan_tree_node *next;   /* in the tree's list of recordings, the newest first */
    fan_tree_signature *signature;
    int number;
    bool warm; /* a warm-up: freed at the end of its path */
    fan_recording *recording;
    fan_tree_operand *operands; /* n of them follow the struct, then the room below */
    fan_job *copies;            /* room for the jobs that stage operands */
    fan_operand *copy_in;
    size_t n;
    fan_tree_block **blocks;
    size_t nblocks;
    size_t blocks_cap;
    fan_tree_output *outputs;
    size_t nout;
    /* blocks of the path that were alive after the parent and dead before this */
    fan_tree_block **dead;
    size_t ndead;
    size_t dead_cap;
    fan_graph_ranges block_table; /* after the recording */
    fan_graph_ranges used;        /* of the arena, by it alone: its outputs and temporaries */
    uint64_t reaches;
    uint64_t replays;
    unsigned verified; /* replays that gave what the eager function gave */
    fan_tree_children *places;
    size_t nplaces;
    size_t places_cap;
};

struct fan_tree {
    atomic_size_t refs;
    fan_mutex lock;
    fan_device *device; /* held */
    const fan_recorder *recorder;
    fan_stream *origin; /* held */
    fan_array *arena;   /* held; NULL: closed */
    fan_graph_pool pool;
    fan_tree_options options;
    fan_tree_node root;
    fan_tree_node *current; /* &root: the path is empty */
    fan_tree_path path;
    fan_tree_node *nodes;
    fan_tree_signature *evicted; /* by newer ones of the function, or because it was dropped */
    int numbers;
    uint64_t reach; /* the end of the memory that the path uses */
    unsigned depth; /* open steps */
    uint64_t steps; /* begun */
    uint64_t path_step;
    uint64_t warmings;            /* counts fan_tree_warm_again; older signatures match no call */
    _Atomic uint64_t thread;      /* the holder of the lock; 0: none */
    atomic_uint owner_generation; /* fan_fork_generation() where the lock was made */
    bool fork_invalid;            /* the lock's holder is missing in this forked process */
    bool closed;
    int64_t *words; /* room for a signature */
    size_t words_cap;
    fan_tree_operand *operands; /* room for a call's operands */
    size_t operands_cap;
    fan_tree_stats stats;
};

static inline fan_status fan__tree_no_memory(fan_error *err)
{
    return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
}

/* fan__tree_is_mine: whether this thread has the lock, so is in a call of the tree. Without the
 * lock: relaxed, since only this thread stores its own id. */
static inline bool fan__tree_is_mine(fan_tree *t)
{
    return atomic_load_explicit(&t->thread, memory_order_relaxed) == fan_thread_id();
}

/* fan__tree_after_fork: remakes the lock in a forked child, where its holder may be missing.
 * Without the lock. */
void fan__tree_after_fork(fan_tree *t);

/* fan__tree_lock: locks the tree, unless this thread has the lock already, as inside a function's
 * body. Pass the result to fan__tree_unlock. */
static inline bool fan__tree_lock(fan_tree *t)
{
    if (atomic_load_explicit(&t->owner_generation, memory_order_acquire) != fan_fork_generation())
        fan__tree_after_fork(t);
    if (fan__tree_is_mine(t))
        return false;
    fan_mutex_lock(&t->lock);
    atomic_store_explicit(&t->thread, fan_thread_id(), memory_order_relaxed);
    return true;
}

static inline void fan__tree_unlock(fan_tree *t, bool locked)
{
    if (!locked)
        return;
    atomic_store_explicit(&t->thread, 0, memory_order_relaxed);
    fan_mutex_unlock(&t->lock);
}

/* fan__tree_check_fork: FAN_ERR_STATE if a fork left the tree's state incomplete in this
 * process. */
fan_status fan__tree_check_fork(const fan_tree *t, fan_error *err);

/* ---- path.c ---- */

/* fan__tree_block_lend: makes a storage for a block that has none. */
fan_status fan__tree_block_lend(fan_tree *t, fan_tree_block *b, fan_stream *owner,
                                const char *call_site, fan_error *err);
/* fan__tree_block_end: marks the block's storage as ended, with a text; later calls do nothing. */
void fan__tree_block_end(fan_tree_block *b, const char *why);
/* fan__tree_block_leave: the block gives up its storage, which references may keep. */
void fan__tree_block_leave(fan_tree_block *b);
/* fan__tree_block_free: a storage with other references ends with the text `why` (NULL: there are
 * none). Does not change the block table. */
void fan__tree_block_free(fan_tree_block *b, const char *why);
bool fan__tree_block_lives(const fan_tree_block *b);
/* fan__tree_block_of: the block of this tree under an array; NULL: it is other memory. */
fan_tree_block *fan__tree_block_of(const fan_tree *t, const fan_array *a);

/* fan__tree_signature_drop: frees an evicted one, and its function with the last one if that was
 * dropped. */
void fan__tree_signature_drop(fan_tree_signature *sig);
/* fan__tree_node_free: n may be NULL; its storages with other references end with the text `why`.
 */
void fan__tree_node_free(fan_tree_node *n, const char *why);
bool fan__tree_on_path(const fan_tree *t, const fan_tree_node *n);
/* fan__tree_next: the next block of a path, from its last node to its first; NULL: there is none.
 */
typedef struct fan_tree_at {
    const fan_tree_node *node; /* first the path's last */
    size_t i;
} fan_tree_at;
fan_tree_block *fan__tree_next(fan_tree_at *at);
/* fan__tree_evict: removes the function's signature that was not called for longest from its
 * list. */
void fan__tree_evict(fan_tree_function *f);
/* fan__tree_evict_old: the function lists no signature from before fan_tree_warm_again. */
void fan__tree_evict_old(fan_tree_function *f);
/* fan__tree_give_back: frees the recordings of evicted signatures, and all recordings after them,
 * except on the path; then such signatures without recordings. */
void fan__tree_give_back(fan_tree *t);
/* fan__tree_step_ended: ends the outputs that the path handed out. */
void fan__tree_step_ended(fan_tree *t, const char *call_site);
/* fan__tree_wait_users: makes the tree's stream wait for the users of a block's memory but `caller`
 * (NULL: there is none), for which it waits already. */
fan_status fan__tree_wait_users(const fan_tree *t, const fan_tree_block *b,
                                const fan_stream *caller, fan_error *err);
/* fan__tree_end_path: frees and poisons the path's memory; on failure the path is unchanged. The
 * tree's stream must wait for `caller` already (NULL: there is none). */
fan_status fan__tree_end_path(fan_tree *t, const fan_stream *caller, fan_error *err);
/* fan__tree_leave_path: its second part, which cannot fail. */
void fan__tree_leave_path(fan_tree *t);
/* fan__tree_sweep: prepares the block table for a node that comes next: if the plan restores, puts
 * it back to the end of the current node; then, unless run->keep_dead, removes dead blocks from it,
 * after the tree's stream waits for their users, and lists them in the node. */
fan_status fan__tree_sweep(const fan_tree_run *run, fan_tree_node *next, fan_error *err);
/* fan__tree_relist: updates `listed` of the path's blocks after a change of the block table. */
void fan__tree_relist(fan_tree *t);
/* fan__tree_place: the recordings of a signature after a node; NULL: there are none. */
fan_tree_children *fan__tree_place(fan_tree_node *n, const fan_tree_signature *signature);

/* ---- replay.c, record.c, verify.c ---- */

#define FAN_STAGE_MANY 64

/* The facts of one place, and the recording that fits best there. */
typedef struct fan_tree_found {
    fan_tree_place facts;
    fan_tree_node *child; /* NULL: none */
    size_t which;         /* the operand that moved */
} fan_tree_found;

/* One call. */
struct fan_tree_run {
    fan_tree *tree;
    fan_tree_function *function;
    fan_tree_signature *signature;
    const fan_tree_args *args;
    fan_tree_operand *operands;
    fan_stream *caller;
    fan_tree_result *result;
    fan_tree_report *report;
    fan_tree_plan plan;
    fan_tree_found found; /* at the place where the plan continues */
    char call_site[64];
    /* of a recording: dead blocks stay in the block table, so that it fits whichever are alive */
    bool keep_dead;
    bool ran;       /* a body ran */
    bool entered;   /* the tree's stream waits for the caller's */
    char full[256]; /* why it is not recorded: the arena is full; "": it is not */
    bool evicted;   /* a signature of the function was evicted for this call's */
    bool wrote;     /* a recording was given up: the function writes into a copied operand */
};

/* fan__tree_report_few: the reason of a call that runs eagerly because it has too few kernels. */
void fan__tree_report_few(const fan_tree_run *r);
/* fan__tree_warm_up: runs the body; the path continues with a node that ends with it. */
fan_status fan__tree_warm_up(fan_tree_run *r, fan_error *err);
/* fan__tree_record: records the body and launches it. If run->wrote is set after it, there is no
 * recording, and nothing has changed. */
fan_status fan__tree_record(fan_tree_run *r, fan_error *err);
fan_status fan__tree_replay(fan_tree_run *r, fan_tree_node *n, fan_error *err);
/* fan__tree_verify (verify.c): a replay of n beside the eager function: FAN_ERR_CAPTURE where one
 * array differs; then the operands are as before. */
fan_status fan__tree_verify(fan_tree_run *r, fan_tree_node *n, fan_error *err);
/* fan__tree_check_overlap: FAN_ERR_VALUE if an operand shares memory with one that is added into,
 * or a copied one with one that the function is known to write. */
fan_status fan__tree_check_overlap(const fan_tree_run *r, fan_error *err);
/* fan__tree_enter: the tree's stream waits for the caller's, once per call. */
fan_status fan__tree_enter(fan_tree_run *r, fan_error *err);
/* fan__tree_leave: the caller's stream waits for the tree's. */
fan_status fan__tree_leave(const fan_tree_run *r, fan_error *err);
/* fan__tree_carry_out: enters, copies operands into the arena, launches the node's recording, and
 * hands out. */
fan_status fan__tree_carry_out(fan_tree_run *r, fan_tree_node *n, fan_error *err);
/* fan__tree_hand_out: the node's outputs become the result. */
fan_status fan__tree_hand_out(fan_tree_run *r, fan_tree_node *n, fan_error *err);
/* fan__tree_copy: queues a copy of an array. */
fan_status fan__tree_copy(const fan_tree *t, fan_stream *s, const fan_array *from,
                          const fan_array *to, const char *label, fan_error *err);
/* fan__tree_view: a view like `like` on a storage over the same memory. */
fan_status fan__tree_view(fan_storage *st, const fan_array *like, fan_array **out, fan_error *err);
/* fan__tree_operand_of: the operand in whose memory an array is; -1: none. given: the operands. */
static inline int fan__tree_operand_of(const fan_tree_run *run, const fan_array *a,
                                       fan_array *const *given)
{
    for (size_t i = 0; i < run->args->n; i++) {
        if (given[i] && given[i]->storage == a->storage)
            return (int)i;
    }
    return -1;
}
/* fan__tree_keep_operands: after an eager run: copies operands that are outputs, and views of them,
 * where keep= names them. */
fan_status fan__tree_keep_operands(const fan_tree_run *r, fan_error *err);

#endif
