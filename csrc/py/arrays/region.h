/* region: the memory of a Python object: reads address, shape and strides, never an element. */
#ifndef FAN_PY_REGION_H
#define FAN_PY_REGION_H

#include "array/layout.h"
#include "py/base/py.h"

/* The memory of several objects. Shapes and strides are copies, so later Python code does not
 * change them. */
typedef struct fan_regions {
    size_t n;
    fan_layout_item *items;
    PyArray_Descr **descrs; /* of ndarrays, held: items[i].dtype is its address; NULL: no ndarray */
    int64_t *dims;
    /* of dims */
    size_t used;
    size_t cap;
    PyObject *tuple; /* of the objects, held */
} fan_regions;

#define FAN_REGION_DIMS (2 * FAN_MAX_NDIM)

/* fan_region_read: reads one object; `dims` has room for FAN_REGION_DIMS numbers, where shape and
 * strides point to. *descr: an ndarray's dtype, borrowed; else NULL. Messages begin with `who` and
 * `index` (negative: none), as in "overlaps: array 3: ..". -1 with an exception. */
int fan_region_read(PyObject *o, const char *who, Py_ssize_t index, int64_t *dims,
                    fan_layout_item *out, PyArray_Descr **descr);
/* fan_regions_read: reads all objects of an iterable. -1 with an exception. fan_regions_fini
 * accepts a zeroed one. */
int fan_regions_read(PyObject *o, const char *who, fan_regions *out);
void fan_regions_fini(fan_regions *r);
/* fan_regions_one_device: ValueError if two are on different devices, whose addresses cannot be
 * compared. */
int fan_regions_one_device(const fan_layout_item *items, size_t n, const char *who);
/* fan_region_number: reads the number of one of n arrays. -1 with IndexError or TypeError, whose
 * text begins with `call`. */
Py_ssize_t fan_region_number(PyObject *o, size_t n, const char *call);
/* fan_overlap_budget_arg: None and NULL: FAN_OVERLAP_BUDGET. -1 with an exception. */
int fan_overlap_budget_arg(PyObject *o, uint64_t *out);

#endif
