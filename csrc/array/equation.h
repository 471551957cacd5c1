/* equation: is a number a sum of x0 * step0 + x1 * step1 + .., each x from 0 to its most? Bounded subset sums, which
 * two combs that may share a byte come down to; for array/overlap alone, whose essay (overlap.c) numbers the steps. */
#ifndef FAN_ARRAY_EQUATION_H
#define FAN_ARRAY_EQUATION_H

#include "array/array.h"
#include "array/verdict.h"

#define PARTS (2 * FAN_MAX_NDIM + 1) /* terms at most */

/* quotient, remainder: of numbers from 0 on; many processors are several times faster where 32 bits hold both. */
static inline int64_t quotient(int64_t a, int64_t b)
{
    return (a | b) <= UINT32_MAX ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

static inline int64_t remainder_of(int64_t a, int64_t b)
{
    return (a | b) <= UINT32_MAX ? (int64_t)((uint32_t)a % (uint32_t)b) : a % b;
}

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

/* fan__equation_pose: parts (ascending) and 0 .. width make the target? false: not even modulo the grid. What is whole
 * as it stands needs no grid. */
bool fan__equation_pose(equation *e, const term *parts, int n, int64_t width, int64_t target);
/* fan__equation_solve: steps 4 to 7. Before a large table the search gets a part of the time that the table would take.
 */
fan_status fan__equation_solve(equation *e, fan_effort *left, fan_verdict *out, fan_error *err);
/* fan__equation_given: how much of the solution a part with this step (in bytes) and bound has; each part asks once,
 * and takes it away. */
int64_t fan__equation_given(equation *e, int64_t step, int64_t most);
/* fan__equation_given_places: the same of the places within the elements. */
int64_t fan__equation_given_places(equation *e, int64_t width);

#endif
