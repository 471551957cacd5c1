/* The memory of simulated devices: addresses, allocated first-fit; and what operations access,
 * reported to the search and checked against happens-before. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "array/nditer.h"
#include "array/overlap.h"
#include "base/mem.h"
#include "base/search.h"
#include "device/memory.h"
#include "device/sim/machine.h"

#include <assert.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

static bool round_up(size_t bytes, size_t *out)
{
    size_t whole;
    if (bytes == 0)
        bytes = 1;
    if (__builtin_add_overflow(bytes, (size_t)FAN_ARENA_ALIGN - 1, &whole))
        return false;
    *out = whole - whole % FAN_ARENA_ALIGN;
    return true;
}

int fan_arena_init(fan_arena *a, size_t bytes, bool poison)
{
    memset(a, 0, sizeof *a);
    if (!round_up(bytes, &a->bytes))
        return -1;
    void *p = mmap(NULL, a->bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        a->bytes = 0;
        return -1;
    }
    a->base = (uintptr_t)p;
    a->poison = poison;
    return 0;
}

void fan_arena_fini(fan_arena *a)
{
    if (a->base)
        (void)munmap((void *)a->base, a->bytes);
    fan_free(a->blocks);
    memset(a, 0, sizeof *a);
}

static void arena_spoil(const fan_arena *a, uintptr_t lo, uintptr_t hi)
{
    if (a->poison)
        memset((void *)lo, FAN_POISON, hi - lo);
}

static uintptr_t arena_top(const fan_arena *a)
{
    if (a->n == 0)
        return a->base;
    return a->blocks[a->n - 1].hi;
}

fan_block *fan_arena_alloc(fan_arena *a, size_t bytes, bool *host)
{
    size_t need;
    *host = false;
    if (!round_up(bytes, &need))
        return NULL;
    if (need > a->bytes)
        return NULL;
    if (fan_grow((void **)&a->blocks, &a->cap, a->n + 1, sizeof *a->blocks)) {
        *host = true;
        return NULL;
    }
    size_t i = a->hint;
    size_t first = SIZE_MAX;
    for (; i < a->n; i++) {
        const fan_block *b = &a->blocks[i];
        if (b->used)
            continue;
        if (first == SIZE_MAX)
            first = i;
        if (b->hi - b->lo >= need)
            break;
    }
    if (i == a->n) {
        uintptr_t top = arena_top(a);
        uintptr_t lo = top;
        if (a->n > 0 && !a->blocks[a->n - 1].used) { /* free and too small: it grows */
            i = a->n - 1;
            lo = a->blocks[i].lo;
        }
        if (a->base + a->bytes - lo < need)
            return NULL;
        a->n = i + 1;
        a->blocks[i] = (fan_block){
            .lo = lo,
            .hi = lo + need,
        };
        arena_spoil(a, top, lo + need);
    }
    fan_block *b = &a->blocks[i];
    if (b->hi - b->lo > need) { /* the rest stays free */
        memmove(b + 1, b, (a->n - i) * sizeof *b);
        a->n++;
        b->hi = b->lo + need;
        b[1].lo = b->hi;
    }
    b->used = true;
    b->automatic = false;
    b->name = 0;
    a->hint = i + 1;
    if (first < i)
        a->hint = first;
    a->live++;
    a->in_use += need;
    return b;
}

/* arena_at: returns the index of the block that contains `address`; a->n if none. */
static size_t arena_at(const fan_arena *a, uintptr_t address)
{
    size_t i = fan_search_end(a->blocks, a->n, sizeof *a->blocks, offsetof(fan_block, hi), address);
    if (i < a->n && a->blocks[i].lo > address)
        return a->n;
    return i;
}

fan_block *fan_arena_find(fan_arena *a, uintptr_t address)
{
    size_t i = arena_at(a, address);
    if (i == a->n)
        return NULL;
    if (!a->blocks[i].used)
        return NULL;
    return &a->blocks[i];
}

