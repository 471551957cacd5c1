/* part: what a tree is made of. Its lock is held in all of it, but where something else is said. */
#ifndef FAN_GRAPH_PART_H
#define FAN_GRAPH_PART_H

#include "array/extents.h"
#include "base/thread.h"
#include "device/memory.h"
#include "graph/pool.h"
#include "graph/tree.h"

typedef struct fan_tree_node fan_tree_node;
typedef struct fan_tree_block fan_tree_block;

/* What a lent storage knows; it goes with that. */
typedef struct fan_tree_lease {
    fan_storage *arena; /* held: the memory stays mapped */
    const fan_tree *tree;
    fan_tree_block *block; /* NULL: the storage is none of the tree's any more */
    char made[64];         /* the line of the call that it was made by */
    char why[256];         /* .. why it ended */
} fan_tree_lease;

struct fan_tree_block {
    uint64_t offset, bytes;
    fan_storage *storage; /* held; NULL: the last one was ended while somebody had it */
    fan_tree_lease *lease;
    fan_tree_node *node; /* whose output it is; NULL: it belongs to the call that is under way */
    bool listed;         /* the block table has it, where that is right */
};

/* An output: a view of a block, of an operand, or None. */
typedef struct fan_tree_output {
    fan_tree_block *block; /* NULL: none of its own */
    int operand;           /* .. then the operand that it is a view of; -1: None */
    bool keep;
    fan_array *array; /* held; handed out. Where the storage is gone, geometry alone */
} fan_tree_output;

#define FAN_TREE_SIGNATURES \
    64 /* of one function: one more takes the place of the one that was not called for longest */
#define FAN_TREE_RECORDINGS 2048 /* of one function: where none fits then, it runs as it is */

/* A function with operands of one kind: their number, dtypes, shapes, strides, and the key. */
typedef struct fan_tree_signature {
    struct fan_tree_signature *next;
    fan_tree_function *function; /* not held: it holds this */
    uint64_t key;
    int64_t *words; /* what is written down of the operands */
    size_t n;
    bool warm, known;
    bool warned_writes;
    bool evicted;                    /* its function does not list it any more: it goes with its last recording */
    unsigned full;                   /* how often the tree's memory ended in one of its calls */
    bool *demoted, *written, *shown; /* of each operand; shown: an output is a view of a part of it */
    int form;                        /* of what it gives; meaningless before it is warm */
    size_t nout;
} fan_tree_signature;

/* What a function's owner is warned of, once. */
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
    char *name;
    uint8_t *roles;
    bool *keep;
    size_t nroles, nkeep;
    unsigned warned; /* FAN_TREE_WARN bits */
    size_t recordings;
    fan_tree_node *last; /* the recording that its last call replayed; NULL: it did not, or that one is gone */
    fan_tree_signature *signatures;
    size_t nsignatures;
    fan_tree_function *next; /* among the tree's */
};

/* fan__tree_keeps: whether the caller gets a copy of the i-th output. */
static inline bool fan__tree_keeps(const fan_tree_function *f, size_t i)
{
    return f->nkeep == SIZE_MAX || (i < f->nkeep && f->keep[i]);
}

/* How an operand is treated in one call. */
typedef enum fan_tree_placement {
    FAN_PLACE_NONE,
    FAN_PLACE_COPY,
    FAN_PLACE_STATIC,
    FAN_PLACE_ADD,
    FAN_PLACE_POOL
} fan_tree_placement;

typedef struct fan_tree_operand {
    fan_tree_placement placement;
    const void *data;    /* its address; NULL: it is copied */
    fan_array *staged;   /* held; COPY: where to */
    const void *checked; /* COPY: where the operand lay when it was last seen to share no memory that it must not */
} fan_tree_operand;

/* The recordings of one kind behind one node. */
typedef struct fan_tree_children {
    fan_tree_signature *signature;
    fan_tree_node **children;
    size_t n, cap;
    unsigned moved, alive; /* recordings made since an operand moved; since an output lived */
} fan_tree_children;

