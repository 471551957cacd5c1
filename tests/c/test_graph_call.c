/* What a call of a tree's function does: every combination of facts, beside the table of
 * docs/graph-trees.md read row by row. */
#include "graph/call.h"

#include "check.h"

#include <string.h>

/* A row: does it apply in this state? What it does to the plan; true: it ends the call. */
typedef struct reading {
    const fan_tree_call *c;
    fan_tree_path path;
    const fan_tree_place *at;
    fan_tree_plan p;
} reading;

static void apply(reading *r, int row)
{
    r->p.rules |= UINT32_C(1) << (row - 1);
}

static void end_path(reading *r, int row)
{
    apply(r, row);
    r->p.end_path = true;
    r->path = FAN_TREE_NONE;
    r->at = &r->c->root;
}

static bool outcome(reading *r, int row, fan_tree_outcome did)
{
    apply(r, row);
    r->p.outcome = did;
    r->p.why = r->at->fit;
    return true;
}

static bool rows_5_to_7(reading *r)
{
    if (!r->at->known)
        apply(r, 5);
    r->p.warn_writes = r->p.warn_writes || (!r->at->known && r->at->writes);
    if (r->at->writes)
        return outcome(r, 6, FAN_TREE_EAGER);
    if (r->at->over_limit && !r->at->can_demote)
        return outcome(r, 7, FAN_TREE_EAGER);
    return false;
}

static bool rows_8_to_11(reading *r)
{
    if (r->path == FAN_TREE_EXECUTION && !r->c->warm) {
        r->p.restore = true;
        return outcome(r, 8, FAN_TREE_WARM);
    }
    if ((r->path == FAN_TREE_NONE || r->path == FAN_TREE_RECORDING) && !r->c->warm)
        return outcome(r, 9, FAN_TREE_WARM);
    if (r->path == FAN_TREE_WARMUP)
        return outcome(r, 10, FAN_TREE_WARM);
    if (r->at->fit == FAN_TREE_FIT_FITS)
        return outcome(r, 11, FAN_TREE_REPLAY);
    return false;
}

static fan_tree_plan read_table(const fan_tree_call *c)
{
    reading r = {.c = c, .path = c->path, .at = c->path == FAN_TREE_NONE ? &c->root : &c->here};
    bool repeats = c->repeats && !c->warned;
    switch (c->path) {
    case FAN_TREE_RECORDING:
        if (c->new_step) {
            end_path(&r, 1);
        } else if (c->all_dead) {
            end_path(&r, 2);
        } else {
            apply(&r, 3);
        }
        break;
    case FAN_TREE_WARMUP:
        if (c->new_step || c->all_dead) {
            end_path(&r, 4);
        } else {
            apply(&r, 4);
        }
        break;
    case FAN_TREE_EXECUTION:
        repeats = false;
        if (c->new_step)
            end_path(&r, 12); /* where ours differs: stale after a replay, too */
        break;
    default: repeats = false; break;
    }
    if (repeats && r.path != FAN_TREE_NONE) {
        apply(&r, 19);
        r.p.warn_repeats = true;
    }
    if (rows_5_to_7(&r) || rows_8_to_11(&r))
        return r.p;
    if (r.path == FAN_TREE_EXECUTION && c->all_dead) {
        end_path(&r, c->root.fit != FAN_TREE_FIT_NEVER ? 12 : 15);
        apply(&r, 13);
        if (rows_5_to_7(&r) || rows_8_to_11(&r))
            return r.p;
    }
    if (r.at->fit == FAN_TREE_FIT_STATIC && c->strict) {
        (void)outcome(&r, 18, FAN_TREE_FAIL);
        return r.p;
    }
    if (c->full) {
        (void)outcome(&r, 7, FAN_TREE_EAGER);
        return r.p;
    }
    if (r.at->fit == FAN_TREE_FIT_STATIC || r.at->fit == FAN_TREE_FIT_OPERAND) {
        apply(&r, 14);
        if (r.at->over_limit) {
            r.p.demote = true;
        } else {
            r.p.count = true;
        }
    }
    if (r.path == FAN_TREE_EXECUTION) {
        apply(&r, 15);
        r.p.restore = true;
    }
    (void)outcome(&r, 16, FAN_TREE_RECORD);
    return r.p;
}

