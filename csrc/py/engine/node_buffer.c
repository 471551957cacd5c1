/* node_buffer: the buffer of a node, for slots with several producers, and for what must be converted on its way in. */
#include "py/engine/node_object.h"

buffer_object *fan_node_buffer(const node_object *n, fan_buffer_config how)
{
    char name[128];
    const node_more *more = n->more;
    if ((more && more->slots.specs) || how.create_graph || how.stats || how.stream) {
        const fan_slot_specs none = {.n = n->node.inputs}, *slots = more && more->slots.specs ? &more->slots : &none;
        how.name = fan_node_name(&n->node, name, sizeof name);
        how.leaf = how.stream && n->node.ops->leaf;
        buffer_object *made = (buffer_object *)fan_buffer_declared(slots, more ? more->names : NULL, how);
        if (made && !how.create_graph && n->node.ops->leaf && ((const leaf_object *)n)->arrays)
            made->flags[0] |= FAN_ARRAYS;
        return made;
    }
    if (atomic_load_explicit(&fan_traces, memory_order_relaxed)) { /* its lines bear the node's name */
        PyObject *args[2] = {PyLong_FromUnsignedLong(n->node.inputs),
                             PyUnicode_FromString(fan_node_name(&n->node, name, sizeof name))};
        PyObject *names = args[0] && args[1] ? Py_BuildValue("(s)", "name") : NULL, *made = NULL;
        if (names)
            made = fan_buffer_call((PyObject *)fan_state_get()->buffer_type, args, 1, names);
        Py_XDECREF(names);
        Py_XDECREF(args[0]);
        Py_XDECREF(args[1]);
        return (buffer_object *)made;
    }
    return (buffer_object *)fan_buffer_plain(n->node.inputs);
}
