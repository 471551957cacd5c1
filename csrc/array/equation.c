/* equation: bounded sums of steps: sets up an equation (pose), searches for a solution (step 5 of
 * the essay in overlap.c), tabulates the sums where the search is too long (step 6), and solves by
 * both within an effort (step 7). */
#include "array/equation.h"

#include "array/convert.h"
#include "base/mem.h"

#include <assert.h>
#include <string.h>

#define QUICK 10000  /* tries: about a tenth of a millisecond */
#define LONG 2000000 /* .. and tens of milliseconds */
#define CHEAP 200    /* tries, if the work of a call is used up */
#define TRY 20       /* the work of a try */

typedef enum found {
    NOTHING,
    FOUND,
    GIVEN_UP
} found;

static int64_t equation_gcd(int64_t a, int64_t b)
{
    if (b == 1)
        return 1;
    while (b) {
        int64_t left = equation_remainder(a, b);
        a = b;
        b = left;
    }
    return a;
}

static void equation_begin(equation *e, int64_t grid, int64_t rest, int64_t target)
{
    e->grid = grid;
    e->rest = rest;
    e->target = target;
    e->n = 0;
    e->reach[0] = 0;
    e->gcd[0] = 0;
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
    e->gcd[k + 1] = equation_gcd(step, e->gcd[k]);
    e->whole[k + 1] = true;
    if (k > 0) {
        bool same_gcd = e->gcd[k + 1] == e->gcd[k];
        bool in_reach = step <= e->reach[k] + e->gcd[k];
        e->whole[k + 1] = e->whole[k] && same_gcd && in_reach;
    }
    e->inverse[k + 1] = 0;
    e->n++;
}

bool fan__equation_pose(equation *e, const term *parts, int n, int64_t width, int64_t target)
{
    int64_t g = 0;
    for (int i = 0; i < n && g != 1; i++)
        g = equation_gcd(parts[i].step, g);
    if (g == 0)
        g = 1;
    int64_t rest = equation_remainder(target, g);
    if (rest > width)
        return false;
    if (width > 0) {
        equation_begin(e, 1, 0, target);
        add_term(e, 1, width);
        for (int i = 0; i < n; i++)
            add_term(e, parts[i].step, parts[i].most);
        if (g == 1 || e->whole[e->n])
            return true;
    }
    equation_begin(e, g, rest, equation_quotient(target, g));
    add_term(e, 1, equation_quotient(width - rest, g));
    for (int i = 0; i < n; i++)
        add_term(e, equation_quotient(parts[i].step, g), parts[i].most);
    return true;
}

int64_t fan__equation_given(equation *e, int64_t step, int64_t most)
{
    for (int k = 0; k < e->n; k++) {
        if (e->t[k].step == equation_quotient(step, e->grid)) {
            int64_t x = fan_min(e->x[k], most);
            e->x[k] -= x;
            return x;
        }
    }
    return 0;
}

int64_t fan__equation_given_places(equation *e, int64_t width)
{
    int64_t most = equation_quotient(width - e->rest, e->grid);
    return e->rest + e->grid * fan__equation_given(e, e->grid, most);
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
    int64_t r0 = m;
    int64_t r1 = a % m;
    int64_t y0 = 0;
    int64_t y1 = 1;
    while (r1) {
        int64_t q = r0 / r1;
        int64_t r = r0 - q * r1;
        int64_t y = y0 - q * y1;
        r0 = r1;
        r1 = r;
        y0 = y1;
        y1 = y;
    }
    if (y0 < 0)
        return y0 + m;
    return y0;
}

/* steps_to_cover: returns how many steps are needed for at least `over`. */
static int64_t steps_to_cover(int64_t over, int64_t step)
{
    if (over > 0)
        return equation_quotient(over + step - 1, step);
    return 0;
}

/* equation_read: computes a solution for the terms 0 .. k - 1, which are whole. */
static void equation_read(equation *e, int k, int64_t r)
{
    for (int j = k - 1; j >= 0; j--) {
        int64_t step = e->t[j].step;
        e->x[j] = steps_to_cover(r - e->reach[j], step);
        r -= e->x[j] * step;
        assert(r >= 0 && e->x[j] <= e->t[j].most);
    }
    assert(r == 0);
}

