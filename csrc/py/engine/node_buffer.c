/* node_buffer: the buffer of a node's gradients, and the sum of one or two of them by such a
 * buffer. */
#include "py/engine/node_object.h"

buffer_object *fan_node_buffer(const node_object *n, fan_buffer_config config)
{
    const fan_slot_specs none = {.n = n->node.inputs};
    const fan_slot_specs *slots = &none;
    PyObject *names = NULL;
    bool is_leaf = n->node.ops->leaf;
    if (fan_node_specs(&n->node)) {
        slots = &n->more->slots;
        names = n->more->names;
    }
    /* the lines of a trace bear the node's name */
    bool traced = atomic_load_explicit(&fan_traces, memory_order_relaxed);
    bool has_options = config.create_graph || config.stats || config.stream;
    if (slots == &none && !has_options && !traced)
        return (buffer_object *)fan_buffer_plain(none.n, config.budget);
    const fan_node_label name = fan_node_name(&n->node);
    config.name = name.text;
    config.leaf = config.stream && is_leaf;
    config.of_node = true;
    buffer_object *made = (buffer_object *)fan_buffer_declared(slots, names, config);
    bool in_place = is_leaf && !config.create_graph;
    if (made && in_place && ((const leaf_object *)n)->arrays)
        made->flags[0] |= FAN_ARRAYS;
    return made;
}

PyObject *fan_node_sum(const node_object *n, size_t slot, PyObject *one, PyObject *two,
                       fan_node_sum_options options)
{
    fan_buffer_config config = {.create_graph = options.create_graph,
                                .budget = fan_state_get()->budget};
    buffer_object *buffer = fan_node_buffer(n, config);
    PyObject *gradients[] = {one, two, NULL};
    PyObject *list = NULL;
    PyObject *sum = NULL;
    int bad = 0;
    if (!buffer)
        return NULL;
    for (PyObject **next = gradients; *next && !bad; next++) {
        fan_contribution c = {.key = -1, .value = {.dtype = FAN_DT_NONE}};
        bad = fan_contribution_of(buffer, slot, *next, NULL, &c);
        if (!next[1])
            c.weight = options.weight;
        if (!bad)
            bad = fan_add_on_library_stream(buffer->core, slot, &c);
        if (c.value.form != FAN_FORM_UNDEFINED)
            fan_value_drop(&fan_python, &c.value);
    }
    const fan_take_args args = {.only = &slot,
                                .slot_names = buffer->names,
                                .out = options.out,
                                .writable = options.writable};
    if (!bad)
        list = fan_take_list(buffer->core, &args);
    if (list)
        sum = Py_NewRef(PyList_GET_ITEM(list, 0));
    Py_XDECREF(list);
    Py_DECREF((PyObject *)buffer);
    return sum;
}
