#define _POSIX_C_SOURCE 200809L /* strnlen */
/* Steps and calls: a call gathers facts, call.h makes the plan, and the plan is carried out. */
#include "graph/internal.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- steps ---- */

static _Thread_local const fan_tree *step_tree; /* this thread's open step is of this tree */
static _Thread_local unsigned step_depth;
/* this thread has the lock of a tree, and must not wait for another tree's */
static _Thread_local bool is_calling;

fan_status fan_tree_step_begin(fan_tree *t, fan_error *err)
{
    fan_status status;
    if (step_depth && step_tree != t)
        return fan_fail(err, FAN_ERR_STATE,
                        "a step of another graph tree is open on this thread: end it first, "
                        "because outputs of one tree may end while the other still replays");
    if (fan__tree_is_mine(t))
        return fan_fail(
            err, FAN_ERR_STATE,
            "a step cannot begin in a function of its graph tree: the function runs inside a step");
    if (is_calling)
        return fan_fail(err, FAN_ERR_STATE,
                        "a step cannot begin in a function of another graph tree");
    bool locked = fan__tree_lock(t);
    status = fan__tree_check_fork(t, err);
    if (status == FAN_OK && t->closed)
        status = fan_fail(err, FAN_ERR_STATE, "the graph tree is closed");
    else if (status == FAN_OK && t->depth++ == 0)
        t->steps++;
    fan__tree_unlock(t, locked);
    if (status == FAN_OK) {
        step_tree = t;
        step_depth++;
    }
    return status;
}

void fan_tree_step_end(fan_tree *t, const char *call_site)
{
    if (step_tree == t && --step_depth == 0)
        step_tree = NULL;
    bool locked = fan__tree_lock(t); /* garbage collection inside a body may run this */
    if (!t->fork_invalid && t->depth && --t->depth == 0)
        fan__tree_step_ended(t, call_site);
    fan__tree_unlock(t, locked);
}

/* ---- signatures ---- */

/* signature_find: the one of a call's operands, made if needed; it moves to the front. *evicted: an
 * older one made
 * room. */
static fan_status signature_find(fan_tree_function *f, const fan_tree_args *a,
                                 fan_tree_signature **out, bool *evicted, fan_error *err)
{
    fan_tree *t = f->tree;
    /* words: of each operand dtype (-1: no array), rank, and shape and stride of each axis */
    size_t n = 0;
    for (size_t i = 0; i < a->n; i++) {
        const fan_array *x = a->in[i];
        if (fan_grow((void **)&t->words, &t->words_cap, n + 2 + 2 * (size_t)(x ? x->ndim : 0),
                     sizeof *t->words))
            return fan__tree_no_memory(err);
        t->words[n++] = x ? (int64_t)x->dtype : -1;
        t->words[n++] = x ? x->ndim : 0;
        for (int k = 0; x && k < x->ndim; k++) {
            t->words[n++] = x->shape[k];
            t->words[n++] = x->strides[k];
        }
    }
    for (fan_tree_signature **at = &f->signatures; *at; at = &(*at)->next) {
        fan_tree_signature *sig = *at;
        if (sig->key != a->key || sig->n != a->n || sig->nwords != n ||
            (n && memcmp(sig->words, t->words, n * sizeof *sig->words) != 0))
            continue;
        *at = sig->next;
        sig->next = f->signatures;
        f->signatures = *out = sig;
        return FAN_OK;
    }
    fan_tree_signature *sig = fan_calloc(sizeof *sig);
    if (!sig || !(sig->words = fan_alloc((n + 1) * sizeof *sig->words)) ||
        !(sig->demoted = fan_calloc(a->n + 1)) || !(sig->written = fan_calloc(a->n + 1)) ||
        !(sig->shown = fan_calloc(a->n + 1))) {
        if (sig)
            fan__tree_signature_free(sig);
        return fan__tree_no_memory(err);
    }
    if (n)
        memcpy(sig->words, t->words, n * sizeof *sig->words);
    sig->function = f;
    sig->n = a->n;
    sig->nwords = n;
    sig->key = a->key;
    sig->next = f->signatures;
    f->signatures = sig;
    f->nsignatures++;
    f->kept++;
    *out = sig;
    *evicted = f->nsignatures > FAN_TREE_SIGNATURES;
    if (*evicted)
        fan__tree_evict(f);
    return FAN_OK;
}

