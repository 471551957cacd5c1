/* The rules of a call (call.h) as one function, fan_tree_decide, at the end: which path the call
 * continues, whether it must run eagerly, and whether it records. */
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

/* path_begin: the path that the call continues; NONE: it begins at the root. */
static fan_tree_path path_begin(const fan_tree_call *call, fan_tree_plan *plan)
{
    /* the rules, by the path */
    static const uint32_t new_step[] = {0, FAN_T(4), FAN_T(1), FAN_T(12)};
    static const uint32_t dead[] = {0, FAN_T(4), FAN_T(2), 0};
    static const uint32_t stays[] = {0, FAN_T(4), FAN_T(3), 0};
    fan_tree_path path = call->path;
    if (path == FAN_TREE_NONE)
        return path;
    uint32_t ends = 0;
    if (call->new_step)
        ends = new_step[path];
    else if (call->all_dead)
        ends = dead[path];
    if (ends) {
        plan->end_path = true;
        plan->rules |= ends;
        return FAN_TREE_NONE;
    }
    plan->rules |= stays[path];
    if (stays[path] && call->repeats && !call->warned) {
        plan->warn_repeats = true;
        plan->rules |= FAN_T(19);
    }
    return path;
}

/* decide_eager: T5 to T7. */
static bool decide_eager(const fan_tree_place *place, fan_tree_plan *plan)
{
    if (!place->known) {
        plan->rules |= FAN_T(5);
        plan->warn_writes = place->writes;
    }
    if (place->writes)
        plan->rules |= FAN_T(6);
    else if (place->over_limit && !place->can_demote)
        plan->rules |= FAN_T(7);
    else
        return false;
    plan->outcome = FAN_TREE_EAGER;
    return true;
}

static void decide_record(const fan_tree_call *call, const fan_tree_place *place,
                          fan_tree_plan *plan)
{
    if (place->fit == FAN_TREE_FIT_STATIC && call->strict) {
        plan->outcome = FAN_TREE_FAIL;
        plan->rules |= FAN_T(18);
        return;
    }
    if (call->full) {
        plan->outcome = FAN_TREE_EAGER;
        plan->rules |= FAN_T(7);
        return;
    }
    if (fan_tree_fit_moved(place->fit)) {
        plan->count = !place->over_limit;
        plan->demote = place->over_limit;
        plan->rules |= FAN_T(14);
    }
    plan->outcome = FAN_TREE_RECORD;
    plan->rules |= FAN_T(16);
}

fan_tree_plan fan_tree_decide(const fan_tree_call *call)
{
    /* the rule of a warm-up, by the path */
    static const uint32_t warm_up[] = {FAN_T(9), FAN_T(10), FAN_T(9), FAN_T(8)};
    fan_tree_plan plan = {0};
    fan_tree_path path = path_begin(call, &plan);
    const fan_tree_place *place = &call->here;
    if (path == FAN_TREE_NONE)
        place = &call->root;
    plan.why = place->fit;
    if (decide_eager(place, &plan))
        return plan;
    if (!call->warm || path == FAN_TREE_WARMUP) {
        plan.restore = path == FAN_TREE_EXECUTION;
        plan.outcome = FAN_TREE_WARM;
        plan.rules |= warm_up[path];
        return plan;
    }
    if (path == FAN_TREE_EXECUTION && place->fit != FAN_TREE_FIT_FITS && call->all_dead) {
        /* T12, T15: the path can end; then the function continues at the root, where it may have a
         * recording. */
        plan.end_path = true;
        path = FAN_TREE_NONE;
        place = &call->root;
        plan.why = place->fit;
        plan.rules |= FAN_T(13);
        plan.rules |= place->fit == FAN_TREE_FIT_NEVER ? FAN_T(15) : FAN_T(12);
        if (decide_eager(place, &plan))
            return plan;
    }
    if (place->fit == FAN_TREE_FIT_FITS) {
        plan.outcome = FAN_TREE_REPLAY;
        plan.rules |= FAN_T(11);
        return plan;
    }
    decide_record(call, place, &plan);
    if (path == FAN_TREE_EXECUTION && plan.outcome == FAN_TREE_RECORD) {
        plan.restore = true;
        plan.rules |= FAN_T(15);
    }
    return plan;
}
