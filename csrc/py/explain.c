/* explain: what a pass says of itself, as Python's text and errors (E11, E17; engine/explain.h). */
#include "py/engine_part.h"

/* ---- E11 ---- */

fan_status fan_explain_read_stats(void *buffer, uint32_t slot, fan_nonfinite *found, fan_error *err)
{
    const buffer_object *b = buffer;
    bool some, bad;
    int64_t key;
    fan_stats s;
    FAN_TRY(fan_buffer_stats(b->core, slot, &some, &s, &bad, &key, err));
    if (some) {
        found->elements = s.nonfinite;
        found->total = s.count;
    }
    if (some && bad && key >= 0)
        found->key = (uint32_t)key;
    return FAN_OK;
}

PyObject *fan_node_call_site(const fan_node *n)
{
    return fan_node_object(n)->more ? fan_node_object(n)->more->call_site : NULL;
}

fan_status fan_explain_nonfinite(const fan_nonfinite *found, const fan_producer *producer, fan_error *err)
{
    char to[128], name[128], elements[96];
    const fan_node *from = producer ? producer->node : NULL;
    PyObject *call_site = from ? fan_node_call_site(from) : NULL;
    fan_node_name(found->to, to, sizeof to);
    PyOS_snprintf(elements, sizeof elements, "%llu of %llu element%s", (unsigned long long)found->elements,
                  (unsigned long long)found->total, FAN_PLURAL(found->total));
    if (!producer)
        PyErr_Format(PyExc_FloatingPointError,
                     "%s: the sum in slot %u is not finite, and none of its gradients is so: it overflows (%s)", to,
                     found->slot, elements);
    else if (from)
        PyErr_Format(
            PyExc_FloatingPointError,
            "%s%s returned a gradient that is not finite at index %u: an inf or NaN in %s of the sum in slot %u "
            "of %s; %s%V",
            FAN_FROM_HOOK(producer), fan_node_name(from, name, sizeof name), producer->index, elements, found->slot, to,
            call_site ? "it was made at " : "where it was made is known of nodes made under ", call_site,
            "fanin.set_options(detect=True)");
    else
        PyErr_Format(PyExc_FloatingPointError,
                     "%s was given a gradient that is not finite at index %u: an inf or NaN in %s", producer->call,
                     producer->index, elements);
    return fan_from_python(err);
}

/* ---- E17 ---- */

/* A str that grows; NULL: it could not. */
static void text_append(void *to, const char *text)
{
    PyObject **all = to, *piece = *all ? PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace") : NULL;
    if (*all)
        PyUnicode_Append(all, piece);
    Py_XDECREF(piece);
}

PyObject *fan_explain_pass(const fan_backward *p, const fan_node *only)
{
    PyObject *text = PyUnicode_FromString("");
    fan_backward_explain(p, only, &(fan_text){text_append, &text});
    return text;
}

PyObject *fan_explain_lost(const fan_backward *p)
{
    PyObject *text = PyUnicode_FromString("");
    fan_backward_lost(p, &(fan_text){text_append, &text});
    return text;
}
