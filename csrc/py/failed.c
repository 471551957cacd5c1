/* failed: the error that ends a pass, as an exception whose notes say where it was (E14). */
#include "py/engine_part.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MOST_NOTES 16
#define FOLDED ".. and %u notes more, of the passes around these"

/* fold: instead of one note more, the count of those that are left out. */
static void fold_notes(PyObject *notes)
{
    PyObject *text;
    unsigned n = 0;
    Py_ssize_t at = PyList_GET_SIZE(notes);
    while (at > 0 && n == 0) {
        PyObject *one = PyList_GET_ITEM(notes, --at);
        const char *words = PyUnicode_Check(one) ? PyUnicode_AsUTF8(one) : NULL;
        if (!words || sscanf(words, ".. and %u notes more", &n) != 1)
            n = 0;
    }
    text = PyUnicode_FromFormat(FOLDED, n + 1);
    if (text && n)
        (void)PyList_SetItem(notes, at, Py_NewRef(text));
    else if (text)
        (void)PyList_Append(notes, text);
    Py_XDECREF(text);
}

/* add_note: of a str, whose reference it takes; NULL, and an empty one, is none. One that is there is not said again,
 * and of many the first are: a node that runs a pass inside a pass without end would say it a thousand times. */
static void add_note(PyObject *e, PyObject *note)
{
    bool any = note && e && PyUnicode_GET_LENGTH(note);
    PyObject *said = any ? PyObject_GetAttrString(e, "__notes__") : NULL, *none = NULL;
    bool list = said && PyList_Check(said);
    PyErr_Clear(); /* the error itself matters, here and below */
    if (any && !(list && PySequence_Contains(said, note) == 1)) {
        PyErr_Clear();
        if (list && PyList_GET_SIZE(said) >= MOST_NOTES)
            fold_notes(said);
        else
            none = PyObject_CallMethod(e, "add_note", "O", note);
    }
    PyErr_Clear();
    Py_XDECREF(none);
    Py_XDECREF(said);
    Py_XDECREF(note);
}

void *fan_error_take(const fan_backward *p, const fan_node *n, uint32_t ran, fan_status status, const fan_error *err)
{
    PyObject *e, *call_site = n ? fan_node_call_site(n) : NULL;
    char name[128], own[32] = "";
    uint32_t ran_now, all;
    (void)fan_backward_at(p, &ran_now, &all);
    fan_raise(status, err);
    e = fan_exception_take();
    if (n && fan_node_object(n)->name)
        PyOS_snprintf(own, sizeof own, n->ops->leaf ? "leaf %llu" : "node %llu", (unsigned long long)n->number);
    if (n)
        add_note(e, PyUnicode_FromFormat("in %s%s%s%s%V%s: %u of %u nodes had run", fan_node_name(n, name, sizeof name),
                                         own[0] || call_site ? " (" : "", own,
                                         !call_site ? ""
                                         : own[0]   ? ", made at "
                                                    : "made at ",
                                         call_site, "", own[0] || call_site ? ")" : "", ran, all));
    else
        add_note(e, PyUnicode_FromFormat("%s: %u of %u nodes had run",
                                         fan_backward_seeded(p) ? "between nodes" : "in the roots", ran, all));
    return e;
}

void fan_task_failed(const fan_backward *p, fan_status status, const fan_error *err)
{
    uint32_t ran, all;
    const fan_node *n = fan_backward_at(p, &ran, &all);
    PyObject *e = fan_backward_error_has_location(p) ? fan_exception_take() : fan_error_take(p, n, ran, status, err);
    add_note(e, fan_explain_lost(p));
    fan_exception_put(e);
}

/* Of two: an exception that is no Exception, Ctrl-C for one, comes before one that is; else the first. */
void *fan_error_both(void *first, void *second)
{
    bool swap =
        PyErr_GivenExceptionMatches(first, PyExc_Exception) && !PyErr_GivenExceptionMatches(second, PyExc_Exception);
    PyObject *e = swap ? second : first, *other = swap ? first : second;
    PyObject *notes = PyObject_GetAttrString(other, "__notes__"), *text, *none;
    PyErr_Clear();
    text = PyUnicode_FromFormat("beside it: %R, %S", other, notes ? notes : Py_None);
    none = text ? PyObject_CallMethod(e, "add_note", "O", text) : NULL;
    PyErr_Clear(); /* the errors themselves matter */
    Py_XDECREF(none);
    Py_XDECREF(text);
    Py_XDECREF(notes);
    Py_DECREF(other);
    return e;
}

/* What others have not written yet of stdout and stderr is the parent's: _exit leaves it alone. */
void fan_error_orphaned(void *error)
{
    PyObject *e = error, *text = PyUnicode_FromFormat("%s: %S", Py_TYPE(e)->tp_name, e);
    const char *words = text ? PyUnicode_AsUTF8(text) : NULL;
    const char *const parts[] = {
        "fanin: a fork on a worker of a pass: the pass cannot go on in this child, which ends: ",
        words ? words : Py_TYPE(e)->tp_name, "\n"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (write(STDERR_FILENO, parts[i], strlen(parts[i])) < 0)
            break;
    _exit(1);
}
