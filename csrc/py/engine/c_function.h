/* c_function: the function of a node in C (include/fanin.h), as a Python callable. */
#ifndef FAN_PY_C_FUNCTION_H
#define FAN_PY_C_FUNCTION_H

#include "engine/node.h"
#include "py/arrays/objects.h"

#include <fanin.h>

/* fan_node_name: the name of a node for messages: fan_node_name(n).text. */
typedef struct fan_node_label {
    char text[128];
} fan_node_label;
static inline fan_node_label fan_node_name(const fan_node *n)
{
    FAN_UNINITIALIZED fan_node_label name;
    n->ops->text(n, name.text, sizeof name.text);
    return name;
}

typedef struct function_object {
    PyObject_HEAD vectorcallfunc vectorcall;
    fanin_node_fn call;
    void *ctx;
    void (*release)(void *ctx);
    uint32_t inputs, gradients, flags;
} function_object;

static inline bool fan_is_function(PyObject *o)
{
    return Py_TYPE(o) == fan_state_get()->function_type;
}

PyObject *fan_function_new(const fanin_function *f);
/* fan_function_run: calls it for node n (NULL: none). Fills `gradients`, all NULL before, with
 * holds: 0, or -1 with an exception, and maybe some of them. The sums, objects or unboxed, stay the
 * caller's. */
int fan_function_run(const function_object *f, const fan_node *n, void **sums, void **gradients,
                     uint32_t ngradients);

/* fan_c_show: an array as a fanin_value, which takes its hold; NULL: undefined. */
static inline void fan_c_show(fan_array *a, fanin_value *out)
{
    *out = (fanin_value){.dtype = FANIN_BOOL};
    if (a) {
        *out = (fanin_value){.array = (fanin_array *)(void *)a,
                             .data = a->data,
                             .shape = a->shape,
                             .strides = a->strides,
                             .size = a->size,
                             .dtype = (fanin_dtype)a->dtype,
                             .ndim = a->ndim,
                             .contiguous = fan_array_in_c_order(a)};
    }
}
static inline fan_array *fan_c_array(const fanin_value *v)
{
    return (fan_array *)(void *)v->array;
}
/* fan_c_import: a Python object on the CPU, or None, as a fanin_value over the same memory, with a
 * hold: 0, or -1 with an exception that names the node (NULL: none). */
int fan_c_import(PyObject *o, const fan_node *n, fanin_value *out);

#endif
