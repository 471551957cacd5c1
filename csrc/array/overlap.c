/* Do two arrays share a byte? An essay.
 *
 * The bytes of an array are sums: an address, a whole multiple of each stride, and a place within the element. Two
 * arrays share a byte where a sum of the one equals a sum of the other. Count the second array backwards, from its last
 * byte, and every sign is positive: with the unknowns of both arrays side by side it is one equation,
 *
 *     c0 x0 + c1 x1 + .. = r,    0 <= xi <= ui,
 *
 * in which both places within an element make one more term whose step is 1. To solve such an equation is NP-hard in
 * general, and easy for what people slice. So, the cheap first, and every step exact:
 *
 * 1. Comb. Axes of extent 1 or stride 0 add no bytes; a negative stride is a positive one from the other end. Sorted by
 * step, an axis whose step is at most the tooth below makes the tooth longer; an axis whose step is a multiple of the
 * step below, and no farther than that one reaches, makes it longer. So what is dense is one tooth, and rows of a
 * matrix are one axis, however many axes they had.
 * 2. Extents. If the first byte of one lies behind the last of the other, they are disjoint.
 * 3. Grid. Let g be the common divisor of all steps but the 1. What the steps make is a multiple of g, so the places
 * within the elements must make r's remainder: if that is more than they have, the arrays are disjoint: columns of a
 * matrix, heads of a projection, every other element. Otherwise all is divided by g.
 * 4. Whole. If the terms up to some place reach all multiples of their common divisor up to the largest sum, nothing is
 * left to search: r is reached if it is a multiple and not too large. A term keeps that up if its step leaves the
 * divisor as it is and is no longer than what is reached below it and one divisor more. Views of one dense parent are
 * nearly always whole.
 * 5. Search. Else the term with the largest step is tried, each x for which the rest is within reach and divisible by
 * the rest's common divisor; those are one class modulo a number, and are stepped through. A few are tried for what
 * people slice; there are equations with exponentially many.
 * 6. Table. So after QUICK tries the sums are tabled, a bit for each number up to r: for each term and each power of
 * two in its bound the table is shifted and united with itself. That takes r / 8 bytes and r / 64 steps a power: exact,
 * and no worse for malicious steps. A sum and what is left of the whole are reached together, so r is at most half of
 * what all terms make. Which x made it is found from the largest term down: for each the table of the smaller ones says
 * which x leaves something that they make.
 * 7. Unknown. Over the budget the search goes on for LONG more tries; then the verdict says that nobody knows. The
 * budget is of memory and of work: all tables that the witness needs are counted beforehand, and the tries; many axes
 * with long steps would else take a minute within any memory. Questions of one call share their work; when it is done
 * each has FEW tries left.
 *
 * An array overlaps itself where two different elements share a byte. The difference of their indices is not zero; take
 * the axis with the largest step on which it is not, and say that it is positive there. For each axis that is one
 * equation of the same kind: no axis above, at least one step along this one, anything from -u to u along those below.
 * Where every step is longer than all that the smaller ones reach, each of these equations is refused by step 2 at
 * once.
 *
 * Numbers. A comb is less than 2^61 bytes long, so sums of two, doubled, stay below 2^63; products of remainders are
 * made in 128 bits.
 */
#include "array/overlap.h"

#include "array/convert.h"
#include "base/mem.h"

#include <assert.h>
#include <string.h>

#define FARTHEST (UINT64_C(1) << 61)
#define PARTS (2 * FAN_MAX_NDIM + 1)
#define QUICK 10000    /* tries: a tenth of a millisecond or so */
#define LONG 2000000   /* .. and tens of milliseconds */
#define FEW 200        /* tries, where the work of a call is done */
#define TRY 20         /* the work of a try */
#define WORK 100000000 /* .. that goes with the default budget: 50 ms or so */

