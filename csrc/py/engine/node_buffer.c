/* node_buffer: the buffer of a node's gradients, and the sum of one or two of them by such a
 * buffer. */
#include "py/engine/node_object.h"

buffer_object *fan_node_buffer(const node_object *n, fan_buffer_config how)
{
    char name[128];
    const node_more *more = n->more;
    /* its lines bear the node's name */
    bool traced = atomic_load_explicit(&fan_traces, memory_order_relaxed);
    bool has_specs = more && more->slots.specs;
    bool has_options = how.create_graph || how.stats || how.stream;
    if (has_specs || has_options || traced) {
        const fan_slot_specs none = {.n = n->node.inputs};
        const fan_slot_specs *slots = has_specs ? &more->slots : &none;
        how.name = fan_node_name(&n->node, name, sizeof name);
        how.leaf = how.stream && n->node.ops->leaf;
        buffer_object *made =
            (buffer_object *)fan_buffer_declared(slots, more ? more->names : NULL, how);
        if (made && !how.create_graph && n->node.ops->leaf && ((const leaf_object *)n)->arrays)
            made->flags[0] |= FAN_ARRAYS;
        return made;
    }
    return (buffer_object *)fan_buffer_plain(n->node.inputs, how.budget);
}

PyObject *fan_node_sum(const node_object *n, size_t slot, PyObject *one, PyObject *two,
                       fan_sum_options options)
{
    fan_buffer_config config = {.create_graph = options.create_graph,
                                .budget = fan_state_get()->budget};
    buffer_object *buffer = fan_node_buffer(n, config);
    PyObject *gradients[2] = {one, two};
    PyObject *out = options.out ? options.out : Py_None;
    PyObject *list = NULL;
    PyObject *sum = NULL;
    bool failed = !buffer;
    for (int i = 0; i < 2 && gradients[i] && !failed; i++) {
        fan_contribution c = {.key = -1, .value = {.dtype = FAN_DT_NONE}};
        failed = fan_contribution_of(buffer, slot, gradients[i], NULL, &c) < 0;
        if (!failed)
            failed = fan_add_on(buffer->core, slot, &c) < 0;
        if (c.value.form != FAN_FORM_UNDEFINED)
            fan_value_drop(&fan_python, &c.value);
    }
    if (!failed)
        list =
            fan_take_all(buffer->core, &slot, buffer->names, NULL, out, Py_None, options.writable);
    if (list)
        sum = Py_NewRef(PyList_GET_ITEM(list, 0));
    Py_XDECREF(list);
    Py_XDECREF((PyObject *)buffer);
    return sum;
}
