/* Steps and calls of the functions of a tree.
 *
 * Sections: steps; signatures, which type a call's operands; the facts of a call; reasons and
 * warnings; the ways to carry a plan out; and the call: it gathers facts, call.h makes the plan,
 * and the plan is carried out. To follow a call, begin with fan_tree_function_call at the end. */
#define _POSIX_C_SOURCE 200809L /* strnlen */
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

bool fan_tree_in_step(const fan_tree *tree)
{
    return step_depth > 0 && step_tree == tree;
}

unsigned fan_tree_open_steps(fan_tree *tree)
{
    bool locked = fan__tree_lock(tree);
    unsigned depth = tree->depth;
    fan__tree_unlock(tree, locked);
    return depth;
}

static fan_status step_begin_locked(fan_tree *tree, fan_error *err)
{
    FAN_TRY(fan__tree_check_fork(tree, err));
    if (tree->closed)
        return fan_fail(err, FAN_ERR_STATE, "the graph tree is closed");
    if (tree->depth++ == 0)
        tree->steps++;
    step_tree = tree;
    step_depth++;
    return FAN_OK;
}

fan_status fan_tree_step_begin(fan_tree *tree, fan_error *err)
{
    if (step_depth && step_tree != tree) {
        return fan_fail(err, FAN_ERR_STATE,
                        "a step of another graph tree is open on this thread: end it first, "
                        "because outputs of one tree may end while the other still replays");
    }
    if (fan__tree_is_mine(tree)) {
        return fan_fail(
            err, FAN_ERR_STATE,
            "a step cannot begin in a function of its graph tree: the function runs inside a step");
    }
    if (is_calling) {
        return fan_fail(err, FAN_ERR_STATE,
                        "a step cannot begin in a function of another graph tree");
    }
    bool locked = fan__tree_lock(tree);
    fan_status status = step_begin_locked(tree, err);
    fan__tree_unlock(tree, locked);
    return status;
}

void fan_tree_step_end(fan_tree *tree, const char *call_site)
{
    if (step_tree == tree && --step_depth == 0)
        step_tree = NULL;
    bool locked = fan__tree_lock(tree); /* garbage collection inside a body may run this */
    if (!tree->fork_invalid && tree->depth && --tree->depth == 0)
        fan__tree_step_ended(tree, call_site);
    fan__tree_unlock(tree, locked);
}

/* ---- signatures ---- */

/* signature_words: writes into tree->words, of each operand, its dtype (-1: no array), its rank,
 * and shape and stride of each axis; *count: how many. */
static fan_status signature_words(fan_tree *tree, const fan_tree_args *args, size_t *count,
                                  fan_error *err)
{
    size_t n = 0;
    for (size_t i = 0; i < args->n; i++) {
        const fan_array *a = args->in[i];
        int ndim = 0;
        if (a)
            ndim = a->ndim;
        if (fan_grow((void **)&tree->words, &tree->words_cap, n + 2 + 2 * (size_t)ndim,
                     sizeof *tree->words))
            return fan__tree_no_memory(err);
        tree->words[n++] = a ? (int64_t)a->dtype : -1;
        tree->words[n++] = ndim;
        for (int k = 0; k < ndim; k++) {
            tree->words[n++] = a->shape[k];
            tree->words[n++] = a->strides[k];
        }
    }
    *count = n;
    return FAN_OK;
}

static bool signature_matches(const fan_tree_signature *signature, const fan_tree_run *run,
                              size_t nwords)
{
    const fan_tree_args *args = run->args;
    if (signature->key != args->key || signature->n != args->n || signature->nwords != nwords)
        return false;
    return !nwords ||
           memcmp(signature->words, run->tree->words, nwords * sizeof *signature->words) == 0;
}