/* equation_search: step 5 for the terms 0 .. k - 1, with `tries` left. Starts at the middle of a
 * window, where the remainder is far from both ends of the others' reach and most sums are. */
static found equation_search(equation *e, int k, int64_t r, int64_t *tries)
{
    assert(k > 0 && r >= 0 && r <= e->reach[k]); /* guaranteed by the extents and the windows */
    int64_t gcd = e->gcd[k];
    if (gcd > 1 && equation_remainder(r, gcd) != 0)
        return NOTHING;
    if (e->whole[k]) {
        equation_read(e, k, r);
        return FOUND;
    }

    /* The window of values first, first + jump, .. last that leave the terms 0 .. k - 2 a remainder
     * within their reach and divisible by their gcd. */
    int64_t step = e->t[k - 1].step;
    int64_t jump = 1;
    int64_t first = steps_to_cover(r - e->reach[k - 1], step);
    int64_t last = fan_min(equation_quotient(r, step), e->t[k - 1].most);
    if (e->gcd[k - 1] > gcd) {
        jump = equation_quotient(e->gcd[k - 1], gcd);
        if (!e->inverse[k])
            e->inverse[k] = inverse_of(equation_quotient(step, gcd), jump);
        int64_t class = equation_remainder(equation_quotient(r, gcd), jump);
        int64_t up = times_modulo(class, e->inverse[k], jump) - equation_remainder(first, jump);
        if (up < 0)
            up += jump;
        first += up;
    }
    int64_t count = 0;
    if (first <= last)
        count = equation_quotient(last - first, jump) + 1;

    for (int64_t i = 0; i < count; i++) {
        int64_t away = (i + 1) / 2;
        if (i % 2 == 0)
            away = -away;
        int64_t x = first + jump * ((count - 1) / 2 + away);
        if (--*tries < 0)
            return GIVEN_UP;
        found f = equation_search(e, k - 1, r - x * step, tries);
        if (f != NOTHING) {
            e->x[k - 1] = x;
            return f;
        }
    }
    return NOTHING;
}

/* ---- the table of sums ---- */

static bool table_has(const uint64_t *bits, int64_t i)
{
    return bits[i / 64] >> (i % 64) & 1;
}

/* table_shift_in: adds to the set each sum plus `by`; a word of zeros is below the table of
 * `words`. Works from the top, so that none is shifted twice. */
static void table_shift_in(uint64_t *bits, size_t words, int64_t by)
{
    size_t whole = (size_t)(by / 64);
    size_t end = words;
    unsigned part = (unsigned)(by % 64);
    if (whole == 0) {
        for (size_t i = words; i-- > 0;)
            bits[i] |= bits[i] << part | bits[(ptrdiff_t)i - 1] >> (64 - part);
        return;
    }
    while (end > whole) {
        size_t n = fan_umin(fan_umin(end - whole, whole), 2048); /* fits the L1 cache */
        end -= n;
        /* n words of `from` are shifted up by `part` bits and or-ed into `to`; from[-1] is the word
         * below. */
        uint64_t *restrict to = bits + end;
        const uint64_t *restrict from = bits + end - whole;
        if (part == 0) {
            for (size_t i = 0; i < n; i++)
                to[i] |= from[i];
        } else {
            for (size_t i = 0; i < n; i++)
                to[i] |= from[i] << part | from[(ptrdiff_t)i - 1] >> (64 - part);
        }
    }
}

/* equation_table: computes the sums up to r of the terms 0 .. k - 1 in `bits`; NULL: in no table.
 * Touches only the part that can hold sums yet. Returns the number of words that it unites, at most
 * INT64_MAX. */
