/* overlap: whether two regions overlap, or one itself (overlap.h). In this order: combs; two
 * regions; one region and itself.
 *
 * Do two arrays share a byte? An essay.
 *
 * The bytes of an array are sums: an address, an integer multiple of each stride, and an offset
 * within the element. Two arrays share a byte if a sum of one equals a sum of the other. Count the
 * second array backwards, from its last byte, and every sign is positive: with the unknowns of both
 * arrays side by side it is one equation,
 *
 *    c0 x0 + c1 x1 + .. = r,    0 <= xi <= ui,
 *
 * in which both offsets within an element make one more term whose step is 1. To solve such an
 * equation is NP-hard in general, and easy for the slices that occur in practice. So, cheap steps
 * first, and every step exact:
 *
 * 1. Comb. Axes of extent 1 or stride 0 add no bytes; a negative stride is a positive one from the
 * other end. In order of steps, an axis whose step is at most the tooth so far lengthens the tooth;
 * an axis whose step is a multiple of the step below, and no larger than that one's reach,
 * lengthens that one. So a dense array is one tooth, and rows of a matrix are one axis, however
 * many axes they had.
 *
 * 2. Extents. If the first byte of one is after the last of the other, they are disjoint.
 *
 * 3. Grid. Let g be the common divisor of all steps but the 1. The steps make multiples of g, so
 * the offsets within the elements must make r's remainder: if that exceeds their range, the arrays
 * are disjoint: columns of a matrix, heads of a projection, every other element. Otherwise all is
 * divided by g.
 *
 * 4. Whole. If the terms up to some index reach all multiples of their common divisor up to the
 * largest sum, no search is needed: r is reached if it is a multiple and not too large. The next
 * term preserves that if its step keeps the divisor and is at most the reach below it plus one
 * divisor. Views of one dense parent are nearly always whole.
 *
 * 5. Search. Else try the term with the largest step: each x that leaves a remainder within the
 * others' reach and divisible by their common divisor; those are one class modulo a number, and are
 * stepped through. Slices in practice need few tries; some equations need exponentially many.
 *
 * 6. Table. So after QUICK tries tabulate the sums, a bit for each number up to r: for each term
 * and each power of two in its bound, shift the table and unite it with itself. That takes r / 8
 * bytes and r / 64 steps per power: exact, and no worse for malicious steps. A sum is reached if
 * and only if its complement is, so r is at most half of the total. The solution is read from the
 * largest term down: for each, the table of the smaller ones shows which x leaves a sum that they
 * reach.
 *
 * 7. Unknown. Beyond the budget the search makes LONG more tries; then the verdict is "unknown".
 * The budget covers memory and work: all tables that the witness needs are counted beforehand, and
 * the tries; many axes with long steps could otherwise take a minute within any memory. Questions
 * of one call share their work; once it is used up, each has FEW tries.
 *
 * An array overlaps itself if two different elements share a byte. The difference of their indices
 * is not zero; take the axis with the largest step on which it is not, and let it be positive
 * there. For each axis that is one equation of the same kind: no axis above, at least one step
 * along this one, anything from -u to u along those below. If every step is longer than the reach
 * of all smaller ones, step 2 refutes each of these equations at once.
 *
 * Numbers. A comb is less than 2^61 bytes long, so sums of two, doubled, stay below 2^63; products
 * of remainders are computed in 128 bits. */
#include "array/overlap.h"

#include "array/convert.h"
#include "array/equation.h"
#include "base/mem.h"

#include <assert.h>
#include <string.h>

#define FARTHEST (UINT64_C(1) << 61)

fan_region fan_region_of(const fan_array *a)
{
    return (fan_region){(uint64_t)(uintptr_t)a->data, fan_dtype_step(a->dtype), a->shape,
                        a->strides, a->ndim};
}

/* ---- combs ---- */

/* A moving axis: step, count, and its number in the region. */
typedef struct moving {
    int64_t step, count;
    int axis;
} moving;

/* The origin of a comb's axes: group 0 is the tooth, group k the comb's axis k - 1; the group's
 * members are sorted[end[k - 1]] to sorted[end[k] - 1]. */
typedef struct origin {
    moving sorted[FAN_MAX_NDIM];
    int end[FAN_MAX_NDIM + 1];
} origin;

