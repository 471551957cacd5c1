/* proof_run: one run of a configuration on the simulated machine, step by step; it drives the
 * buffer's own code.
 *
 *   P_i   producer i's kernel writes its gradient on p_i
 *   A_i   add; later, with LET_GO_LATER, L_i: the caller lets go of his hold
 *   X     who else knows the first gradient reads it on x
 *   N     a snapshot, read on its stream
 *   C     the consumer takes the sum, its kernel reads it, it lets go
 *   E     the end of the pass: the caller's stream comes after the consumer's, its kernel reads
 * what the consumer made, which is let go H     the host waits for the caller's stream and reads
 * what its kernel made
 *
 * P_i, A_i, L_i are the steps of actor i; the others are an actor each. X comes after P_0, C after
 * every A_i, E after C, and H last: one thread plays all actors, so what that wait teaches the
 * host, no other may know. What memory holds is followed in symbols too (content): which
 * contributions, in which order they were
 * added. */
#ifndef FAN_TESTS_PROOF_RUN_H
#define FAN_TESTS_PROOF_RUN_H

#include "proof_config.h"

#include "buffer/buffer.h"
#include "device/sim/explore.h"
#include "device/sim/sim.h"

/* A machine with the streams that configurations name. */
typedef struct world {
    int D, S;
    bool work; /* bytes are moved */
    fan_sim *m;
    fan_device *device[MAX_D];
    fan_stream *stream[MAX_STREAMS];
} world;

bool world_open(world *w, int D, int S, const fan_sim_config *config);
void world_close(world *w);

/* Actors: the producers 0 .. K-1, then these. */
enum {
    ACTOR_C = MAX_K,
    ACTOR_E,
    ACTOR_X,
    ACTOR_N,
    ACTOR_H,
    ACTORS
};

/* What came out. The first that went wrong counts. */
typedef enum verdict {
    FINE,
    RACED,    /* the happens-before checker says so */
    MISCOUNT, /* a sum without each contribution exactly once, in the order of keys */
    WRITTEN,  /* a gradient that somebody else holds was changed */
    FAILED,   /* a call failed */
    UNSOUND,  /* a wait was left out although its order did not hold */
    STUCK,    /* deadlock */
    WRONG,    /* a wrong value (with work) */
    CRASHED,  /* of a whole program */
    VERDICTS
} verdict;
extern const char *const verdict_words[VERDICTS];

/* Faults of the driver: what the buffer's callers owe it. */
enum {
    DRIVER_COUNT = 1, /* the consumer may act before the adds have returned */
    /* the producer does not wait for the stream that wrote the imported gradient */
    DRIVER_IMPORT = 2,
    DRIVER_ALIAS_WAIT = 4, /* who else reads the first gradient does not wait for it */
    DRIVER_ALIAS_MARK = 8, /* .. or does not say that he uses it */
    DRIVER_SYNC = 16,      /* the host waits for the wrong stream */
    DRIVER_ELIDE = 32,     /* the streams' clocks say that they have waited for everything */
    DRIVER_DONATE = 64     /* a gradient is donated while another stream still reads it */
};

typedef struct run {
    world *w;
    const config *c;
    fan_buffer *b;    /* of this configuration; empty between runs */
    unsigned driver;  /* planted faults of whoever drives the buffer */
    int done[ACTORS]; /* steps so far */
    int added;
    int accum;           /* stream on which the slot takes its sums; -1: no gradient yet */
    uint32_t arrived;    /* producers that have added: a mask */
    fan_array *g[MAX_K]; /* the caller's holds */
    fan_array *g_kin;
    fan_event *kin_event;
    fan_array *y, *z;         /* what the consumer made, or the sum; what the caller made of it */
    fan_array *x_saw, *n_saw; /* with work: what they read */
    uint64_t want_x, want_y;
    verdict verdict;
    char why[FAN_ERROR_TEXT];
    bool took;
    uint32_t taken; /* contributions in the sums so far: a mask */
} run;

/* run_open, run_close: for one configuration; run_begin, run_end: one run of it. */
bool run_open(run *r, world *w, const config *c);
/* run_buffer: a new buffer in place of the one that a configuration's runs share. */
bool run_buffer(run *r);
void run_close(run *r);
void run_begin(run *r);
void run_end(run *r);
/* run_enabled: the actors that can act. */
uint32_t run_enabled(const run *r);
/* run_step: the next step of `actor`; what it touches goes to x (may be NULL). */
void run_step(run *r, int actor, fan_explore *x);
void run_fail(run *r, verdict v, const char *why);

/* The pieces that split runs use on their own. */
bool run_produce(run *r, int i);
bool run_add(run *r, int i);
bool run_let_go(run *r, int i);
bool run_consume(run *r, bool all);
bool run_kin(run *r);
bool run_snapshot(run *r);
bool run_end_of_pass(run *r);
bool run_read_back(run *r);

/* content: what memory holds, in symbols: the contributions i + 1 in the order in which they were
 * added, one octal digit each, the first one highest. Followed through every job of the
 * buffer's. */
void content_reset(void);
void content_set(const void *memory, uint64_t what);
uint64_t content_of(const void *memory);

#endif