static int64_t equation_table(const equation *e, int k, int64_t r, uint64_t *bits)
{
    int64_t words = r / 64 + 1;
    int64_t work = words;
    int64_t reach = 0;
    if (bits) {
        memset(bits, 0, (size_t)words * sizeof *bits);
        bits[0] = 1;
    }
    for (int j = 0; j < k; j++) {
        const term *t = &e->t[j];
        int64_t left = fan_min(t->most, r / t->step);
        for (int64_t piece = 1; left > 0; piece *= 2) {
            int64_t by = fan_min(piece, left) * t->step;
            reach += by;
            int64_t some = fan_min(reach / 64 + 1, words);
            if (bits)
                table_shift_in(bits, (size_t)some, by);
            if (__builtin_add_overflow(work, some, &work))
                return INT64_MAX;
            left -= piece;
        }
    }
    return work;
}

/* equation_look_up: step 6, then reads the solution from the largest term down. */
static found equation_look_up(equation *e, int64_t r, uint64_t *bits)
{
    for (int k = e->n; k > 0; k--) {
        const term *t = &e->t[k - 1];
        int64_t tries = QUICK;
        int64_t most = fan_min(t->most, r / t->step);
        int64_t x = 0;
        found f = equation_search(e, k, r, &tries);
        if (f != GIVEN_UP)
            return f;
        (void)equation_table(e, k - 1, r, bits);
        while (x <= most && !table_has(bits, r - x * t->step))
            x++;
        if (x > most) {
            assert(k == e->n); /* the table above had one */
            return NOTHING;
        }
        e->x[k - 1] = x;
        r -= x * t->step;
    }
    return FOUND;
}

/* tables_fit: checks that the tables of `equation_look_up`, one per term, are within the remaining
 * effort, and subtracts them. */
static bool tables_fit(const equation *e, int64_t r, fan_effort *left)
{
    int64_t work = 0;
    for (int k = e->n; k > 0; k--) {
        if (__builtin_add_overflow(work, equation_table(e, k - 1, r, NULL), &work))
            return false;
    }
    if ((uint64_t)(r / 64 + 1) > left->bytes / 8 || work > left->work)
        return false;
    left->work -= work;
    return true;
}

/* equation_try_some: searches with at most so many tries, as far as the remaining work allows. */
static found equation_try_some(equation *e, int64_t tries, fan_effort *left)
{
    int64_t given = fan_min(tries, fan_max(left->work / TRY, CHEAP));
    int64_t unused = given;
    found f = equation_search(e, e->n, e->target, &unused);
    left->work -= (given - fan_max(unused, 0)) * TRY;
    left->work = fan_max(left->work, 0);
    return f;
}

/* equation_tabulate: step 6, if its tables are within the remaining effort; else *out stays as it
 * is. */
static fan_status equation_tabulate(equation *e, fan_effort *left, found *out, fan_error *err)
{
    int64_t reach = e->reach[e->n];
    bool turned = e->target > reach / 2;
    int64_t r = fan_min(e->target, reach - e->target);
    size_t bytes = (size_t)(r / 64 + 1) * sizeof(uint64_t);
    if (!tables_fit(e, r, left))
        return FAN_OK;
    uint64_t *bits = fan_alloc(sizeof *bits + bytes);
    if (!bits)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a table of %zu bytes", bytes);
    bits[0] = 0;
    *out = equation_look_up(e, r, bits + 1);
    fan_free(bits);
    if (turned && *out == FOUND) {
        for (int k = 0; k < e->n; k++)
            e->x[k] = e->t[k].most - e->x[k];
    }
    return FAN_OK;
}

fan_status fan__equation_solve(equation *e, fan_effort *left, fan_verdict *out, fan_error *err)
{
    int64_t reach = e->reach[e->n];
    int64_t half = reach - e->target;
    if (e->target < reach / 2)
        half = e->target;
    found f = equation_try_some(e, QUICK, left);
    if (f == GIVEN_UP && left->bytes) {
        f = equation_try_some(e, fan_min(half / 1024, LONG), left);
        if (f == GIVEN_UP)
            FAN_TRY(equation_tabulate(e, left, &f, err));
        if (f == GIVEN_UP)
            f = equation_try_some(e, LONG, left);
    }
    *out = FAN_OVERLAP_HARD;
    if (f == FOUND)
        *out = FAN_OVERLAP_YES;
    if (f == NOTHING)
        *out = FAN_OVERLAP_DISJOINT;
    return FAN_OK;
}
