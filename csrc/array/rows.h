/* rows: rows of an array, summed by the numbers that they have: the gradient of an embedding. */
#ifndef FAN_ARRAY_ROWS_H
#define FAN_ARRAY_ROWS_H

#include "array/array.h"
#include "base/status.h"

/* fan_rows_sum: writes to row i of `out` (C order, its own dtype) the left fold, in acc, of those
 * rows of `rows` whose number in `ids` is i, in their order: a lone one as it is, +0 where there is
 * none. `ids` has rows->shape[0] numbers. exact: the exact sums, rounded once, in the place of
 * folds. FAN_ERR_VALUE if a number is none of out's rows: *bad is its place, else -1;
 * FAN_ERR_NOMEM. May be interrupted. */
fan_status fan_rows_sum(const fan_array *out, const int64_t *ids, const fan_array *rows,
                        fan_dtype acc, bool exact, int64_t *bad, fan_error *err);

#endif