void fan_arena_free(fan_arena *a, uintptr_t lo)
{
    size_t i = arena_at(a, lo);
    assert(i < a->n && a->blocks[i].used && a->blocks[i].lo == lo);
    if (i >= a->n || !a->blocks[i].used)
        return;
    fan_block *b = &a->blocks[i];
    arena_spoil(a, b->lo, b->hi);
    b->used = false;
    a->live--;
    a->in_use -= b->hi - b->lo;
    /* Merge free neighbours. */
    size_t from = i;
    size_t to = i;
    if (i > 0 && !a->blocks[i - 1].used)
        from--;
    if (i + 1 < a->n && !a->blocks[i + 1].used)
        to++;
    if (to > from) {
        a->blocks[from].hi = a->blocks[to].hi;
        memmove(&a->blocks[from + 1], &a->blocks[to + 1], (a->n - to - 1) * sizeof *a->blocks);
        a->n -= to - from;
    }
    if (from < a->hint)
        a->hint = from;
}

#ifdef FAN_TEST
void fan_arena_reset(fan_arena *a)
{
    /* All memory that was ever handed out becomes one free block: only memory beyond it is poisoned
     * on allocation. */
    uintptr_t hi = arena_top(a);
    a->n = 0;
    if (hi > a->base && a->poison) {
        arena_spoil(a, a->base, hi);
        a->blocks[a->n++] = (fan_block){
            .lo = a->base,
            .hi = hi,
        };
    }
    a->hint = 0;
    a->live = 0;
    a->in_use = 0;
}
#endif

static bool access_of_job(const fan_job *job, size_t i, const fan_array **a, bool *write)
{
    const fan_stats_out *stats = job->stats_out;
    const fan_sparse *sparse = job->sparse;
    size_t n = job->n;
    if (job->kind == FAN_JOB_UPLOAD) /* the checker does not track host memory */
        n = 0;
    *write = false;
    if (i < n) {
        *a = job->in[i].array;
        return true;
    }
    enum {
        BEFORE,
        WORDS,
        INDICES,
        VALUES,
        POINTERS,
        SUMMAND,
        OUT,
        OTHERS
    };
    const fan_array *others[OTHERS] = {[OUT] = job->out};
    if (stats) {
        others[BEFORE] = stats->before;
        others[WORDS] = stats->words;
    }
    if (job->kind == FAN_JOB_SCATTER) {
        others[INDICES] = sparse->indices;
        others[VALUES] = sparse->values;
        others[POINTERS] = sparse->pointers;
        others[SUMMAND] = job->out;
    }
    i -= n;
    if (i >= OTHERS)
        return false;
    *a = others[i];
    *write = i == WORDS || i == OUT;
    return true;
}

bool fan__work_access(const fan__work *work, size_t i, const fan_array **a, bool *write)
{
    const fan_sim_kernel *k = &work->kernel;
    if (work->njobs == 1)
        return access_of_job(work->jobs, i, a, write);
    *write = i >= k->nreads;
    if (i >= k->nreads + k->nwrites)
        return false;
    if (*write)
        *a = k->writes[i - k->nreads];
    else
        *a = k->reads[i];
    return true;
}

fan_block *fan__access_block(fan_sim *machine, const void *address)
{
    fan_sim_device_part *p = fan__access_part(machine, (uintptr_t)address);
    if (!p)
        return NULL;
    return fan_arena_find(&p->arena, (uintptr_t)address);
}

fan_block *fan__access_bytes(fan_sim *machine, const fan_array *a)
{
    if (!a || !a->size)
        return NULL;
    return fan__access_block(machine, a->data);
}

void fan__access_report(fan_sim *machine, const fan__work *work)
{
    const fan_array *a = NULL;
    bool write;
    if (!fan__sim_here.machine || !fan__sim_here.machine->has_chooser)
        return;
    for (size_t i = 0; fan__work_access(work, i, &a, &write); i++) {
        const fan_block *block = fan__access_bytes(machine, a);
        if (block)
            fan__sim_access(machine, block->name, write);
    }
}

/* ---- donated memory ---- */

/* access_is_donated: whether the operation accesses memory that was donated; *race gets the place.
 */
static bool access_is_donated(const fan_sim *machine, const fan_op *op, const fan_array *a,
                              bool write, fan_race *race)
{
    if (!a || !a->size)
        return false;
    fan_region accessed = fan_region_of(a);
    for (const fan_sim_donation *g = machine->donations; g; g = g->next) {
        fan_region donated = fan_region_of(g->what);
        fan_verdict verdict;
        int64_t lo;
        int64_t hi;
        /* A6: an undecided overlap counts as one. */
        if (fan_overlap(&donated, &accessed, 0, NULL, NULL, &verdict, NULL) == FAN_OK &&
            verdict == FAN_OVERLAP_DISJOINT)
            continue;
        fan_array_reach(a, &lo, &hi);
        if (race) {
            *race = (fan_race){
                .first = g->op,
                .second = *op,
                .first_writes = true,
                .second_writes = write,
                .donated = true,
                .lo = (uintptr_t)(a->data + lo),
                .hi = (uintptr_t)(a->data + hi),
            };
        }
        return true;
    }
    return false;
}

