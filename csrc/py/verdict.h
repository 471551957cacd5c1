/* verdict: fanin.Verdict and fanin.Overlaps, what overlap() and overlaps() answer. */
#ifndef FAN_PY_VERDICT_H
#define FAN_PY_VERDICT_H

#include "array/overlap.h"
#include "py/py.h"

/* fan_verdict_judge: first a short search; what is hard is left to a thread of its own speed, without the GIL. b NULL:
 * a itself. */
PyObject *fan_verdict_judge(const fan_region *a, const fan_region *b, uint64_t budget);

/* ---- overlaps.c ---- */

/* fan_overlaps_of: of all that the iterable `arrays` gives. */
PyObject *fan_overlaps_of(PyObject *arrays, uint64_t budget);

#endif
