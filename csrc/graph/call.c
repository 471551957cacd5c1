#include "graph/call.h"

const char *fan_tree_fit_words(fan_tree_fit fit)
{
    static const char *const words[] = {
#define X(NAME, words) words,
        FAN_TREE_FIT_LIST(X)
#undef X
    };
    return words[fit];
}

/* begin: the path that the call continues; NONE: it begins at the root. */
static fan_tree_path begin(const fan_tree_call *c, fan_tree_plan *p)
{
    static const uint32_t new_step[] = {0, FAN_T(4), FAN_T(1), FAN_T(12)},
                          dead[] = {0, FAN_T(4), FAN_T(2), 0}, stays[] = {0, FAN_T(4), FAN_T(3), 0};
    if (c->path == FAN_TREE_NONE)
        return FAN_TREE_NONE;
    if (c->new_step || (c->all_dead && dead[c->path])) {
        p->end_path = true;
        p->rules |= c->new_step ? new_step[c->path] : dead[c->path];
        return FAN_TREE_NONE;
    }
    p->rules |= stays[c->path];
    if (stays[c->path] && c->repeats && !c->warned) {
        p->warn_repeats = true;
        p->rules |= FAN_T(19);
    }
    return c->path;
}

/* decide_eager: T5 to T7. */
static bool decide_eager(const fan_tree_place *at, fan_tree_plan *p)
{
    if (!at->known) {
        p->rules |= FAN_T(5);
        p->warn_writes = at->writes;
    }
    if (at->writes)
        p->rules |= FAN_T(6);
    else if (at->over_limit && !at->can_demote)
        p->rules |= FAN_T(7);
    else
        return false;
    p->outcome = FAN_TREE_EAGER;
    return true;
}

static void record(const fan_tree_call *c, const fan_tree_place *at, fan_tree_plan *p)
{
    bool moved = at->fit == FAN_TREE_FIT_STATIC || at->fit == FAN_TREE_FIT_OPERAND;
    if (at->fit == FAN_TREE_FIT_STATIC && c->strict) {
        p->outcome = FAN_TREE_FAIL;
        p->rules |= FAN_T(18);
        return;
    }
    if (c->full) {
        p->outcome = FAN_TREE_EAGER;
        p->rules |= FAN_T(7);
        return;
    }
    if (moved) {
        p->count = !at->over_limit;
        p->demote = at->over_limit;
        p->rules |= FAN_T(14);
    }
    p->outcome = FAN_TREE_RECORD;
    p->rules |= FAN_T(16);
}

fan_tree_plan fan_tree_decide(const fan_tree_call *c)
{
    fan_tree_plan p = {0};
    fan_tree_path path = begin(c, &p);
    const fan_tree_place *at = path == FAN_TREE_NONE ? &c->root : &c->here;
    p.why = at->fit;
    if (decide_eager(at, &p))
        return p;
    if (!c->warm || path == FAN_TREE_WARMUP) {
        p.restore = path == FAN_TREE_EXECUTION;
        p.outcome = FAN_TREE_WARM;
        if (path == FAN_TREE_EXECUTION)
            p.rules |= FAN_T(8);
        else if (path == FAN_TREE_WARMUP)
            p.rules |= FAN_T(10);
        else
            p.rules |= FAN_T(9);
        return p;
    }
    if (path == FAN_TREE_EXECUTION && at->fit != FAN_TREE_FIT_FITS && c->all_dead) {
        /* T12, T15: the path can end; then the function continues at the root, where it may have a
         * recording. */
        p.end_path = true;
        p.rules |= c->root.fit == FAN_TREE_FIT_NEVER ? FAN_T(15) : FAN_T(12);
        path = FAN_TREE_NONE;
        at = &c->root;
        p.why = at->fit;
        p.rules |= FAN_T(13);
        if (decide_eager(at, &p))
            return p;
    }
    if (at->fit == FAN_TREE_FIT_FITS) {
        p.outcome = FAN_TREE_REPLAY;
        p.rules |= FAN_T(11);
        return p;
    }
    record(c, at, &p);
    if (path == FAN_TREE_EXECUTION && p.outcome == FAN_TREE_RECORD) {
        p.restore = true;
        p.rules |= FAN_T(15);
    }
    return p;
}
