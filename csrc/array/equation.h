/* equation: is a number a sum of x0 * step0 + x1 * step1 + .., with each x from 0 to its bound? Two
 * combs that may share a byte reduce to this bounded subset sum; for array/overlap alone, whose
 * essay (overlap.c) numbers the steps. */
#ifndef FAN_ARRAY_EQUATION_H
#define FAN_ARRAY_EQUATION_H

#include "array/array.h"
#include "array/extents.h"

#define PARTS (2 * FAN_MAX_NDIM + 1) /* terms at most */

/* equation_quotient, equation_remainder: of non-negative numbers; much faster on many processors if
 * 32 bits hold both. */
static inline int64_t equation_quotient(int64_t a, int64_t b)
{
    if ((a | b) <= UINT32_MAX)
        return (int64_t)((uint32_t)a / (uint32_t)b);
    return a / b;
}

static inline int64_t equation_remainder(int64_t a, int64_t b)
{
    if ((a | b) <= UINT32_MAX)
        return (int64_t)((uint32_t)a % (uint32_t)b);
    return a % b;
}

typedef struct term {
    int64_t step, most;
} term;

/* Terms with ascending steps, already divided by the grid. reach, gcd and whole are those of the
 * terms 0 .. k - 1; one term is whole, of none it is not set. */
typedef struct equation {
    int64_t target;
    /* the offsets within the elements make rest + grid * (their part of term 0) */
    int64_t grid, rest;
    int64_t reach[PARTS + 1], gcd[PARTS + 1], inverse[PARTS + 1];
    int64_t x[PARTS]; /* the solution, less what fan__equation_given has returned */
    term t[PARTS];
    bool whole[PARTS + 1];
    int n;
} equation;

/* fan__equation_pose: sets up: do the parts (ascending) and 0 .. width make the target? Returns
 * false if they cannot even modulo the grid. A target that is whole as it is needs no grid. */
bool fan__equation_pose(equation *e, const term *parts, int n, int64_t width, int64_t target);
/* fan__equation_solve: steps 4 to 7. Before it builds a large table, it searches for a part of the
 * time that the table would take. */
fan_status fan__equation_solve(equation *e, fan_effort *left, fan_verdict *out, fan_error *err);
/* fan__equation_given: returns the amount of the solution for a part with this step (in bytes) and
 * bound, and subtracts it; call it once per part. */
int64_t fan__equation_given(equation *e, int64_t step, int64_t most);
/* fan__equation_given_places: the same for the offsets within the elements. */
int64_t fan__equation_given_places(equation *e, int64_t width);

#endif