/* signature_new: the first of the function's list. If there are too many, the last one goes. */
static fan_status signature_new(fan_tree_run *run, size_t nwords, fan_error *err)
{
    fan_tree_function *function = run->function;
    size_t n = run->args->n;
    size_t bytes = nwords * sizeof(int64_t);
    fan_tree_signature *signature =
        fan_calloc(sizeof *signature + bytes + n * sizeof *signature->facts);
    if (!signature)
        return fan__tree_no_memory(err);
    signature->facts = (fan_tree_operand_facts *)(signature->words + nwords);
    if (nwords)
        memcpy(signature->words, run->tree->words, bytes);
    signature->function = function;
    signature->n = n;
    signature->nwords = nwords;
    signature->key = run->args->key;
    signature->warmings = run->tree->warmings;
    signature->next = function->signatures;
    function->signatures = signature;
    function->nsignatures++;
    function->kept++;
    run->signature = signature;
    run->evicted = function->nsignatures > FAN_TREE_SIGNATURES;
    if (run->evicted)
        fan__tree_evict(function);
    return FAN_OK;
}

/* signature_find: the one of a call's operands, made if needed; it moves to the front. */
static fan_status signature_find(fan_tree_run *run, fan_error *err)
{
    fan_tree_signature **first = &run->function->signatures;
    size_t nwords = 0;
    FAN_TRY(signature_words(run->tree, run->args, &nwords, err));
    fan__tree_evict_old(run->function);
    fan_tree_signature **at = first;
    while (*at && !signature_matches(*at, run, nwords))
        at = &(*at)->next;
    fan_tree_signature *signature = *at;
    if (!signature)
        return signature_new(run, nwords, err);
    *at = signature->next;
    signature->next = *first;
    *first = signature;
    run->signature = signature;
    return FAN_OK;
}

/* ---- facts ---- */

/* placement_of: the placement of operand i, `a`; `ours`: it lies in a block of the tree. */
static fan_tree_placement placement_of(const fan_tree_run *run, size_t i, const fan_array *a,
                                       bool ours)
{
    fan_tree_role role = fan__tree_role(run->function, i);
    if (!a)
        return FAN_PLACE_NONE;
    if (role == FAN_TREE_ACCUMULATE)
        return FAN_PLACE_ADD;
    if (run->signature->facts[i].demoted || role == FAN_TREE_COPY)
        return FAN_PLACE_COPY;
    if (ours)
        return FAN_PLACE_POOL;
    if (role == FAN_TREE_STATIC)
        return FAN_PLACE_STATIC;
    return FAN_PLACE_COPY;
}

/* place_operands: the placement and address of each operand. A replay writes without a check, so an
 * operand that is written must be writable here. */
static fan_status place_operands(fan_tree_run *run, fan_error *err)
{
    for (size_t i = 0; i < run->args->n; i++) {
        const fan_array *a = run->args->in[i];
        fan_tree_operand *operand = &run->operands[i];
        bool ours = a && fan__tree_block_of(run->tree, a);
        fan_tree_placement placement = placement_of(run, i, a, ours);
        *operand = (fan_tree_operand){.placement = placement};
        if (placement <= FAN_PLACE_COPY)
            continue;
        bool added = placement == FAN_PLACE_ADD;
        if (added && ours) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s: operand %zu is added into (accumulate), but it is memory of the "
                            "graph tree, which the end of the step takes back: pass memory of your "
                            "own",
                            run->function->name, i);
        }
        if (!a->writable && (added || run->signature->facts[i].written)) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s: operand %zu is read-only, and the function writes into it: pass a "
                            "writable array",
                            run->function->name, i);
        }
        operand->data = a->data;
    }
    return FAN_OK;
}

/* writes_copied: the first operand that the function is known to write and that this call copies;
 * args->n: none. */
static size_t writes_copied(const fan_tree_run *run)
{
    for (size_t i = 0; i < run->args->n; i++) {
        if (run->signature->facts[i].written && run->operands[i].placement == FAN_PLACE_COPY)
            return i;
    }
    return run->args->n;
}