static bool same(const fan_tree_plan *a, const fan_tree_plan *b)
{
    bool same = a->end_path == b->end_path && a->restore == b->restore;
    same &= a->warn_writes == b->warn_writes && a->warn_repeats == b->warn_repeats;
    same &= a->count == b->count && a->demote == b->demote;
    same &= a->outcome == b->outcome && a->why == b->why;
    return same && a->rules == b->rules;
}

#define FITS 5
#define PLACES (16 * FITS)

static fan_tree_place place_of(int i)
{
    return (fan_tree_place){i & 1, i & 2, i & 4, i & 8, (fan_tree_fit)(i / 16)};
}

static fan_tree_call call_of(int i, fan_tree_place here, fan_tree_place root)
{
    return (fan_tree_call){
        (fan_tree_path)(i & 3), i & 4, i & 8, i & 16, i & 32, i & 64, i & 128, i & 256, here, root};
}

static void every_combination_is_as_the_table_says(void)
{
    long wrong = 0;
    long seen = 0;
    long rows[FAN_TREE_RULES] = {0};
    long did[FAN_TREE_FAIL + 1] = {0};
    for (int i = 0; i < 4 << 7; i++) {
        for (int here = 0; here < PLACES; here++) {
            for (int root = 0; root < PLACES; root++) {
                fan_tree_call c = call_of(i, place_of(here), place_of(root));
                fan_tree_plan got = fan_tree_decide(&c);
                fan_tree_plan warned = read_table(&c);
                if (!same(&got, &warned) && wrong++ < 5) {
                    fprintf(
                        stderr,
                        "facts %d, here %d, root %d: did %d rules %x, the table: did %d rules %x\n",
                        i, here, root, (int)got.outcome, got.rules, (int)warned.outcome,
                        warned.rules);
                }
                seen++;
                did[got.outcome]++;
                for (int row = 0; row < FAN_TREE_RULES; row++)
                    rows[row] += got.rules >> row & 1;
            }
        }
    }
    CHECK_INT(wrong, 0);
    CHECK_INT(seen, 512L * PLACES * PLACES);
    for (int d = 0; d <= FAN_TREE_FAIL; d++)
        CHECK(did[d] > 0);
    for (int row = 0; row < FAN_TREE_RULES; row++) /* T17 is of what is done after the call */
        CHECK((rows[row] > 0) == (row + 1 != 17));
}

/* What must hold of every plan, whatever the table says. */
static void no_plan_forgets_what_lives(void)
{
    long wrong = 0;
    for (int i = 0; i < 4 << 7; i++) {
        for (int here = 0; here < PLACES; here++) {
            for (int root = 0; root < PLACES; root++) {
                fan_tree_call c = call_of(i, place_of(here), place_of(root));
                fan_tree_plan p = fan_tree_decide(&c);
                bool allocates = p.outcome == FAN_TREE_WARM || p.outcome == FAN_TREE_RECORD;
                bool behind = c.path != FAN_TREE_NONE && !p.end_path;
                const fan_tree_place *at = behind ? &c.here : &c.root;
                /* the block table is right wherever something is allocated */
                wrong += allocates && behind && (c.path == FAN_TREE_EXECUTION) != p.restore;
                wrong += p.restore && !allocates;
                /* a path ends for a reason, and a step's end ends it */
                wrong += p.end_path && !c.new_step && !c.all_dead;
                wrong += c.new_step && c.path != FAN_TREE_NONE && !p.end_path;
                /* only what fits is replayed, and nothing that writes is recorded */
                wrong += p.outcome == FAN_TREE_REPLAY && (at->fit != FAN_TREE_FIT_FITS || !c.warm);
                wrong += p.outcome != FAN_TREE_EAGER && at->writes;
                /* nothing is recorded for ever: at the limit an operand is demoted, or it runs as
                 * it is */
                bool fits = at->fit == FAN_TREE_FIT_STATIC || at->fit == FAN_TREE_FIT_OPERAND;
                bool too_many = at->over_limit && !p.demote;
                wrong += p.outcome == FAN_TREE_RECORD && fits && too_many;
            }
        }
    }
    CHECK_INT(wrong, 0);
}

int main(void)
{
    every_combination_is_as_the_table_says();
    no_plan_forgets_what_lives();
    CHECK_STR(fan_tree_fit_words(FAN_TREE_FIT_STATIC), "a static operand lies elsewhere");
    return check_done();
}