/* ---- facts ---- */

/* placement_of: the placement of operand i, `a`; `ours`: it lies in a block of the tree. */
static fan_tree_placement placement_of(const fan_tree_run *r, size_t i, const fan_array *a,
                                       bool ours)
{
    fan_tree_role role = r->function->roles[r->function->nroles ? i : 0];
    if (!a)
        return FAN_PLACE_NONE;
    if (role == FAN_TREE_ACCUMULATE)
        return FAN_PLACE_ADD;
    if (r->signature->demoted[i] || role == FAN_TREE_COPY)
        return FAN_PLACE_COPY;
    if (ours)
        return FAN_PLACE_POOL;
    return role == FAN_TREE_STATIC ? FAN_PLACE_STATIC : FAN_PLACE_COPY;
}

/* place_operands: the placement and address of each operand. A replay writes without a check, so an
 * operand that is written must be writable here. */
static fan_status place_operands(fan_tree_run *r, fan_error *err)
{
    for (size_t i = 0; i < r->args->n; i++) {
        const fan_array *a = r->args->in[i];
        bool ours = a && fan__tree_may_own(r->tree, a) && fan__tree_block_of(r->tree, a);
        fan_tree_placement placement = placement_of(r, i, a, ours);
        if (placement == FAN_PLACE_ADD && ours)
            return fan_fail(
                err, FAN_ERR_VALUE,
                "%s: operand %zu is added into (accumulate), but it is memory of the graph tree, "
                "which the end of the step takes back: pass memory of your own",
                r->function->name, i);
        if (placement > FAN_PLACE_COPY && !a->writable &&
            (placement == FAN_PLACE_ADD || r->signature->written[i]))
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s: operand %zu is read-only, and the function writes into it: pass a "
                            "writable array",
                            r->function->name, i);
        r->operands[i] = (fan_tree_operand){.placement = placement,
                                            .data = placement > FAN_PLACE_COPY ? a->data : NULL};
    }
    return FAN_OK;
}

/* The facts of one place, and the recording that fits best there. */
typedef struct place_facts {
    fan_tree_place facts;
    fan_tree_node *child;
    size_t which;
} place_facts;

/* writes_copied: the first operand that the function is known to write and that this call copies;
 * args->n: none. */
static size_t writes_copied(const fan_tree_run *r)
{
    size_t i = 0;
    while (i < r->args->n &&
           !(r->signature->written[i] && r->operands[i].placement == FAN_PLACE_COPY))
        i++;
    return i;
}

static place_facts place_facts_of(const fan_tree_run *r, fan_tree_node *at)
{
    bool writes = writes_copied(r) < r->args->n;
    place_facts p = {
        .facts = {.known = r->signature->known && (!writes || r->signature->warned_writes),
                  .writes = writes,
                  .fit = FAN_TREE_FIT_NEVER}};
    const fan_tree_children *place = fan__tree_place(at, r->signature);
    for (size_t i = 0; place && i < place->n; i++) {
        fan_tree_node *n = place->children[i];
        size_t which = 0;
        fan_tree_fit fit = FAN_TREE_FIT_FITS;
        while (which < n->n && n->operands[which].placement == r->operands[which].placement &&
               n->operands[which].data == r->operands[which].data)
            which++;
        if (which < n->n) {
            if (p.facts.fit == FAN_TREE_FIT_ALIVE)
                continue;
            fit = r->operands[which].placement == FAN_PLACE_POOL ||
                          n->operands[which].placement == FAN_PLACE_POOL
                      ? FAN_TREE_FIT_OPERAND
                      : FAN_TREE_FIT_STATIC;
        }
        for (size_t k = 0; k < n->ndead && fit == FAN_TREE_FIT_FITS && !FAN_FAULT(TREE_ALIVE_FITS);
             k++)
            fit = fan__tree_block_lives(n->dead[k]) ? FAN_TREE_FIT_ALIVE : fit;
        p.facts.fit = fit;
        p.child = n;
        p.which = which < n->n ? which : 0;
        if (fit == FAN_TREE_FIT_FITS)
            return p;
    }
    if (place && (p.facts.fit == FAN_TREE_FIT_OPERAND || p.facts.fit == FAN_TREE_FIT_STATIC)) {
        p.facts.over_limit = place->moved >= r->tree->options.limit;
        /* Foreign kernels may write an operand unseen, so devices that can record them do not
         * demote. */
        p.facts.can_demote = r->tree->recorder->accesses_all && !r->signature->written[p.which] &&
                             !r->signature->shown[p.which] &&
                             r->operands[p.which].placement != FAN_PLACE_ADD;
    }
    return p;
}