/* fit_of: whether a recording fits; *which: the operand that lies elsewhere. */
static fan_tree_fit fit_of(const fan_tree_run *run, const fan_tree_node *node, size_t *which)
{
    *which = 0;
    for (size_t i = 0; i < node->n; i++) {
        const fan_tree_operand *now = &run->operands[i];
        const fan_tree_operand *then = &node->operands[i];
        if (now->placement == then->placement && now->data == then->data)
            continue;
        *which = i;
        if (now->placement == FAN_PLACE_POOL || then->placement == FAN_PLACE_POOL)
            return FAN_TREE_FIT_OPERAND;
        return FAN_TREE_FIT_STATIC;
    }
    for (size_t k = 0; k < node->ndead; k++) {
        if (fan__tree_block_lives(node->dead[k]) && !FAN_FAULT(TREE_ALIVE_FITS))
            return FAN_TREE_FIT_ALIVE;
    }
    return FAN_TREE_FIT_FITS;
}

static fan_tree_found found_at(const fan_tree_run *run, fan_tree_node *at)
{
    const fan_tree_signature *signature = run->signature;
    const fan_tree_children *place = fan__tree_place(at, signature);
    fan_tree_found found = {.facts.fit = FAN_TREE_FIT_NEVER};
    fan_tree_place *facts = &found.facts;
    facts->writes = writes_copied(run) < run->args->n;
    facts->known = signature->known && (!facts->writes || signature->warned_writes);
    if (!place)
        return found;
    for (size_t i = 0; i < place->n; i++) {
        size_t which;
        fan_tree_fit fit = fit_of(run, place->children[i], &which);
        if (facts->fit == FAN_TREE_FIT_ALIVE && fan_tree_fit_moved(fit))
            continue;
        facts->fit = fit;
        found.child = place->children[i];
        found.which = which;
        if (fit == FAN_TREE_FIT_FITS)
            return found;
    }
    if (!fan_tree_fit_moved(facts->fit))
        return found;
    const fan_tree_operand_facts *moved = &signature->facts[found.which];
    bool added = run->operands[found.which].placement == FAN_PLACE_ADD;
    facts->over_limit = place->moved >= run->tree->options.limit;
    /* Foreign kernels may write an operand unseen, so devices that can record them do not
     * demote. */
    facts->can_demote = run->tree->recorder->accesses_all;
    if (moved->written || moved->shown || added)
        facts->can_demote = false;
    return found;
}

/* path_repeats: whether this path has the function twice after the same function. */
static bool path_repeats(const fan_tree_run *run)
{
    const fan_tree *tree = run->tree;
    if (tree->path != FAN_TREE_WARMUP && tree->path != FAN_TREE_RECORDING)
        return false;
    const fan_tree_function *last = tree->current->signature->function;
    unsigned times = 0;
    for (const fan_tree_node *node = tree->current; node->parent; node = node->parent) {
        const fan_tree_signature *before = node->parent->signature;
        bool same = before && before->function == last;
        times += same && node->signature->function == run->function;
    }
    return times >= 2;
}

/* path_is_dead: whether the path has outputs' memory, and none of it is alive. */
static bool path_is_dead(const fan_tree *tree)
{
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *block; (block = fan__tree_next(&at));) {
        if (fan__tree_block_lives(block))
            return false;
    }
    return tree->path != FAN_TREE_NONE;
}

