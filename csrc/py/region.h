/* region: where the memory of what Python has lies. Addresses, shapes and strides are read, never an element. */
#ifndef FAN_PY_REGION_H
#define FAN_PY_REGION_H

#include "array/layout.h"
#include "py/py.h"

/* What was read of several objects. Shapes and strides are copies: what Python does meanwhile changes nothing. */
typedef struct fan_regions {
    size_t n;
    fan_layout_item *items;
    PyArray_Descr **descrs; /* of ndarrays, held: items[i].dtype is its address; NULL: no ndarray */
    int64_t *dims;
    size_t used, cap; /* of dims */
    PyObject *tuple;  /* of the objects, held */
} fan_regions;

#define FAN_REGION_DIMS (2 * FAN_MAX_NDIM)

/* fan_region_read: one object's memory; `dims` has room for FAN_REGION_DIMS numbers, into which shape and strides
 * point. *descr: an ndarray's dtype, borrowed; else NULL. `who` and `index` (negative: none) begin the messages, as in
 * "overlaps: array 3: ..". -1 with an exception. */
int fan_region_read(PyObject *o, const char *who, Py_ssize_t index, int64_t *dims, fan_layout_item *out,
                    PyArray_Descr **descr);
/* fan_regions_read: those of all that the iterable `o` gives. -1 with an exception. fini: of a zeroed one as well. */
int fan_regions_read(PyObject *o, const char *who, fan_regions *out);
void fan_regions_fini(fan_regions *r);
/* fan_regions_one_device: ValueError where two are on different devices: their addresses say nothing of each other. */
int fan_regions_one_device(const fan_layout_item *items, size_t n, const char *who);

#endif
