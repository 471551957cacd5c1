/* proof_config: every way in which producers, a consumer and their neighbours can be spread over
 * devices and streams.
 *
 * Streams are numbered device * S + k. A configuration is a shape, as in the sizes that
 * docs/proof.md gives, and a choice of options.
 *
 *   shape   the gradients' device d; for each producer its stream p, and, where p is not on d, the
 *           stream q of d that is current while it adds; the consumer's stream c; the caller's
 *           stream, the e-th of the taker's device; donated or not; who else knows the first
 *           gradient (kin)
 *   raw     D * (S + (D-1) S^2)^K * D S * S * 2 * (1 + 2 S + D S)
 *
 * Two configurations that differ by names of devices, of streams within a device, or (without keys)
 * of producers are the same: of each such class one is run. That this loses nothing is checked
 * (docs/proof.md, Reductions). */
#ifndef FAN_TESTS_PROOF_CONFIG_H
#define FAN_TESTS_PROOF_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_K 4
#define MAX_D 3
#define MAX_S 3
#define MAX_STREAMS (MAX_D * MAX_S)

/* Who else knows the first gradient. */
typedef enum kin {
    KIN_NONE,
    /* its memory is stream x's, where it was written; p waited for x and did nothing else */
    KIN_IMPORT,
    KIN_IMPORT_READ, /* .. and x reads it once more, whenever it likes */
    KIN_ALIAS        /* it was sent to another consumer too, who reads it on x */
} kin;

typedef enum mode {
    MODE_PLAIN,
    MODE_COPY,   /* add(copy=True): a conversion (S21) */
    MODE_SCALE,  /* take(scale=): the sum is finished (S22) */
    MODE_OUT,    /* take(out=): the taker's own memory is written */
    MODE_CLEAR,  /* clear() in place of take() */
    MODE_UNREAD, /* take(out=) into fresh memory of another stream's, which is let go unread */
    MODES
} mode;

/* The caller's hold: moved by add; dropped by a step of its own; kept to the end. */
typedef enum let_go {
    LET_GO_ADDED,
    LET_GO_LATER,
    LET_GO_LAST,
    LET_GOS
} let_go;

enum {
    BUDGET_NONE,
    BUDGET_ONE,
    BUDGET_ALL,
    BUDGETS
};

typedef struct config {
    int K, D, S;
    /* shape */
    int d, p[MAX_K], q[MAX_K], c, e;
    kin kin;
    int x; /* -1: no kin */
    bool donate;
    /* options */
    int budget;
    bool keyed;
    let_go let_go;
    mode mode;
    /* the buffer is not told its consumer's stream: the slot's C is the first producer's current
     * stream */
    bool undeclared;
    bool sum_to_caller; /* the caller reads the sum itself, not what the consumer made of it */
    int taker;          /* stream that takes; -1: c */
    /* stream that owns out's memory, for MODE_OUT and MODE_UNREAD; -1: the taker's */
    int out;
    int snapshot; /* stream that takes a snapshot at any time; -1: none */
} config;

uint64_t config_raw(int K, int D, int S); /* how many shapes there are */
/* config_shape: shape number `index` < config_raw; options are left as they are. */
void config_shape(config *c, uint64_t index);
void config_plain(config *c, int K, int D, int S); /* options as most users have them */

/* config_first: whether c is the least of its class. */
bool config_first(const config *c);
/* config_part: whether shape, or class, number `index` is in part `from` of `step` (0: there is but
 * one). */
bool config_part(uint64_t index, uint64_t from, uint64_t step);
/* config_least: the number of its class: equal for two configurations that differ by names
 * alone. */
uint64_t config_least(const config *c);

/* config_text: on one line, as config_parse reads it. */
char *config_text(const config *c, char *buf, size_t size);
bool config_parse(config *c, const char *text);

static inline int config_taker(const config *c)
{
    return c->taker >= 0 ? c->taker : c->c;
}
static inline int config_caller(const config *c)
{
    return config_taker(c) / c->S * c->S + c->e;
}

/* config_next: the next choice of options over which a proof goes; `n` counts from 0; false behind
 * the last. The rich ones are for kin NONE. */
typedef enum richness {
    OPTIONS_FEW,
    OPTIONS_MOST,
    OPTIONS_ALL
} richness;
bool config_options(config *c, richness how, unsigned n);

#endif