struct fan_tree_node {
    fan_tree_node *parent; /* NULL: the root, which is no recording */
    fan_tree_node *next;   /* among the tree's recordings, the newest first */
    fan_tree_signature *signature;
    int number;
    bool warm; /* a warm-up: it goes with its path */
    fan_recording *recording;
    uint64_t hash;
    fan_tree_operand *operands;
    size_t n, ncopied;
    size_t *copied; /* the operands that are copied */
    fan_tree_block **blocks;
    size_t nblocks, blocks_cap;
    fan_tree_output *outputs;
    size_t nout;
    fan_tree_block **dead; /* blocks of the path that lived after the parent and had died before this */
    size_t ndead, dead_cap;
    fan_graph_ranges block_table; /* when it had been recorded */
    fan_graph_ranges used;        /* of the arena, by it alone: its outputs and all that it needs meanwhile */
    uint64_t reaches, replays;
    unsigned verified; /* replays that gave what the function gave as it is */
    fan_tree_children *places;
    size_t nplaces, places_cap;
    struct fan_job *copies; /* room for the jobs that stage operands */
    struct fan_operand *copy_in;
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
    fan_tree_function *functions;
    fan_tree_signature *evicted;
    int numbers;
    uint64_t reach; /* how far the path's memory reaches */
    unsigned depth; /* steps that are open */
    uint64_t steps; /* begun */
    uint64_t path_step;
    _Atomic uint64_t thread;      /* that has the lock; 0: none */
    atomic_uint owner_generation; /* in which the lock was made (fan_process) */
    bool fork_invalid;            /* a thread that had the lock is not in this process: nothing of the tree is whole */
    bool closed;
    int64_t *words; /* room for a signature */
    size_t words_cap;
    fan_tree_operand *operands; /* room for how operands are treated */
    size_t operands_cap;
    fan_tree_stats stats;
};

/* fan__tree_is_mine: this thread has the lock: it is in a call of the tree. */
static inline bool fan__tree_is_mine(fan_tree *t)
{
    return atomic_load_explicit(&t->thread, memory_order_relaxed) == fan_thread_id();
}

/* fan__tree_after_fork: in a forked child the lock is made anew, for the thread that had it may not be there. */
void fan__tree_after_fork(fan_tree *t);

