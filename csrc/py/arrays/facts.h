/* facts: what an object is that may be a gradient.
 *
 * fan_class_of answers from the object's type alone; fan_facts_of also reads dtype and shape. All
 * code that treats kinds of objects differently calls one of them: imports (import_plain.c,
 * import.c), regions of memory (region.c), passes (engine/carry.c) and leaves (engine/leaf.c).
 *
 * FAN_IS_OTHER is all that needs Python code to be recognized: fanin._interop.arrays.describe reads
 * its library, and fanin._interop.sharing.memory_of its memory. */
#ifndef FAN_PY_FACTS_H
#define FAN_PY_FACTS_H

#include "py/arrays/objects.h"

/* Exactly of the type, where no subclass is named. */
typedef enum fan_class {
    FAN_IS_UNBOXED,          /* an array of the core without an object (objects.h) */
    FAN_IS_NDARRAY,          /* numpy.ndarray */
    FAN_IS_NDARRAY_SUBCLASS, /* of any subclass of it */
    FAN_IS_TENSOR,           /* torch.Tensor, which torch's exchange table reads */
    FAN_IS_NUMBER,           /* Python's float, int, bool or complex */
    FAN_IS_NUMBER_SUBCLASS,  /* of any subclass of these that is not NumPy's */
    FAN_IS_NUMPY_SCALAR,     /* of any subclass of numpy.generic */
    FAN_IS_ARRAY,            /* fanin.Array */
    FAN_IS_NONE,
    FAN_IS_OTHER
} fan_class;

typedef struct fan_facts {
    fan_class is;
    fan_dtype dtype;      /* FAN_DT_NONE: not on the CPU, or of no dtype that is summed */
    int ndim;             /* with a dtype alone, as the shape */
    const int64_t *shape; /* lives as long as the object */
} fan_facts;

/* fan__class_of: fan_class_of an object that is neither unboxed nor an ndarray. */
fan_class fan__class_of(PyObject *o);
/* fan_class_of: what `o` is, an object or an unboxed array. Runs no Python code. */
static inline fan_class fan_class_of(void *o)
{
    if (fan_is_unboxed(o))
        return FAN_IS_UNBOXED;
    if (PyArray_CheckExact((PyObject *)o))
        return FAN_IS_NDARRAY;
    return fan__class_of(o);
}

/* fan_facts_of: the class, dtype and shape of an object. Runs no Python code. Has no dtype of a
 * fanin.Array, of a subclass, or of any other object. */
fan_facts fan_facts_of(void *o);

#endif