const char *fan_verdict_kind(fan_verdict v)
{
    static const char *const kinds[] = {
#define X(NAME, kind, words) kind,
        FAN_VERDICT_LIST(X)
#undef X
    };
    return kinds[v];
}

const char *fan_verdict_words(fan_verdict v)
{
    static const char *const words[] = {
#define X(NAME, kind, words) words,
        FAN_VERDICT_LIST(X)
#undef X
    };
    return words[v];
}

fan_region fan_region_of(const fan_array *a)
{
    return (fan_region){(uint64_t)(uintptr_t)a->data, (int64_t)fan_dtype_size(a->dtype), a->shape, a->strides, a->ndim};
}

/* quotient, remainder: of numbers from 0 on; many processors are several times faster where 32 bits hold both. */
static int64_t quotient(int64_t a, int64_t b)
{
    return (a | b) <= UINT32_MAX ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

static int64_t remainder_of(int64_t a, int64_t b)
{
    return (a | b) <= UINT32_MAX ? (int64_t)((uint32_t)a % (uint32_t)b) : a % b;
}

/* ---- combs ---- */

/* An axis along which something moves, and which of the region's axes it is. */
typedef struct moving {
    int64_t step, count;
    int axis;
} moving;

/* Where the axes of a comb came from: group 0 is the tooth, group k the comb's axis k - 1; the group's members are
 * sorted[end[k - 1]] to sorted[end[k] - 1]. */
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

/* measure: the moving axes, the smallest step first; the comb's first and last byte. Returns how many. */
static int measure(const fan_region *r, moving *sorted, fan_comb *c)
{
    uint64_t lo = r->data, last, reach = (uint64_t)r->itemsize - 1;
    bool far = false;
    int n = 0;
    for (int i = 0; i < r->ndim; i++) {
        uint64_t step = r->strides[i] < 0 ? 0 - (uint64_t)r->strides[i] : (uint64_t)r->strides[i], way;
        int at = n;
        if (r->shape[i] == 1 || step == 0)
            continue;
        far |= __builtin_mul_overflow(step, (uint64_t)(r->shape[i] - 1), &way);
        far |= __builtin_add_overflow(reach, way, &reach);
        if (r->strides[i] < 0)
            far |= __builtin_sub_overflow(lo, way, &lo);
        for (; at > 0 && (uint64_t)sorted[at - 1].step > step; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = (moving){(int64_t)step, r->shape[i], i};
        n++;
    }
    far |= __builtin_add_overflow(lo, reach, &last) || reach >= FARTHEST;
    c->far = far;
    c->lo = far ? 0 : lo;
    c->last = far ? UINT64_MAX : last;
    return n;
}

/* join: the moving axes as a comb's; `end` (may be NULL) says what became of each. */
static void join(const moving *sorted, int n, int64_t itemsize, fan_axis *axes, fan_comb *c, int *end)
{
    int64_t tooth = itemsize;
    int i = 0, m = 0;
    for (; i < n && sorted[i].step <= tooth; i++)
        tooth += sorted[i].step * (sorted[i].count - 1);
    if (end)
        end[0] = i;
    for (; i < n; i++) {
        fan_axis *top = m ? &axes[m - 1] : NULL;
        int64_t step = sorted[i].step, count = sorted[i].count;
        int64_t times = top ? quotient(step, top->step) : 0;
        if (top && times * top->step == step && times <= top->count)
            top->count += times * (count - 1);
        else
            axes[m++] = (fan_axis){step, count};
        if (end)
            end[m] = i + 1;
    }
    c->tooth = tooth;
    c->n = m;
}

static void comb_of(const fan_region *r, fan_axis *axes, fan_comb *out, moving *sorted, int *end)
{
    *out = (fan_comb){.axes = axes, .empty = is_empty(r)};
    if (out->empty)
        return;
    int n = measure(r, sorted, out);
    if (!out->far)
        join(sorted, n, r->itemsize, axes, out, end);
}

void fan_comb_of(const fan_region *r, fan_axis *axes, fan_comb *out)
{
    FAN_UNCLEARED moving sorted[FAN_MAX_NDIM];
    comb_of(r, axes, out, sorted, NULL);
}

/* unwind: the element that holds the byte at `way` from the start of group k's steps: writes its axes' places in
 * `index`, counted from their low ends. Returns what is left within the element. */
static int64_t unwind(const origin *o, int k, int64_t way, int64_t *index)
{
    for (int i = o->end[k] - 1; i >= (k ? o->end[k - 1] : 0); i--) {
        const moving *m = &o->sorted[i];
        int64_t x = quotient(way, m->step);
        x = x < m->count ? x : m->count - 1;
        index[m->axis] = x;
        way -= x * m->step;
    }
    return way;
}

/* element: the element of `r` at which the comb's axes have the values x, and whose bytes hold that at `t` in the
 * tooth. */
static void element(const fan_region *r, const fan_comb *c, const origin *o, const int64_t *x, int64_t t,
                    int64_t *index)
{
    memset(index, 0, (size_t)r->ndim * sizeof *index);
    for (int k = 0; k < c->n; k++) {
        int64_t left = unwind(o, k + 1, x[k] * c->axes[k].step, index);
        assert(left == 0);
        (void)left;
    }
    int64_t left = unwind(o, 0, t, index);
    assert(left < r->itemsize);
    (void)left;
    for (int i = 0; i < r->ndim; i++)
        if (r->strides[i] < 0)
            index[i] = r->shape[i] - 1 - index[i];
}

/* ---- the equation ---- */

typedef struct term {
    int64_t step, most;
} term;

/* Terms with ascending steps, already divided by the grid. reach, gcd and whole are those of the terms 0 .. k - 1. */
typedef struct equation {
    int64_t target;
    int64_t grid, rest; /* the places within the elements make rest + grid * (their part of term 0) */
    int64_t reach[PARTS + 1], gcd[PARTS + 1], inverse[PARTS + 1];
    int64_t x[PARTS]; /* the solution, and what has been given of it */
    term t[PARTS];
    bool whole[PARTS + 1];
    int n;
} equation;

typedef enum found { NOTHING, FOUND, GIVEN_UP } found;

static int64_t gcd(int64_t a, int64_t b)
{
    if (b == 1)
        return 1;
    while (b) {
        int64_t left = remainder_of(a, b);
        a = b;
        b = left;
    }
    return a;
}

static void begin(equation *e, int64_t grid, int64_t rest, int64_t target)
{
    e->grid = grid;
    e->rest = rest;
    e->target = target;
    e->n = 0;
    e->reach[0] = e->gcd[0] = 0;
    e->whole[0] = true;
}

static void add_term(equation *e, int64_t step, int64_t most)
{
    int k = e->n;
    if (most == 0)
        return;
    if (k && e->t[k - 1].step == step) {
        e->t[k - 1].most += most;
        e->reach[k] += step * most;
        return;
    }
    e->t[k] = (term){step, most};
    e->reach[k + 1] = e->reach[k] + step * most;
    e->gcd[k + 1] = gcd(step, e->gcd[k]);
    e->whole[k + 1] = k == 0 || (e->whole[k] && e->gcd[k + 1] == e->gcd[k] && step <= e->reach[k] + e->gcd[k]);
    e->inverse[k + 1] = 0;
    e->n++;
}

/* pose: parts (ascending) and 0 .. width make the target? false: not even modulo the grid. What is whole as it stands
 * needs no grid. */
static bool pose(equation *e, const term *parts, int n, int64_t width, int64_t target)
{
    int64_t g = 0, rest;
    if (width > 0) {
        begin(e, 1, 0, target);
        add_term(e, 1, width);
        for (int i = 0; i < n; i++)
            add_term(e, parts[i].step, parts[i].most);
        if (e->whole[e->n])
            return true;
    }
    for (int i = 0; i < n && g != 1; i++)
        g = gcd(parts[i].step, g);
    if (g == 1 && width > 0)
        return true;
    g = g ? g : 1;
    rest = remainder_of(target, g);
    if (rest > width)
        return false;
    begin(e, g, rest, quotient(target, g));
    add_term(e, 1, quotient(width - rest, g));
    for (int i = 0; i < n; i++)
        add_term(e, quotient(parts[i].step, g), parts[i].most);
    return true;
}

/* given: how much of the solution a part with this step (in bytes) and bound has; each part asks once, and takes it
 * away. */
static int64_t given(equation *e, int64_t step, int64_t most)
{
    for (int k = 0; k < e->n; k++)
        if (e->t[k].step == quotient(step, e->grid)) {
            int64_t x = e->x[k] < most ? e->x[k] : most;
            e->x[k] -= x;
            return x;
        }
    return 0;
}

/* given_places: the same of the places within the elements. */
static int64_t given_places(equation *e, int64_t width)
{
    return e->rest + e->grid * given(e, e->grid, quotient(width - e->rest, e->grid));
}

/* times_modulo: a and b are remainders. */
static int64_t times_modulo(int64_t a, int64_t b, int64_t m)
{
    if (m <= INT32_MAX)
        return a * b % m;
    return (int64_t)((unsigned __int128)a * (unsigned __int128)b % (unsigned __int128)m);
}

/* inverse_of: the y in 0 .. m - 1 with a * y = 1 modulo m; a and m have no common divisor. */
static int64_t inverse_of(int64_t a, int64_t m)
{
    int64_t r0 = m, r1 = a % m, y0 = 0, y1 = 1;
    while (r1) {
        int64_t q = r0 / r1, r = r0 - q * r1, y = y0 - q * y1;
        r0 = r1;
        r1 = r;
        y0 = y1;
        y1 = y;
    }
    return y0 < 0 ? y0 + m : y0;
}

/* fill: a solution with the terms 0 .. k - 1, which are whole. */
static void fill(equation *e, int k, int64_t r)
{
    for (int j = k - 1; j >= 0; j--) {
        int64_t step = e->t[j].step, over = r - e->reach[j];
        e->x[j] = over > 0 ? quotient(over + step - 1, step) : 0;
        r -= e->x[j] * step;
        assert(r >= 0 && e->x[j] <= e->t[j].most);
    }
    assert(r == 0);
}

/* The values worth trying for the largest term: first, first + jump, .. */
typedef struct window {
    int64_t first, jump, count;
} window;

/* window_of: those that leave terms 0 .. k - 2 something within their reach and divisible by what they are. */
static window window_of(equation *e, int k, int64_t r)
{
    int64_t step = e->t[k - 1].step, over = r - e->reach[k - 1], jump = 1;
    int64_t first = over > 0 ? quotient(over + step - 1, step) : 0, last = quotient(r, step);
    last = last < e->t[k - 1].most ? last : e->t[k - 1].most;
    if (e->gcd[k - 1] > e->gcd[k]) {
        jump = quotient(e->gcd[k - 1], e->gcd[k]);
        if (!e->inverse[k])
            e->inverse[k] = inverse_of(quotient(step, e->gcd[k]), jump);
        int64_t up =
            times_modulo(remainder_of(quotient(r, e->gcd[k]), jump), e->inverse[k], jump) - remainder_of(first, jump);
        first += up < 0 ? up + jump : up;
    }
    return (window){first, jump, first > last ? 0 : jump == 1 ? last - first + 1 : quotient(last - first, jump) + 1};
}

/* search: step 5, for the terms 0 .. k - 1; `tries` are left. From the middle of a window outwards: there the rest is
 * far from both ends of what the others reach, where most sums are. */
static found search(equation *e, int k, int64_t r, int64_t *tries)
{
    assert(r >= 0 && r <= e->reach[k]); /* extents met, and windows see to it */
    if (e->gcd[k] > 1 && remainder_of(r, e->gcd[k]) != 0)
        return NOTHING;
    if (e->whole[k]) {
        fill(e, k, r);
        return FOUND;
    }
    window w = window_of(e, k, r);
    for (int64_t i = 0; i < w.count; i++) {
        int64_t x = w.first + w.jump * ((w.count - 1) / 2 + (i % 2 ? (i + 1) / 2 : -(i / 2)));
        if (--*tries < 0)
            return GIVEN_UP;
        found f = search(e, k - 1, r - x * e->t[k - 1].step, tries);
        if (f != NOTHING) {
            e->x[k - 1] = x;
            return f;
        }
    }
    return NOTHING;
}

/* ---- the table of sums ---- */

static bool has(const uint64_t *bits, int64_t i) { return bits[i / 64] >> (i % 64) & 1; }

/* unite: n words of `from`, shifted up by `part` bits, into those of `to`; from[-1] is the word below. They do not
 * overlap. */
static void unite(uint64_t *restrict to, const uint64_t *restrict from, size_t n, unsigned part)
{
    if (part == 0)
        for (size_t i = 0; i < n; i++)
            to[i] |= from[i];
    else
        for (size_t i = 0; i < n; i++)
            to[i] |= from[i] << part | from[(ptrdiff_t)i - 1] >> (64 - part);
}

/* shift_in: every sum, and every sum and `by` more, in a table of `words`, below which there is one of zeros; from the
 * top, so that none is shifted twice. */
static void shift_in(uint64_t *bits, size_t words, int64_t by)
{
    size_t whole = (size_t)(by / 64), end = words;
    unsigned part = (unsigned)(by % 64);
    if (whole == 0) {
        for (size_t i = words; i-- > 0;)
            bits[i] |= bits[i] << part | bits[(ptrdiff_t)i - 1] >> (64 - part);
        return;
    }
    while (end > whole) {
        size_t n = end - whole < whole ? end - whole : whole;
        n = n < 2048 ? n : 2048; /* stays in the nearest cache */
        end -= n;
        unite(bits + end, bits + end - whole, n, part);
    }
}

/* table: the sums up to r of the terms 0 .. k - 1. Only as much of it is touched as there can be sums yet. */
static void table(const equation *e, int k, int64_t r, uint64_t *bits, size_t words)
{
    memset(bits, 0, words * sizeof *bits);
    bits[0] = 1;
    int64_t reach = 0;
    for (int j = 0; j < k; j++) {
        int64_t left = e->t[j].most < r / e->t[j].step ? e->t[j].most : r / e->t[j].step;
        for (int64_t piece = 1; left > 0; piece *= 2) {
            int64_t some = piece < left ? piece : left;
            reach += some * e->t[j].step;
            shift_in(bits, reach / 64 < (int64_t)words ? (size_t)(reach / 64 + 1) : words, some * e->t[j].step);
            left -= some;
        }
    }
}

/* look_up: step 6, and the solution from the largest term down. */
static found look_up(equation *e, int64_t r, uint64_t *bits)
{
    for (int k = e->n; k > 0; k--) {
        const term *t = &e->t[k - 1];
        int64_t tries = QUICK, most = t->most < r / t->step ? t->most : r / t->step, x = 0;
        found f = search(e, k, r, &tries);
        if (f != GIVEN_UP)
            return f;
        table(e, k - 1, r, bits, (size_t)(r / 64 + 1));
        while (x <= most && !has(bits, r - x * t->step))
            x++;
        if (x > most) {
            assert(k == e->n); /* the table above said that there is one */
            return NOTHING;
        }
        e->x[k - 1] = x;
        r -= x * t->step;
    }
    return FOUND;
}

/* table_work: the words that `table` unites. */
static int64_t table_work(const equation *e, int k, int64_t r)
{
    int64_t words = r / 64 + 1, work = words, reach = 0;
    for (int j = 0; j < k; j++) {
        int64_t left = e->t[j].most < r / e->t[j].step ? e->t[j].most : r / e->t[j].step;
        for (int64_t piece = 1; left > 0; piece *= 2) {
            int64_t some = piece < left ? piece : left;
            reach += some * e->t[j].step;
            if (__builtin_add_overflow(work, reach / 64 < words ? reach / 64 + 1 : words, &work))
                return INT64_MAX;
            left -= some;
        }
    }
    return work;
}

/* fits: whether the tables of `look_up`, one for each term, are within what is left, from which they are taken. */
static bool fits(const equation *e, int64_t r, fan_effort *left)
{
    int64_t work = 0;
    for (int k = e->n; k > 0; k--)
        if (__builtin_add_overflow(work, table_work(e, k - 1, r), &work))
            return false;
    if ((uint64_t)(r / 64 + 1) > left->bytes / 8 || work > left->work)
        return false;
    left->work -= work;
    return true;
}

static fan_status solve_by_table(equation *e, fan_effort *left, found *out, fan_error *err)
{
    bool turned = e->target > e->reach[e->n] / 2;
    int64_t r = turned ? e->reach[e->n] - e->target : e->target;
    size_t words = (size_t)(r / 64 + 1);
    *out = GIVEN_UP;
    if (!fits(e, r, left))
        return FAN_OK;
    uint64_t *bits = fan_alloc((words + 1) * sizeof *bits);
    if (!bits)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a table of %zu bytes", words * sizeof *bits);
    bits[0] = 0;
    *out = look_up(e, r, bits + 1);
    fan_free(bits);
    for (int k = 0; turned && *out == FOUND && k < e->n; k++)
        e->x[k] = e->t[k].most - e->x[k];
    return FAN_OK;
}

fan_effort fan_effort_of(uint64_t budget)
{
    uint64_t times = budget / FAN_OVERLAP_BUDGET;
    int64_t work;
    if (budget == UINT64_MAX || __builtin_mul_overflow((int64_t)(times ? times : 1), (int64_t)WORK, &work))
        work = INT64_MAX;
    return (fan_effort){budget, work};
}

/* try_some: a search of at most so many tries, as far as the work that is left goes. */
static found try_some(equation *e, int64_t tries, fan_effort *left)
{
    int64_t most = left->work / TRY, given;
    most = most > FEW ? most : FEW;
    given = tries < most ? tries : most;
    tries = given;
    found f = search(e, e->n, e->target, &tries);
    left->work -= (given - (tries > 0 ? tries : 0)) * TRY;
    left->work = left->work > 0 ? left->work : 0;
    return f;
}

/* solve: steps 4 to 7. Before a large table the search gets a part of the time that the table would take. */
static fan_status solve(equation *e, fan_effort *left, fan_verdict *out, fan_error *err)
{
    int64_t half = e->target < e->reach[e->n] / 2 ? e->target : e->reach[e->n] - e->target;
    found f = try_some(e, QUICK, left);
    if (f == GIVEN_UP && left->bytes) {
        f = try_some(e, half / 1024 < LONG ? half / 1024 : LONG, left);
        if (f == GIVEN_UP)
            FAN_TRY(solve_by_table(e, left, &f, err));
        if (f == GIVEN_UP)
            f = try_some(e, LONG, left);
    }
    *out = f == FOUND ? FAN_OVERLAP_YES : f == NOTHING ? FAN_OVERLAP_DISJOINT : FAN_OVERLAP_HARD;
    return FAN_OK;
}

/* ---- two regions ---- */

/* quick_verdict: steps 1 and 2; true if that was enough. */
static bool quick_verdict(const fan_comb *a, const fan_comb *b, fan_verdict *out)
{
    *out = FAN_OVERLAP_DISJOINT;
    if (!fan_extents_may_overlap(fan_comb_extent(a), fan_comb_extent(b)))
        return true;
    *out = a->far || b->far ? FAN_OVERLAP_FAR : FAN_OVERLAP_YES;
    return a->far || b->far || (a->n == 0 && b->n == 0);
}

/* side_by_side: the axes of both as parts, ascending. */
static int side_by_side(const fan_comb *a, const fan_comb *b, term *parts)
{
    int n = 0;
    for (int i = 0, j = 0; i < a->n || j < b->n;) {
        const fan_axis *next =
            j == b->n || (i < a->n && a->axes[i].step <= b->axes[j].step) ? &a->axes[i++] : &b->axes[j++];
        parts[n++] = (term){next->step, next->count - 1};
    }
    return n;
}

/* The second region is counted from its last byte. */
static fan_status solve_pair(equation *e, const fan_comb *a, const fan_comb *b, fan_effort *left, fan_verdict *out,
                             fan_error *err)
{
    FAN_UNCLEARED term parts[PARTS];
    int n = side_by_side(a, b, parts);
    *out = FAN_OVERLAP_DISJOINT;
    return pose(e, parts, n, a->tooth + b->tooth - 2, (int64_t)(b->last - a->lo)) ? solve(e, left, out, err) : FAN_OK;
}

fan_status fan_comb_overlap(const fan_comb *a, const fan_comb *b, fan_effort *left, fan_verdict *out, fan_error *err)
{
    FAN_UNCLEARED equation e;
    return quick_verdict(a, b, out) ? FAN_OK : solve_pair(&e, a, b, left, out, err);
}

/* elements: from the solution an element of each. The second, which is counted from its end, is given first: so the
 * indices of both are small. */
static void elements(equation *e, const fan_region *const r[2], const fan_comb *c, const origin *o,
                     int64_t *const at[2])
{
    FAN_UNCLEARED int64_t x[2][FAN_MAX_NDIM];
    int64_t places = given_places(e, c[0].tooth + c[1].tooth - 2), back = places < c[1].tooth ? places : c[1].tooth - 1;
    for (int k = 0; k < c[1].n; k++)
        x[1][k] = c[1].axes[k].count - 1 - given(e, c[1].axes[k].step, c[1].axes[k].count - 1);
    for (int k = 0; k < c[0].n; k++)
        x[0][k] = given(e, c[0].axes[k].step, c[0].axes[k].count - 1);
    element(r[0], &c[0], &o[0], x[0], places - back, at[0]);
    element(r[1], &c[1], &o[1], x[1], c[1].tooth - 1 - back, at[1]);
}

/* first_byte: where both are dense, the later start. */
static void first_byte(const fan_region *const r[2], const fan_comb *c, const origin *o, int64_t *const at[2])
{
    uint64_t lo = c[0].lo > c[1].lo ? c[0].lo : c[1].lo;
    for (int i = 0; i < 2; i++)
        element(r[i], &c[i], &o[i], NULL, (int64_t)(lo - c[i].lo), at[i]);
}

fan_status fan_overlap(const fan_region *a, const fan_region *b, uint64_t budget, int64_t *at_a, int64_t *at_b,
                       fan_verdict *out, fan_error *err)
{
    FAN_UNCLEARED origin o[2];
    FAN_UNCLEARED fan_axis axes[2][FAN_MAX_NDIM];
    FAN_UNCLEARED equation e;
    const fan_region *const r[2] = {a, b};
    int64_t *const at[2] = {at_a, at_b};
    fan_comb c[2];
    fan_effort left = fan_effort_of(budget);
    bool wanted = at_a && at_b;
    for (int i = 0; i < 2; i++)
        comb_of(r[i], axes[i], &c[i], o[i].sorted, o[i].end);
    if (quick_verdict(&c[0], &c[1], out)) {
        if (*out == FAN_OVERLAP_YES && wanted)
            first_byte(r, c, o, at);
        return FAN_OK;
    }
    FAN_TRY(solve_pair(&e, &c[0], &c[1], &left, out, err));
    if (*out == FAN_OVERLAP_YES && wanted)
        elements(&e, r, c, o, at);
    return FAN_OK;
}

bool fan_array_disjoint(const fan_array *a, const fan_array *b)
{
    fan_region one = fan_region_of(a), two = fan_region_of(b);
    fan_verdict v = FAN_OVERLAP_HARD;
    (void)fan_overlap(&one, &two, 0, NULL, NULL, &v, NULL);
    return v == FAN_OVERLAP_DISJOINT;
}

/* ---- one region and itself ---- */

/* still: an axis of extent > 1 that does not move: its first two elements are one. -1: there is none. */
static int still(const fan_region *r)
{
    for (int i = 0; i < r->ndim; i++)
        if (r->shape[i] > 1 && r->strides[i] == 0)
            return i;
    return -1;
}

/* apart: the solution's difference of indices along one axis as two indices. */
static void apart(const fan_region *r, const moving *m, int64_t difference, int64_t *one, int64_t *two)
{
    if (r->strides[m->axis] < 0)
        difference = -difference;
    one[m->axis] = difference > 0 ? difference : 0;
    two[m->axis] = difference < 0 ? -difference : 0;
}

/* leading: whether two elements that differ by 1 or more along axis k, by nothing above and by anything below, share a
 * byte. */
static fan_status leading(const fan_region *r, const moving *sorted, int k, fan_effort *left, int64_t *one,
                          int64_t *two, fan_verdict *out, fan_error *err)
{
    FAN_UNCLEARED equation e;
    FAN_UNCLEARED term parts[PARTS];
    int64_t below = r->itemsize - 1, width = 2 * below;
    for (int j = 0; j < k; j++) {
        parts[j] = (term){sorted[j].step, 2 * (sorted[j].count - 1)};
        below += sorted[j].step * (sorted[j].count - 1);
    }
    parts[k] = (term){sorted[k].step, sorted[k].count - 2};
    *out = FAN_OVERLAP_DISJOINT;
    if (below < sorted[k].step || !pose(&e, parts, k + 1, width, below - sorted[k].step))
        return FAN_OK;
    FAN_TRY(solve(&e, left, out, err));
    if (*out != FAN_OVERLAP_YES || !one || !two)
        return FAN_OK;
    (void)given_places(&e, width);
    for (int j = 0; j < k; j++)
        apart(r, &sorted[j], given(&e, parts[j].step, parts[j].most) - (sorted[j].count - 1), one, two);
    apart(r, &sorted[k], given(&e, parts[k].step, parts[k].most) + 1, one, two);
    return FAN_OK;
}

fan_status fan_overlap_itself(const fan_region *a, uint64_t budget, int64_t *one, int64_t *two, fan_verdict *out,
                              fan_error *err)
{
    FAN_UNCLEARED moving sorted[FAN_MAX_NDIM];
    fan_effort left = fan_effort_of(budget);
    fan_verdict v = FAN_OVERLAP_DISJOINT;
    fan_comb c;
    int n = 0, at = still(a);
    *out = FAN_OVERLAP_DISJOINT;
    if (is_empty(a))
        return FAN_OK;
    if (one && two) {
        memset(one, 0, (size_t)a->ndim * sizeof *one);
        memset(two, 0, (size_t)a->ndim * sizeof *two);
    }
    if (at >= 0) {
        if (one && two)
            one[at] = 1;
        *out = FAN_OVERLAP_YES;
        return FAN_OK;
    }
    n = measure(a, sorted, &c);
    if (c.far)
        *out = FAN_OVERLAP_FAR;
    for (int k = 0; k < n && !c.far; k++) {
        FAN_TRY(leading(a, sorted, k, &left, one, two, &v, err));
        if (v == FAN_OVERLAP_YES || *out == FAN_OVERLAP_DISJOINT)
            *out = v;
        if (v == FAN_OVERLAP_YES)
            break;
    }
    return FAN_OK;
}