/* repeats: whether this path has the function twice after the same function. */
static bool repeats(const fan_tree_run *r)
{
    const fan_tree *t = r->tree;
    unsigned times = 0;
    if ((t->path != FAN_TREE_WARMUP && t->path != FAN_TREE_RECORDING) ||
        r->function->warned & FAN_TREE_WARN_REPEATS)
        return false;
    const fan_tree_function *last = t->current->signature->function;
    for (const fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        times += n->signature->function == r->function && n->parent->signature &&
                 n->parent->signature->function == last;
    return times >= 2;
}

/* ---- reasons and warnings ---- */

static const char *reason_of_warm_up(uint64_t rules)
{
    if (rules & FAN_T(8))
        return "it is warmed up after a replay, where the path branches";
    if (rules & FAN_T(10))
        return "what ran before it was warmed up, so addresses are not final";
    return "it had not run with operands of these dtypes and shapes";
}

/* report_moved: why a call runs as it is: operand i moved more often than its limit. */
static void report_moved(const fan_tree_run *r, size_t i, fan_tree_report *o)
{
    const char *why = "foreign kernels may write into it";
    const char *advice = ", or give the operand the role copy";
    if (r->signature->written[i]) {
        why = "the function writes into it";
        advice = "";
    }
    if (r->signature->shown[i]) {
        why = "the function returns a view of it";
        advice = "";
    }
    snprintf(o->reason, sizeof o->reason,
             "operand %zu lay elsewhere more than %u times, and %s, so it cannot be copied: keep "
             "the array where it is%s",
             i, r->tree->options.limit, why, advice);
}


static void fill_report(const fan_tree_run *r, const fan_tree_plan *plan, const place_facts *p,
                        fan_tree_report *o)
{
    o->outcome = plan->outcome;
    o->rules = plan->rules | FAN_T(17);
    o->node = -1;
    o->handed = false;
    o->reason[0] = '\0';
    if (plan->outcome == FAN_TREE_EAGER) {
        if (o->rules & FAN_T(6))
            snprintf(o->reason, sizeof o->reason,
                     "it writes into operand %zu, which is copied: give it the role static or "
                     "accumulate",
                     writes_copied(r));
        else if (r->function->recordings >= FAN_TREE_RECORDINGS)
            snprintf(
                o->reason, sizeof o->reason,
                "it has %d recordings, and none fits: call functions in the same order in each "
                "step, and do not let steps of several threads overlap (a tree for each thread)",
                FAN_TREE_RECORDINGS);
        else
            report_moved(r, p->which, o);
    }
    if (plan->outcome == FAN_TREE_WARM)
        snprintf(o->reason, sizeof o->reason, "%s", reason_of_warm_up(plan->rules));
    if (plan->outcome != FAN_TREE_RECORD)
        return;
    snprintf(o->reason, sizeof o->reason, "%s", fan_tree_fit_words(plan->why));
    if (plan->why == FAN_TREE_FIT_OPERAND || plan->why == FAN_TREE_FIT_STATIC)
        fan_append(o->reason, sizeof o->reason, ": operand %zu at %p, not %p%s", p->which,
                   /* in the recording */
                   (void *)r->args->in[p->which]->data, p->child->operands[p->which].data,
                   plan->demote ? "; it keeps moving, and is copied from now on" : "");
}

/* warn: warns the function's owner, once for each kind of warning (0: each time). */
static void warn(const fan_tree_run *r, unsigned what, const char *text)
{
    char message[512];
    if (!r->args->body.warn || r->function->warned & what)
        return;
    r->function->warned |= what;
    snprintf(message, sizeof message, "%s %s", r->function->name, text);
    r->args->body.warn(r->args->body.ctx, message);
}

/* ---- a call ---- */

static fan_status run_eager(fan_tree_run *r, fan_error *err)
{
    FAN_TRY(r->args->body.run(r->args->body.ctx, r->args->in, r->result, err));
    return fan__tree_keep_operands(r, err);
}

/* decide: gathers the facts and makes the plan; *p: the facts of the place where it continues. */
static fan_tree_plan decide(const fan_tree_run *r, place_facts *p)
{
    fan_tree *t = r->tree;
    place_facts here = place_facts_of(r, t->current),
                root = t->current == &t->root ? here : place_facts_of(r, &t->root);
    bool all_dead = t->path != FAN_TREE_NONE;
    for (const fan_tree_node *n = t->current; n != &t->root && all_dead; n = n->parent)
        for (size_t i = 0; i < n->nblocks && all_dead; i++)
            all_dead = !fan__tree_block_lives(n->blocks[i]);
    fan_tree_call c = {.path = t->path,
                       .new_step = t->path != FAN_TREE_NONE && t->path_step != t->steps,
                       .all_dead = all_dead,
                       .warm = r->signature->warm,
                       .strict = t->options.strict,
                       .repeats = repeats(r),
                       .warned = (r->function->warned & FAN_TREE_WARN_REPEATS) != 0,
                       .full = r->function->recordings >= FAN_TREE_RECORDINGS,
                       .here = here.facts,
                       .root = root.facts};
    fan_tree_plan plan = fan_tree_decide(&c);
    *p = plan.end_path ? root : here;
    r->signature->known = true;
    r->signature->warned_writes |= plan.warn_writes;
    return plan;
}

/* count_body: updates the counters after the function ran; the arena may have run out during it. */
static void count_body(const fan_tree_run *r, fan_tree_report *o)
{
    fan_tree_stats *stats = &r->tree->stats;
    if (!r->full[0]) {
        stats->warmed++;
        return;
    }
    r->signature->full++;
    stats->eager++;
    o->outcome = FAN_TREE_EAGER;
    o->handed = true;
    snprintf(o->reason, sizeof o->reason, "%s", r->full);
}

/* replay: of n, verified if it is one of the first. */
static fan_status replay(fan_tree_run *r, fan_tree_node *n, fan_tree_report *o, fan_error *err)
{
    fan_tree *t = r->tree;
    FAN_TRY(n->verified < t->options.verify ? fan__tree_verify(r, n, err)
                                            : fan__tree_replay(r, n, err));
    o->node = n->number;
    t->current = n;
    t->path = FAN_TREE_EXECUTION;
    t->stats.replayed++;
    return FAN_OK;
}

/* make_recording: T16; a function that turns out to write into a copied operand runs eagerly. */
static fan_status make_recording(fan_tree_run *r, fan_tree_plan *plan, place_facts *p,
                                 fan_tree_report *o, fan_error *err)
{
    fan_tree *t = r->tree;
    fan_tree_node *made = NULL;
    if (plan->demote) {
        r->signature->demoted[p->which] = true;
        FAN_TRY(place_operands(r, err));
        place_facts again = place_facts_of(r, t->current);
        if (again.facts.fit == FAN_TREE_FIT_FITS) {
            o->outcome = FAN_TREE_REPLAY;
            return replay(r, again.child, o, err);
        }
    }
    const fan_tree_children *place = fan__tree_place(t->current, r->signature);
    r->keep_dead = plan->why == FAN_TREE_FIT_ALIVE && place && place->alive >= t->options.limit;
    FAN_TRY(fan__tree_record(r, &made, err));
    if (made && r->full[0]) {
        count_body(r, o);
        return FAN_OK;
    }
    if (made) {
        fan__tree_place(made->parent, r->signature)->alive += plan->why == FAN_TREE_FIT_ALIVE;
        if (plan->count)
            fan__tree_place(made->parent, r->signature)->moved++;
        o->node = made->number;
        t->stats.recorded++;
        r->signature->full = 0;
        return FAN_OK;
    }
    r->signature->known = false; /* so that its owner is warned */
    *plan = decide(r, p);
    fill_report(r, plan, p, o);
    t->stats.eager++;
    return run_eager(r, err);
}

static fan_status run_plan(fan_tree_run *r, fan_tree_plan *plan, place_facts *p, fan_tree_report *o,
                           fan_error *err)
{
    fan_tree *t = r->tree;
    switch (plan->outcome) {
    case FAN_TREE_FAIL:
        return fan_fail(err, FAN_ERR_VALUE,
                        "%s: operand %zu is static, and lies at %p; it was recorded at %p (strict)",
                        r->function->name, p->which, (void *)r->args->in[p->which]->data,
                        p->child->operands[p->which].data);
    case FAN_TREE_EAGER:
        t->stats.eager++;
        return run_eager(r, err);
    case FAN_TREE_WARM:
        FAN_TRY(fan__tree_warm_up(r, err));
        count_body(r, o);
        return FAN_OK;
    case FAN_TREE_RECORD:
        return make_recording(r, plan, p, o, err);
    case FAN_TREE_REPLAY:
        return replay(r, p->child, o, err);
    }
    return FAN_OK;
}

static fan_status run_aside(fan_tree_run *r, const char *reason, fan_tree_report *o, fan_error *err)
{
    *o = (fan_tree_report){.outcome = FAN_TREE_EAGER, .rules = FAN_T(17), .node = -1};
    snprintf(o->reason, sizeof o->reason, "%s", reason);
    r->tree->stats.eager++;
    return run_eager(r, err);
}

/* call_locked: with the lock. */
static fan_status call_locked(fan_tree_run *r, fan_tree_report *o, fan_error *err)
{
    fan_tree *t = r->tree;
    uint64_t capture = 0;
    place_facts p;
    FAN_TRY(fan__tree_check_fork(t, err));
    if (r->function->tree->closed)
        return fan_fail(err, FAN_ERR_STATE, "%s: its graph tree is closed", r->function->name);
    if (r->function->tree->depth == 0)
        return fan_fail(err, FAN_ERR_STATE,
                        "%s is called outside of a step, which ends the life of its outputs: use "
                        "`with tree.step():` around the calls of one iteration",
                        r->function->name);
    if (r->function->nroles && r->function->nroles != r->args->n)
        return fan_fail(err, FAN_ERR_TYPE, "%s: got %zu operand%s, but roles= has %zu",
                        r->function->name, r->args->n, FAN_PLURAL(r->args->n), r->function->nroles);
    for (size_t i = 0; i < r->args->n; i++)
        if (r->args->in[i] && fan_storage_ended(r->args->in[i]->storage)) {
            fan_error why;
            (void)fan_storage_check(r->args->in[i]->storage, &why);
            return fan_fail(err, FAN_ERR_STATE, "%s: operand %zu: %s", r->function->name, i,
                            why.text);
        }
    if (r->caller)
        FAN_TRY(fan_stream_capture(r->caller, &capture, err));
    if (capture)
        return run_aside(r, "the caller's current stream is captured", o, err);
    FAN_TRY(signature_find(r->function, r->args, &r->signature, &r->evicted, err));
    if (fan_grow((void **)&t->operands, &t->operands_cap, r->args->n + 1, sizeof *t->operands))
        return fan__tree_no_memory(err);
    r->operands = t->operands;
    FAN_TRY(place_operands(r, err));
    fan_tree_plan plan = decide(r, &p);
    fill_report(r, &plan, &p, o);
    if (plan.end_path) {
        FAN_TRY(fan__tree_enter(r, err)); /* the memory's last user is mostly the caller's stream */
        FAN_TRY(fan__tree_end_path(t, r->caller, err));
    }
    if (t->current == &t->root)
        t->path_step = t->steps;
    if ((plan.outcome == FAN_TREE_WARM || plan.outcome == FAN_TREE_RECORD) &&
        r->signature->full > t->options.limit) {
        char reason[256];
        snprintf(reason, sizeof reason,
                 "runs without a recording: the tree's memory ran out in %u of its calls: give the "
                 "tree more (memory=), or delete outputs earlier",
                 r->signature->full);
        FAN_TRY(run_aside(r, reason + strlen("runs without a recording: "), o, err));
        warn(r, FAN_TREE_WARN_ROOM, reason);
        return FAN_OK;
    }
    r->restore = plan.restore;
    FAN_TRY(run_plan(r, &plan, &p, o, err));
    char text[FAN_TREE_REASON + 64] = "";
    if (plan.outcome == FAN_TREE_EAGER)
        snprintf(text, sizeof text, "runs without a recording: %s", o->reason);
    if (plan.warn_writes)
        warn(r, 0, text);
    else if (plan.outcome == FAN_TREE_EAGER && o->rules & FAN_T(7))
        warn(r,
             r->function->recordings >= FAN_TREE_RECORDINGS ? FAN_TREE_WARN_RECORDINGS
                                                            : FAN_TREE_WARN_MOVES,
             text);
    if (plan.warn_repeats)
        warn(r, FAN_TREE_WARN_REPEATS,
             "runs again and again in one step while outputs of earlier calls are alive, so each "
             "call is recorded anew: end the step, delete outputs, or copy them with keep=True");
    if (plan.demote) {
        snprintf(text, sizeof text,
                 "copies operand %zu from now on, which lay elsewhere more than %u times: keep the "
                 "array where it is, or give the operand the role copy",
                 p.which, r->tree->options.limit);
        warn(r, FAN_TREE_WARN_DEMOTED, text);
    }
    if (r->evicted)
        warn(r, FAN_TREE_WARN_SIGNATURES,
             "is called with more combinations of shapes, dtypes and keys than are kept, and drops "
             "the recordings of the least recently used one: pad to fewer shapes, and pass what "
             "changes as an array");
    return FAN_OK;
}

fan_status fan_tree_function_call(fan_tree_function *f, const fan_tree_args *args,
                                  fan_tree_result *out, fan_tree_report *report, fan_error *err)
{
    fan_tree *t = f->tree;
    fan_tree_run r = {.tree = t, .function = f, .args = args, .result = out};
    if (is_calling) {
        *report = (fan_tree_report){.outcome = FAN_TREE_EAGER, .rules = FAN_T(17), .node = -1};
        snprintf(report->reason, sizeof report->reason, "it is called by a function of %s tree",
                 fan__tree_is_mine(t) ? "the same" : "another");
        r.caller = fan_stream_current(t->device);
        fan_status status = run_eager(&r, err);
        fan_stream_drop(r.caller);
        return status;
    }
    memcpy(r.call_site, args->call_site, strnlen(args->call_site, sizeof r.call_site - 1));
    r.caller = fan_stream_current(t->device);
    if (!r.caller && t->device->backend->has_streams)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    bool locked = fan__tree_lock(t);
    is_calling = true;
    fan_status status = call_locked(&r, report, err);
    is_calling = false;
    fan__tree_unlock(t, locked);
    fan_stream_drop(r.caller);
    return status;
}