void fan__access_take_back(fan_sim *machine, fan_extent bytes)
{
    for (fan_sim_donation **at = &machine->donations, *g; (g = *at);) {
        if (fan_extents_may_overlap(fan_extent_of(g->what), bytes)) {
            *at = g->next;
            fan_free(g);
        } else {
            at = &g->next;
        }
    }
}

fan_status fan__sim_use(fan_device *d, const fan_array *a, const char *name, bool donate,
                        fan_error *err)
{
    fan_sim *machine = fan__sim_machine(d);
    fan_status status = FAN_OK;
    fan_sim_donation *g = NULL;
    char call_site[FAN__SITE];
    fan_race race;
    uint64_t op;
    if (!a->size)
        return FAN_OK;
    fan__sim_call_site(machine, call_site, sizeof call_site);
    fan__sim_lock(machine);
    const fan_block *b = fan__access_block(machine, a->data);
    if (!machine->checking || machine->dying || !b)
        goto done;
    fan__sim_access(machine, b->name, donate);
    if (!donate && !machine->donations)
        goto done;
    if (donate) {
        fan_array *one = (fan_array *)(uintptr_t)a;
        fan__packer p = {NULL, 0};
        fan__pack(&p, sizeof *g);
        (void)fan__pack_arrays(&p, &one, 1);
        g = fan_calloc(p.used);
        if (!g)
            FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for a donation"));
        p = (fan__packer){(char *)g, 0};
        fan__pack(&p, sizeof *g);
        g->what = fan__pack_arrays(&p, &one, 1)[0];
    }
    uint32_t host = fan__sim_lane(machine);
    FAN_GO(fan_race_check_begin(machine->race_check, host, host, name, call_site, &op, err));
    if (access_is_donated(machine, fan_race_check_op(machine->race_check, op), a, donate, &race)) {
        fan__sim_keep_race(machine, &race);
        status = fan__sim_raise(machine, &race, err);
    } else if (donate) {
        g->op = *fan_race_check_op(machine->race_check, op);
        g->next = machine->donations;
        machine->donations = g;
        g = NULL;
    }
done:
    fan__sim_unlock(machine);
    fan_free(g);
    return status;
}

void fan__sim_returned(fan_device *d, const fan_array *a)
{
    fan_sim *machine = fan__sim_machine(d);
    fan__sim_lock(machine);
    fan__access_take_back(machine, fan_extent_of(a));
    fan__sim_unlock(machine);
}

/* ---- judged ---- */

fan_status fan__access_judge(fan_sim *machine, uint32_t lane, const fan__work *work, fan_race *race,
                             fan_error *err)
{
    fan_race_check *check = machine->race_check;
    const fan_array *a = NULL;
    bool write;
    uint64_t op;
    fan_status worst = FAN_OK;
    if (!machine->checking)
        return FAN_OK;
    for (size_t i = 0; fan__work_access(work, i, &a, &write); i++) {
        if (a)
            fan_race_check_plan(check, a);
    }
    FAN_TRY(fan_race_check_begin(check, lane, fan__sim_lane(machine), work->name, work->call_site,
                                 &op, err));
    if (work->kept != KEPT_BY_NONE)
        fan_race_check_over(check, op, work->kept == KEPT_BY_HOST);
    for (size_t i = 0; fan__work_access(work, i, &a, &write); i++) {
        if (!a)
            continue;
        fan_race *first = worst == FAN_OK ? race : NULL;
        fan_status status = fan_race_check_access(check, op, a, write, first);
        if (status == FAN_ERR_NOMEM)
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
        if (status != FAN_OK)
            worst = status;
        if (worst != FAN_OK || !work->by_user)
            continue;
        if (access_is_donated(machine, fan_race_check_op(check, op), a, write, race))
            worst = FAN_ERR_RACE;
    }
    if (worst == FAN_ERR_RACE)
        fan__sim_keep_race(machine, race);
    return worst;
}