/* fan__tree_lock: unless this thread has it, as a function's body has; what it gives, fan__tree_unlock gets. */
static inline bool fan__tree_lock(fan_tree *t)
{
    if (atomic_load_explicit(&t->owner_generation, memory_order_acquire) != fan_process())
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

/* fan__tree_check_fork: FAN_ERR_STATE where it is not whole in this process. Locked. */
fan_status fan__tree_check_fork(const fan_tree *t, fan_error *err);

/* ---- arena.c ---- */

/* fan__tree_block_lend: a storage for a block that has none. */
fan_status fan__tree_block_lend(fan_tree *t, fan_tree_block *b, fan_stream *owner, const char *call_site,
                                fan_error *err);
/* fan__tree_block_free: lets go of a block; who has its storage still keeps that, ended (why
 * NULL: nobody has it but the tree). The block table is not touched. */
void fan__tree_block_free(fan_tree_block *b, const char *why);
/* fan__tree_block_end: marks what was handed out; why: a text; the first counts. */
void fan__tree_block_end(fan_tree_block *b, const char *why);
bool fan__tree_block_lives(const fan_tree_block *b);
/* fan__tree_block_of: the block of this tree under an array; NULL: it is other memory. */
fan_tree_block *fan__tree_block_of(const fan_tree *t, const fan_array *a);
/* fan__tree_may_own: false where a is no memory of the tree's: two comparisons. */
static inline bool fan__tree_may_own(const fan_tree *t, const fan_array *a)
{
    return a->storage && fan_flat_within(a->storage->data, 1, t->arena->data, t->pool.bytes);
}

/* A call's own blocks, while its body runs. */
typedef struct fan_tree_scope {
    fan_memory_scope scope; /* first */
    fan_tree *tree;
    const char *call_site;
    fan_tree_block **blocks;
    size_t n, cap;
    fan_graph_ranges used; /* all that it ever took */
    char full[256];        /* why some of it came from the device: the tree's memory is full; "": none did */
    /* While it records: what came from the device, held until it has been launched, for nothing has run before. */
    fan_storage **outside;
    size_t noutside, outside_cap;
} fan_tree_scope;

fan_status fan__tree_scope_alloc(fan_memory_scope *scope, fan_stream *owner, size_t bytes, fan_storage **out,
                                 fan_error *err);
fan_status fan__tree_scope_outside(fan_memory_scope *scope, fan_storage *made, fan_error *err);
void fan__tree_scope_drop_outside(fan_tree_scope *s);
/* fan__tree_scope_fini: what is left of the blocks goes; `listed`: from the block table, too. */
void fan__tree_scope_fini(fan_tree_scope *s, bool listed, const char *why);

/* ---- path.c ---- */

void fan__tree_signature_free(fan_tree_signature *k);
void fan__tree_function_free(fan_tree_function *f);
/* fan__tree_launch: what n recorded, once more, with a line in the traces; number: n's. */
fan_status fan__tree_launch(const fan_tree *t, const fan_tree_node *n, int number, fan_error *err);
void fan__tree_node_free(fan_tree_node *n, const char *why);
/* fan__tree_evict: the kind of a function that was not called for longest is listed no more. */
void fan__tree_evict(fan_tree_function *f);
/* fan__tree_give_back: recordings of functions that are gone and of kinds that were evicted go, with all behind them,
 * but for those on the path; and such functions and kinds without recordings. */
void fan__tree_give_back(fan_tree *t);
/* fan__tree_step_ended: what the path handed out is ended. */
void fan__tree_step_ended(fan_tree *t, const char *call_site);
/* fan__tree_end_path: its memory is free, and poisoned; failing, the path is as before. The tree's stream waits for
 * `caller` already (NULL: nobody). */
fan_status fan__tree_end_path(fan_tree *t, const fan_stream *caller, fan_error *err);
bool fan__tree_all_dead(const fan_tree *t);
/* fan__tree_sweep: what has died leaves the block table, once the tree's stream waits for its users; *node (NULL: none)
 * notes it. `restore`: the block table is put back to the current node's end first. `keep_dead`: it stays in the block
 * table. */
fan_status fan__tree_sweep(fan_tree *t, bool restore, bool keep_dead, const fan_stream *caller, fan_tree_node *node,
                           fan_error *err);
/* fan__tree_relist: which blocks of the path the block table has, once it is another. */
void fan__tree_relist(fan_tree *t);
fan_tree_children *fan__tree_place(fan_tree_node *n, const fan_tree_signature *signature); /* NULL: there is none */
fan_status fan__tree_place_make(fan_tree_node *n, fan_tree_signature *signature, fan_tree_children **out,
                                fan_error *err);

/* ---- replay.c, record.c ---- */

#define FAN_STAGE_MANY 64

/* One call on its way. */
typedef struct fan_tree_run {
    fan_tree *tree;
    fan_tree_function *function;
    fan_tree_signature *signature;
    const fan_tree_args *args;
    fan_tree_operand *operands;
    fan_stream *caller;
    fan_tree_result *result;
    uint64_t hash;
    fan_tree_node *same; /* the function's last one, where the operands are as it has them; NULL: that is not known */
    char call_site[64];
    bool restore;
    bool keep_dead; /* of a recording: what has died stays in the block table, so that it fits whoever lives */
    bool ran;       /* a body did */
    bool entered;   /* the tree's stream waits for the caller's */
    char full[256]; /* why it was not recorded: the tree's memory is full; "": it is not */
    bool evicted;   /* a kind of the function's made room for this call's */
    bool wrote;     /* a recording was given up: the function writes into an operand that is copied */
} fan_tree_run;

fan_status fan__tree_warm_up(fan_tree_run *r, fan_error *err);
fan_status fan__tree_record(fan_tree_run *r, fan_tree_node **out, fan_error *err);
fan_status fan__tree_replay(fan_tree_run *r, fan_tree_node *n, fan_error *err);
/* fan__tree_replay_verified (verify.c): the same, for the first options.verify replays of n beside the function as it
 * is: FAN_ERR_CAPTURE where one array differs; then the operands are as before. */
fan_status fan__tree_replay_verified(fan_tree_run *r, fan_tree_node *n, fan_error *err);
/* fan__tree_check_overlap: nothing shares memory with what is added into, and nothing that is copied with what the
 * function is known to write. FAN_ERR_VALUE. */
fan_status fan__tree_check_overlap(const fan_tree_run *r, fan_error *err);
/* fan__tree_enter, _leave: the tree's stream waits for the caller's, once in a call; the other way round. */
fan_status fan__tree_enter(fan_tree_run *r, fan_error *err);
fan_status fan__tree_leave(const fan_tree_run *r, fan_error *err);
/* fan__tree_stage: operands into the arena. fan__tree_hand_out: the node's outputs into the result. */
fan_status fan__tree_stage(const fan_tree_run *r, fan_tree_node *n, fan_error *err);
fan_status fan__tree_hand_out(fan_tree_run *r, fan_tree_node *n, fan_error *err);
/* fan__tree_keep_operands: copies the operands, and views of them, that a function gave which ran as it is, where keep=
 * names them. */
fan_status fan__tree_keep_operands(const fan_tree_run *r, fan_error *err);

#endif