/* decide: gathers the facts and makes the plan; run->found: at the place where it continues. */
static void decide(fan_tree_run *run)
{
    fan_tree *tree = run->tree;
    fan_tree_signature *signature = run->signature;
    fan_tree_found here = found_at(run, tree->current);
    fan_tree_found root = here;
    if (tree->current != &tree->root)
        root = found_at(run, &tree->root);
    bool warned = run->function->warned & FAN_TREE_WARN_REPEATS;
    fan_tree_call call = {.path = tree->path,
                          .new_step = tree->path_step != tree->steps,
                          .all_dead = path_is_dead(tree),
                          .warm = signature->warm,
                          .strict = tree->options.strict,
                          .repeats = !warned && path_repeats(run),
                          .warned = warned,
                          .full = run->function->recordings >= FAN_TREE_RECORDINGS,
                          .here = here.facts,
                          .root = root.facts};
    run->plan = fan_tree_decide(&call);
    run->found = here;
    if (run->plan.end_path)
        run->found = root;
    signature->known = true;
    signature->warned_writes |= run->plan.warn_writes;
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

/* report_moved: why a call runs eagerly: an operand moved more often than its limit. */
static void report_moved(const fan_tree_run *run, fan_tree_report *report)
{
    const fan_tree_operand_facts *facts = &run->signature->facts[run->found.which];
    const char *why = "foreign kernels may write into it";
    const char *advice = ", or give the operand the role copy";
    if (facts->written) {
        why = "the function writes into it";
        advice = "";
    }
    if (facts->shown) {
        why = "the function returns a view of it";
        advice = "";
    }
    snprintf(report->reason, sizeof report->reason,
             "operand %zu lay elsewhere more than %u times, and %s, so it cannot be copied: keep "
             "the array where it is%s",
             run->found.which, run->tree->options.limit, why, advice);
}

static void report_eager(const fan_tree_run *run, fan_tree_report *report)
{
    if (report->rules & FAN_T(6)) {
        snprintf(report->reason, sizeof report->reason,
                 "it writes into operand %zu, which is copied: give it the role static or "
                 "accumulate",
                 writes_copied(run));
    } else if (run->function->recordings >= FAN_TREE_RECORDINGS) {
        snprintf(report->reason, sizeof report->reason,
                 "it has %d recordings, and none fits: call functions in the same order in each "
                 "step, and do not let steps of several threads overlap (a tree for each thread)",
                 FAN_TREE_RECORDINGS);
    } else
        report_moved(run, report);
}

static void report_recording(const fan_tree_run *run, fan_tree_report *report)
{
    const fan_tree_found *found = &run->found;
    const char *demoted = "";
    if (run->plan.demote)
        demoted = "; it keeps moving, and is copied from now on";
    fan_append(report->reason, sizeof report->reason, "%s", fan_tree_fit_words(run->plan.why));
    if (fan_tree_fit_moved(run->plan.why)) {
        fan_append(report->reason, sizeof report->reason, ": operand %zu at %p, not %p%s",
                   found->which, (void *)run->args->in[found->which]->data,
                   found->child->operands[found->which].data, demoted);
    }
}

/* report_plan: what the call does, and why. */
static void report_plan(const fan_tree_run *run)
{
    fan_tree_report *report = run->report;
    const fan_tree_plan *plan = &run->plan;
    *report =
        (fan_tree_report){.outcome = plan->outcome, .rules = plan->rules | FAN_T(17), .node = -1};
    if (plan->outcome == FAN_TREE_EAGER)
        report_eager(run, report);
    else if (plan->outcome == FAN_TREE_WARM)
        fan_append(report->reason, sizeof report->reason, "%s", reason_of_warm_up(plan->rules));
    else if (plan->outcome == FAN_TREE_RECORD)
        report_recording(run, report);
}

/* warn: warns the function's owner, once for each kind of warning (0: each time). */
static void warn(const fan_tree_run *run, unsigned warning, const char *text)
{
    const fan_tree_body *body = &run->args->body;
    fan_tree_function *function = run->function;
    char message[512];
    if (!body->warn || function->warned & warning)
        return;
    function->warned |= warning;
    snprintf(message, sizeof message, "%s %s", function->name, text);
    body->warn(body->ctx, message);
}

static void warn_eager(const fan_tree_run *run, unsigned warning)
{
    char text[FAN_TREE_REASON + 64];
    snprintf(text, sizeof text, "runs without a recording: %s", run->report->reason);
    warn(run, warning, text);
}

/* warn_of_plan: after the call: the warnings that the plan names. */
static void warn_of_plan(const fan_tree_run *run)
{
    const fan_tree_plan *plan = &run->plan;
    if (plan->warn_writes)
        warn_eager(run, 0);
    else if (plan->outcome == FAN_TREE_EAGER && run->report->rules & FAN_T(7)) {
        bool full = run->function->recordings >= FAN_TREE_RECORDINGS;
        warn_eager(run, full ? FAN_TREE_WARN_RECORDINGS : FAN_TREE_WARN_MOVES);
    }
    if (plan->warn_repeats) {
        warn(run, FAN_TREE_WARN_REPEATS,
             "runs again and again in one step while outputs of earlier calls are alive, so each "
             "call is recorded anew: end the step, delete outputs, or copy them with keep=True");
    }
    if (plan->demote) {
        char text[FAN_TREE_REASON];
        snprintf(text, sizeof text,
                 "copies operand %zu from now on, which lay elsewhere more than %u times: keep the "
                 "array where it is, or give the operand the role copy",
                 run->found.which, run->tree->options.limit);
        warn(run, FAN_TREE_WARN_DEMOTED, text);
    }
    if (run->evicted) {
        warn(run, FAN_TREE_WARN_SIGNATURES,
             "is called with more combinations of shapes, dtypes and keys than are kept, and drops "
             "the recordings of the least recently used one: pad to fewer shapes, and pass what "
             "changes as an array");
    }
}

/* ---- carry out ---- */

static fan_status run_eager(const fan_tree_run *run, fan_error *err)
{
    const fan_tree_args *args = run->args;
    FAN_TRY(args->body.run(args->body.ctx, args->in, run->result, err));
    return fan__tree_keep_operands(run, err);
}

/* run_eager_because: eagerly, for a reason that is no rule's. */
static fan_status run_eager_because(const fan_tree_run *run, const char *reason, fan_error *err)
{
    fan_tree_report *report = run->report;
    *report = (fan_tree_report){.outcome = FAN_TREE_EAGER, .rules = FAN_T(17), .node = -1};
    fan_append(report->reason, sizeof report->reason, "%s", reason);
    return run_eager(run, err);
}

/* operands_used: after an eager call: the caller's stream is recorded as a user of the operands,
 * which may be dropped as soon as the call has ended. */
static fan_status operands_used(const fan_tree_run *run, fan_error *err)
{
    if (!run->caller)
        return FAN_OK;
    return fan_memory_record_stream_all(run->args->in, run->args->n, run->caller, err);
}

/* run_without_room: eagerly, because the tree's memory ran out too often. */
static fan_status run_without_room(fan_tree_run *run, fan_error *err)
{
    char reason[FAN_TREE_REASON];
    snprintf(reason, sizeof reason,
             "the tree's memory ran out in %u of its calls: give the tree more (memory=), or "
             "delete outputs earlier",
             run->signature->full);
    run->tree->stats.eager++;
    FAN_TRY(run_eager_because(run, reason, err));
    FAN_TRY(operands_used(run, err));
    warn_eager(run, FAN_TREE_WARN_ROOM);
    return FAN_OK;
}

/* run_few: eagerly, because its recording had too few kernels. */
static fan_status run_few(const fan_tree_run *run, fan_error *err)
{
    run->tree->stats.eager++;
    FAN_TRY(run_eager_because(run, "", err));
    fan__tree_report_few(run);
    return operands_used(run, err);
}

/* first_extent: of the first axis of the first array among the operands; *which: the operand. -1:
 * there is none. */
static int64_t first_extent(const fan_tree_args *args, size_t *which)
{
    for (size_t i = 0; i < args->n; i++) {
        const fan_array *a = args->in[i];
        *which = i;
        if (a)
            return a->ndim ? a->shape[0] : -1;
    }
    return -1;
}

/* is_recorded_size: whether only= names this call's size, or is not given; `reason` has
 * FAN_TREE_REASON bytes. */
static bool is_recorded_size(const fan_tree_run *run, char *reason)
{
    const fan_tree_function *function = run->function;
    size_t which = 0;
    int64_t extent = first_extent(run->args, &which);
    if (!function->nonly)
        return true;
    for (size_t i = 0; i < function->nonly; i++) {
        if (function->only[i] == extent)
            return true;
    }
    if (extent < 0)
        snprintf(reason, FAN_TREE_REASON, "only= names sizes, and no operand has a first axis");
    else {
        snprintf(reason, FAN_TREE_REASON,
                 "the first axis of operand %zu has the size %lld, which only= does not name",
                 which, (long long)extent);
    }
    return false;
}

/* replay: of a recording, verified if it is one of the first. */
static fan_status replay(fan_tree_run *run, fan_tree_node *node, fan_error *err)
{
    fan_tree *tree = run->tree;
    if (node->verified < tree->options.verify)
        FAN_TRY(fan__tree_verify(run, node, err));
    else
        FAN_TRY(fan__tree_replay(run, node, err));
    run->report->node = node->number;
    tree->current = node;
    tree->path = FAN_TREE_EXECUTION;
    tree->stats.replayed++;
    return FAN_OK;
}

/* make_recording: T16; a function that turns out to write into a copied operand runs eagerly. */
static fan_status make_recording(fan_tree_run *run, fan_error *err)
{
    fan_tree *tree = run->tree;
    if (run->plan.demote) {
        run->signature->facts[run->found.which].demoted = true;
        FAN_TRY(place_operands(run, err));
        fan_tree_found again = found_at(run, tree->current);
        if (again.facts.fit == FAN_TREE_FIT_FITS) {
            run->report->outcome = FAN_TREE_REPLAY;
            return replay(run, again.child, err);
        }
    }
    if (run->plan.why == FAN_TREE_FIT_ALIVE) {
        run->keep_dead =
            fan__tree_place(tree->current, run->signature)->alive >= tree->options.limit;
    }
    FAN_TRY(fan__tree_record(run, err));
    if (!run->wrote)
        return FAN_OK;
    run->signature->known = false; /* so that its owner is warned */
    decide(run);
    report_plan(run);
    tree->stats.eager++;
    FAN_TRY(run_eager(run, err));
    return operands_used(run, err);
}

static fan_status run_plan(fan_tree_run *run, fan_error *err)
{
    const fan_tree_found *found = &run->found;
    switch (run->plan.outcome) {
    case FAN_TREE_FAIL:
        return fan_fail(err, FAN_ERR_VALUE,
                        "%s: operand %zu is static, and lies at %p; it was recorded at %p (strict)",
                        run->function->name, found->which,
                        (void *)run->args->in[found->which]->data,
                        found->child->operands[found->which].data);
    case FAN_TREE_EAGER:
        run->tree->stats.eager++;
        FAN_TRY(run_eager(run, err));
        return operands_used(run, err);
    case FAN_TREE_WARM:
        return fan__tree_warm_up(run, err);
    case FAN_TREE_RECORD:
        return make_recording(run, err);
    case FAN_TREE_REPLAY:
        return replay(run, found->child, err);
    }
    return FAN_OK;
}

/* ---- a call ---- */

static fan_status check_call(const fan_tree_run *run, fan_error *err)
{
    const fan_tree_function *function = run->function;
    const fan_tree_args *args = run->args;
    FAN_TRY(fan__tree_check_fork(run->tree, err));
    if (run->tree->closed)
        return fan_fail(err, FAN_ERR_STATE, "%s: its graph tree is closed", function->name);
    if (run->tree->depth == 0) {
        return fan_fail(err, FAN_ERR_STATE,
                        "%s is called outside of a step, which ends the life of its outputs: use "
                        "`with tree.step():` around the calls of one iteration",
                        function->name);
    }
    if (function->nroles && function->nroles != args->n) {
        return fan_fail(err, FAN_ERR_TYPE, "%s: got %zu operand%s, but roles= has %zu",
                        function->name, args->n, FAN_PLURAL(args->n), function->nroles);
    }
    for (size_t i = 0; i < args->n; i++) {
        const fan_array *a = args->in[i];
        if (!a || !fan_storage_ended(a->storage))
            continue;
        fan_error why;
        (void)fan_storage_check(a->storage, &why);
        return fan_fail(err, FAN_ERR_STATE, "%s: operand %zu: %s", function->name, i, why.text);
    }
    return FAN_OK;
}

/* call_locked: with the lock. */
static fan_status call_locked(fan_tree_run *run, fan_error *err)
{
    fan_tree *tree = run->tree;
    const fan_tree_plan *plan = &run->plan;
    uint64_t capture = 0;
    FAN_TRY(check_call(run, err));
    if (run->caller)
        FAN_TRY(fan_stream_capture(run->caller, &capture, err));
    if (capture) {
        tree->stats.eager++;
        return run_eager_because(run, "the caller's current stream is captured", err);
    }
    char reason[FAN_TREE_REASON];
    if (!is_recorded_size(run, reason)) {
        tree->stats.eager++;
        FAN_TRY(run_eager_because(run, reason, err));
        return operands_used(run, err);
    }
    FAN_TRY(signature_find(run, err));
    if (run->signature->few)
        return run_few(run, err);
    if (fan_grow((void **)&tree->operands, &tree->operands_cap, run->args->n + 1,
                 sizeof *tree->operands))
        return fan__tree_no_memory(err);
    run->operands = tree->operands;
    FAN_TRY(place_operands(run, err));
    decide(run);
    report_plan(run);
    if (plan->end_path) {
        FAN_TRY(
            fan__tree_enter(run, err)); /* the memory's last user is mostly the caller's stream */
        FAN_TRY(fan__tree_end_path(tree, run->caller, err));
    }
    if (tree->current == &tree->root)
        tree->path_step = tree->steps;
    bool runs_body = plan->outcome == FAN_TREE_WARM || plan->outcome == FAN_TREE_RECORD;
    if (runs_body && run->signature->full > tree->options.limit)
        return run_without_room(run, err);
    FAN_TRY(run_plan(run, err));
    warn_of_plan(run);
    return FAN_OK;
}

static void count_call(const fan_tree_run *run)
{
    fan_tree_function_stats *stats = &run->function->stats;
    unsigned long long *const counts[] = {[FAN_TREE_WARM] = &stats->warmed,
                                          [FAN_TREE_RECORD] = &stats->recorded,
                                          [FAN_TREE_REPLAY] = &stats->replayed,
                                          [FAN_TREE_EAGER] = &stats->eager};
    ++*counts[run->report->outcome];
}

fan_status fan_tree_function_call(fan_tree_function *function, const fan_tree_args *args,
                                  fan_tree_result *out, fan_tree_report *report, fan_error *err)
{
    fan_tree *tree = function->tree;
    fan_tree_run run = {.tree = tree,
                        .function = function,
                        .args = args,
                        .result = out,
                        .report = report,
                        .caller = fan_stream_current(tree->device)};
    fan_status status;
    if (is_calling) {
        const char *reason = "it is called by a function of another tree";
        if (fan__tree_is_mine(tree))
            reason = "it is called by a function of the same tree";
        status = run_eager_because(&run, reason, err);
        fan_stream_drop(run.caller);
        return status;
    }
    memcpy(run.call_site, args->call_site, strnlen(args->call_site, sizeof run.call_site - 1));
    if (!run.caller && tree->device->backend->has_streams)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    bool locked = fan__tree_lock(tree);
    is_calling = true;
    status = call_locked(&run, err);
    is_calling = false;
    if (status == FAN_OK)
        count_call(&run);
    fan__tree_unlock(tree, locked);
    fan_stream_drop(run.caller);
    return status;
}