static bool is_empty(const fan_region *r)
{
    bool empty = r->itemsize <= 0;
    for (int i = 0; i < r->ndim; i++)
        empty |= r->shape[i] <= 0;
    return empty;
}

/* comb_measure: collects the moving axes, smallest step first, and the comb's first and last byte.
 * Returns their number. */
static int comb_measure(const fan_region *r, moving *sorted, fan_comb *c)
{
    uint64_t lo = r->data;
    uint64_t reach = (uint64_t)r->itemsize - 1;
    uint64_t last, way;
    bool far = false;
    int n = 0;
    for (int i = 0; i < r->ndim; i++) {
        bool backward = r->strides[i] < 0;
        uint64_t step = (uint64_t)r->strides[i];
        int at = n;
        if (r->shape[i] == 1 || step == 0)
            continue;
        if (backward)
            step = 0 - step;
        far |= __builtin_mul_overflow(step, (uint64_t)(r->shape[i] - 1), &way);
        far |= __builtin_add_overflow(reach, way, &reach);
        if (backward)
            far |= __builtin_sub_overflow(lo, way, &lo);
        for (; at > 0 && (uint64_t)sorted[at - 1].step > step; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = (moving){(int64_t)step, r->shape[i], i};
        n++;
    }
    far |= __builtin_add_overflow(lo, reach, &last);
    far |= reach >= FARTHEST;
    c->far = far;
    c->lo = lo;
    c->last = last;
    if (far) {
        c->lo = 0;
        c->last = UINT64_MAX;
    }
    return n;
}

/* comb_join: joins the moving axes into a comb's; `end` (may be NULL) receives the origin of each.
 */
static void comb_join(const fan_region *r, const moving *sorted, int n, fan_axis *axes,
                      fan_comb *out, int *end)
{
    int64_t tooth = r->itemsize;
    int i = 0;
    int m = 0;
    for (; i < n && sorted[i].step <= tooth; i++)
        tooth += sorted[i].step * (sorted[i].count - 1);
    if (end)
        end[0] = i;
    for (; i < n; i++) {
        int64_t step = sorted[i].step;
        int64_t count = sorted[i].count;
        fan_axis *top = NULL;
        int64_t times = 0;
        if (m) {
            top = &axes[m - 1];
            times = equation_quotient(step, top->step);
        }
        if (top && times * top->step == step && times <= top->count)
            top->count += times * (count - 1);
        else
            axes[m++] = (fan_axis){step, count};
        if (end)
            end[m] = i + 1;
    }
    out->tooth = tooth;
    out->n = m;
}

static void comb_of(const fan_region *r, fan_axis *axes, fan_comb *out, moving *sorted, int *end)
{
    *out = (fan_comb){.axes = axes, .empty = is_empty(r)};
    if (out->empty)
        return;
    int n = comb_measure(r, sorted, out);
    if (!out->far)
        comb_join(r, sorted, n, axes, out, end);
}

void fan_comb_of(const fan_region *r, fan_axis *axes, fan_comb *out)
{
    FAN_UNINITIALIZED moving sorted[FAN_MAX_NDIM];
    comb_of(r, axes, out, sorted, NULL);
}

/* A region with its comb and where that came from. */
typedef struct side {
    const fan_region *region;
    fan_comb comb;
    fan_axis axes[FAN_MAX_NDIM];
    origin origin;
    int64_t *index; /* NULL, or receives an element */
} side;

static void side_begin(side *s, const fan_region *region, int64_t *index)
{
    s->region = region;
    s->index = index;
    comb_of(region, s->axes, &s->comb, s->origin.sorted, s->origin.end);
}

/* side_unwind: finds the element that holds the byte at `way` from the start of group k's steps:
 * writes the indices of its axes, counted from their low ends. Returns the remaining offset within
 * the element. */
static int64_t side_unwind(const side *s, int k, int64_t way)
{
    int first = 0;
    if (k)
        first = s->origin.end[k - 1];
    for (int i = s->origin.end[k] - 1; i >= first; i--) {
        const moving *m = &s->origin.sorted[i];
        int64_t x = fan_min(equation_quotient(way, m->step), m->count - 1);
        s->index[m->axis] = x;
        way -= x * m->step;
    }
    return way;
}

/* side_element: computes the element at which the comb's axes have the values x and which contains
 * offset `t` of the tooth. */
static void side_element(const side *s, const int64_t *x, int64_t t)
{
    const fan_region *r = s->region;
    int64_t left = 0;
    memset(s->index, 0, (size_t)r->ndim * sizeof *s->index);
    for (int k = 0; k < s->comb.n; k++) {
        left = side_unwind(s, k + 1, x[k] * s->axes[k].step);
        assert(left == 0);
    }
    left = side_unwind(s, 0, t);
    assert(left < r->itemsize);
    (void)left;
    for (int i = 0; i < r->ndim; i++) {
        if (r->strides[i] < 0)
            s->index[i] = r->shape[i] - 1 - s->index[i];
    }
}

/* ---- two regions ---- */

/* quick_verdict: steps 1 and 2; true if that decided it. */
static bool quick_verdict(const fan_comb *a, const fan_comb *b, fan_verdict *out)
{
    *out = FAN_OVERLAP_DISJOINT;
    if (!fan_extents_may_overlap(fan_comb_extent(a), fan_comb_extent(b)))
        return true;
    *out = FAN_OVERLAP_FAR;
    if (a->far || b->far)
        return true;
    *out = FAN_OVERLAP_YES;
    return a->n == 0 && b->n == 0;
}

/* Counts the second region from its last byte. */
static fan_status solve_pair(equation *e, const fan_comb *a, const fan_comb *b, fan_effort *left,
                             fan_verdict *out, fan_error *err)
{
    FAN_UNINITIALIZED term parts[PARTS];
    int n = a->n + b->n;
    int i = 0;
    int j = 0;
    /* Merges the axes of both as parts, ascending. */
    for (int k = 0; k < n; k++) {
        bool second = i == a->n || (j < b->n && b->axes[j].step < a->axes[i].step);
        const fan_axis *next;
        if (second)
            next = &b->axes[j++];
        else
            next = &a->axes[i++];
        parts[k] = (term){next->step, next->count - 1};
    }
    *out = FAN_OVERLAP_DISJOINT;
    if (!fan__equation_pose(e, parts, n, a->tooth + b->tooth - 2, (int64_t)(b->last - a->lo)))
        return FAN_OK;
    return fan__equation_solve(e, left, out, err);
}

fan_status fan_comb_overlap(const fan_comb *a, const fan_comb *b, fan_effort *left,
                            fan_verdict *out, fan_error *err)
{
    FAN_UNINITIALIZED equation e;
    if (quick_verdict(a, b, out))
        return FAN_OK;
    return solve_pair(&e, a, b, left, out, err);
}

/* first_elements: computes the elements of two combs of one tooth each, which hold the first byte
 * of both. */
static void first_elements(const side *a, const side *b)
{
    uint64_t lo = fan_umax(a->comb.lo, b->comb.lo);
    side_element(a, NULL, (int64_t)(lo - a->comb.lo));
    side_element(b, NULL, (int64_t)(lo - b->comb.lo));
}

/* solved_elements: computes an element of each from the solution. The second, counted from its end,
 * first: so the indices of both are small. */
static void solved_elements(equation *e, const side *a, const side *b)
{
    FAN_UNINITIALIZED int64_t x[FAN_MAX_NDIM];
    int64_t last = b->comb.tooth - 1;
    int64_t places = fan__equation_given_places(e, a->comb.tooth - 1 + last);
    int64_t back = fan_min(places, last);
    for (int k = 0; k < b->comb.n; k++) {
        int64_t most = b->axes[k].count - 1;
        x[k] = most - fan__equation_given(e, b->axes[k].step, most);
    }
    side_element(b, x, last - back);
    for (int k = 0; k < a->comb.n; k++)
        x[k] = fan__equation_given(e, a->axes[k].step, a->axes[k].count - 1);
    side_element(a, x, places - back);
}

fan_status fan_overlap(const fan_region *a, const fan_region *b, uint64_t budget, int64_t *at_a,
                       int64_t *at_b, fan_verdict *out, fan_error *err)
{
    FAN_UNINITIALIZED side one, two;
    FAN_UNINITIALIZED equation e;
    fan_effort left = fan_effort_of(budget);
    bool wanted = at_a && at_b;
    side_begin(&one, a, at_a);
    side_begin(&two, b, at_b);
    if (quick_verdict(&one.comb, &two.comb, out)) {
        if (*out == FAN_OVERLAP_YES && wanted)
            first_elements(&one, &two);
        return FAN_OK;
    }
    FAN_TRY(solve_pair(&e, &one.comb, &two.comb, &left, out, err));
    if (*out == FAN_OVERLAP_YES && wanted)
        solved_elements(&e, &one, &two);
    return FAN_OK;
}

bool fan_array_disjoint(const fan_array *a, const fan_array *b)
{
    fan_region one = fan_region_of(a);
    fan_region two = fan_region_of(b);
    fan_verdict v = FAN_OVERLAP_HARD;
    (void)fan_overlap(&one, &two, 0, NULL, NULL, &v, NULL);
    return v == FAN_OVERLAP_DISJOINT;
}

/* ---- one region and itself ---- */

/* unmoved_axis: returns an axis of extent > 1 that does not move: its first two elements coincide.
 * -1: none. */
static int unmoved_axis(const fan_region *r)
{
    for (int i = 0; i < r->ndim; i++) {
        if (r->shape[i] > 1 && r->strides[i] == 0)
            return i;
    }
    return -1;
}

/* two_indices: turns the solution's difference along one axis into two indices. */
static void two_indices(const fan_region *r, const moving *m, int64_t difference, int64_t *one,
                        int64_t *two)
{
    if (r->strides[m->axis] < 0)
        difference = -difference;
    one[m->axis] = fan_max(difference, 0);
    two[m->axis] = fan_max(-difference, 0);
}

/* overlap_leading: checks whether two elements share a byte that differ by at least 1 along axis k,
 * by nothing above and by anything below. */
static fan_status overlap_leading(const fan_region *r, const moving *sorted, int k,
                                  fan_effort *left, int64_t *one, int64_t *two, fan_verdict *out,
                                  fan_error *err)
{
    FAN_UNINITIALIZED equation e;
    FAN_UNINITIALIZED term parts[PARTS];
    int64_t below = r->itemsize - 1;
    int64_t width = 2 * below;
    int64_t step = sorted[k].step;
    for (int j = 0; j < k; j++) {
        int64_t most = sorted[j].count - 1;
        parts[j] = (term){sorted[j].step, 2 * most};
        below += sorted[j].step * most;
    }
    parts[k] = (term){step, sorted[k].count - 2};

    *out = FAN_OVERLAP_DISJOINT;
    if (below < step)
        return FAN_OK;
    if (!fan__equation_pose(&e, parts, k + 1, width, below - step))
        return FAN_OK;
    FAN_TRY(fan__equation_solve(&e, left, out, err));
    if (*out != FAN_OVERLAP_YES || !one || !two)
        return FAN_OK;

    (void)fan__equation_given_places(&e, width);
    for (int j = 0; j <= k; j++) {
        int64_t least = j < k ? 1 - sorted[j].count : 1;
        int64_t given = fan__equation_given(&e, parts[j].step, parts[j].most);
        two_indices(r, &sorted[j], given + least, one, two);
    }
    return FAN_OK;
}

fan_status fan_overlap_itself(const fan_region *a, uint64_t budget, int64_t *one, int64_t *two,
                              fan_verdict *out, fan_error *err)
{
    FAN_UNINITIALIZED moving sorted[FAN_MAX_NDIM];
    fan_effort left = fan_effort_of(budget);
    fan_comb c;
    bool wanted = one && two;
    int at = unmoved_axis(a);
    *out = FAN_OVERLAP_DISJOINT;
    if (is_empty(a))
        return FAN_OK;
    if (wanted) {
        memset(one, 0, (size_t)a->ndim * sizeof *one);
        memset(two, 0, (size_t)a->ndim * sizeof *two);
    }
    if (at >= 0) {
        if (wanted)
            one[at] = 1;
        *out = FAN_OVERLAP_YES;
        return FAN_OK;
    }

    int n = comb_measure(a, sorted, &c);
    if (c.far) {
        *out = FAN_OVERLAP_FAR;
        return FAN_OK;
    }
    for (int k = 0; k < n && *out != FAN_OVERLAP_YES; k++) {
        fan_verdict v;
        FAN_TRY(overlap_leading(a, sorted, k, &left, one, two, &v, err));
        if (v == FAN_OVERLAP_YES || *out == FAN_OVERLAP_DISJOINT)
            *out = v;
    }
    return FAN_OK;
}
