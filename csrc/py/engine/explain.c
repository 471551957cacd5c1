/* explain: errors and explanations of a pass, as Python exceptions and text.
 *
 * A gradient that is not finite (E11); the text of `explain` (E17); the notes that a pass adds to
 * the error that ends it, and two errors in one (E14). */
#include "py/engine/node_object.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- E11 ---- */

fan_status fan_explain_read_stats(void *buffer, uint32_t slot, fan_nonfinite *found, fan_error *err)
{
    const buffer_object *b = buffer;
    bool some, bad;
    int64_t key;
    fan_stats stats;
    FAN_TRY(fan_buffer_stats(b->core, slot, &some, &stats, &bad, &key, err));
    if (!some)
        return FAN_OK;
    found->elements = stats.nonfinite;
    found->total = stats.count;
    if (bad && key >= 0)
        found->key = (uint32_t)key;
    return FAN_OK;
}

/* call_site_of: where a node was made; borrowed; NULL: unknown. */
static PyObject *call_site_of(const fan_node *n)
{
    const node_more *more = fan_node_object(n)->more;
    if (!more)
        return NULL;
    return more->call_site;
}

fan_status fan_explain_nonfinite(const fan_nonfinite *found, const fan_producer *producer,
                                 fan_error *err)
{
    const fan_node_label to = fan_node_name(found->to);
    char elements[96];
    PyOS_snprintf(elements, sizeof elements, "%llu of %llu element%s",
                  (unsigned long long)found->elements, (unsigned long long)found->total,
                  FAN_PLURAL(found->total));
    if (!producer) {
        PyErr_Format(
            PyExc_FloatingPointError,
            "%s: the sum in slot %u is not finite, but all of its gradients are: it overflows (%s)",
            to.text, found->slot, elements);
    } else if (producer->node) {
        PyObject *call_site = call_site_of(producer->node);
        const char *made = "its place is recorded for nodes made under ";
        if (call_site)
            made = "it was made at ";
        PyErr_Format(PyExc_FloatingPointError,
                     "%s%s returned a gradient that is not finite at index %u: an inf or NaN in %s "
                     "of the sum in slot %u of %s; %s%V",
                     fan_from_hook(producer), fan_node_name(producer->node).text, producer->index,
                     elements, found->slot, to.text, made, call_site,
                     "fanin.set_options(detect=True)");
    } else {
        PyErr_Format(PyExc_FloatingPointError,
                     "%s was given a gradient that is not finite at index %u: an inf or NaN in %s",
                     producer->call, producer->index, elements);
    }
    return fan_from_python(err);
}

/* ---- E17 ---- */

/* text_append: to the str *to; sets it to NULL on failure. */
static void text_append(void *to, const char *text)
{
    PyObject **all = to;
    if (!*all)
        return;
    PyObject *piece = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    PyUnicode_Append(all, piece);
    Py_XDECREF(piece);
}

PyObject *fan_explain_pass(const fan_pass *pass, const fan_node *only)
{
    PyObject *text = PyUnicode_FromString("");
    fan_pass_explain(pass, only, &(fan_text){text_append, &text});
    return text;
}

/* ---- E14: the error that ends a pass ---- */

enum {
    MOST_NOTES = 16
};

/* An attribute of an exception: when passes added their notes (fan_mark_new). An exception that is
 * raised again has those of passes that were over when this one began. */
static const char stamps_name[] = "__fanin_notes__";

/* note_stamps: The dict of an exception from notes to their stamps; new reference; NULL: none can
 * be kept. */
static PyObject *note_stamps(PyObject *e)
{
    PyObject *stamps = PyObject_GetAttrString(e, stamps_name);
    PyErr_Clear();
    if (stamps && PyDict_CheckExact(stamps))
        return stamps;
    Py_XDECREF(stamps);
    stamps = PyDict_New();
    if (stamps && PyObject_SetAttrString(e, stamps_name, stamps) < 0)
        Py_CLEAR(stamps);
    PyErr_Clear();
    return stamps;
}

static void note_stamp(PyObject *stamps, PyObject *note)
{
    if (!stamps || !note)
        return;
    PyObject *now = PyLong_FromUnsignedLongLong(fan_mark_new());
    if (now)
        (void)PyDict_SetItem(stamps, note, now);
    Py_XDECREF(now);
    PyErr_Clear();
}

/* notes_forget: removes the notes that passes added before `began`. */
static void notes_forget(PyObject *notes, PyObject *stamps, uint64_t began)
{
    PyObject *all = PyDict_Items(stamps);
    for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(all); i++) {
        PyObject *note = PyTuple_GET_ITEM(PyList_GET_ITEM(all, i), 0);
        PyObject *stamp = PyTuple_GET_ITEM(PyList_GET_ITEM(all, i), 1);
        if (PyLong_Check(stamp) && PyLong_AsUnsignedLongLong(stamp) > began)
            continue;
        Py_ssize_t at = PySequence_Index(notes, note);
        if (at >= 0)
            (void)PySequence_DelItem(notes, at);
        PyErr_Clear();
        (void)PyDict_DelItem(stamps, note);
        PyErr_Clear();
    }
    PyErr_Clear();
    Py_XDECREF(all);
}

/* notes_fold: counts one note more in the note that counts, which is added if there is none. */
static void notes_fold(PyObject *notes, PyObject *stamps)
{
    unsigned n = 0;
    Py_ssize_t at = PyList_GET_SIZE(notes);
    while (at > 0 && n == 0) {
        PyObject *one = PyList_GET_ITEM(notes, --at);
        const char *words = NULL;
        if (PyUnicode_Check(one))
            words = PyUnicode_AsUTF8(one);
        if (!words || sscanf(words, ".. and %u notes more", &n) != 1)
            n = 0;
    }
    PyObject *text =
        PyUnicode_FromFormat(".. and %u notes more, of the passes around these", n + 1);
    if (text && n) {
        if (stamps)
            (void)PyDict_DelItem(stamps, PyList_GET_ITEM(notes, at));
        PyErr_Clear();
        (void)PyList_SetItem(notes, at, Py_NewRef(text));
    } else if (text) {
        (void)PyList_Append(notes, text);
    }
    note_stamp(stamps, text);
    Py_XDECREF(text);
}

/* add_note: A note of this pass; takes the reference to a str; NULL or "": none. Forgets notes of
 * earlier passes, skips a note that exists, and limits their number: endless nested passes would
 * add a thousand. */
static void add_note(const fan_pass *pass, PyObject *e, PyObject *note)
{
    PyErr_Clear(); /* only the error itself counts, here and below */
    if (!note || !e || !PyUnicode_GET_LENGTH(note)) {
        Py_XDECREF(note);
        return;
    }
    PyObject *notes = PyObject_GetAttrString(e, "__notes__");
    PyErr_Clear();
    PyObject *stamps = note_stamps(e);
    bool list = notes && PyList_Check(notes);
    if (list && stamps)
        notes_forget(notes, stamps, fan_pass_id(pass));
    bool exists = list && PySequence_Contains(notes, note) == 1;
    PyErr_Clear();
    if (!exists && list && PyList_GET_SIZE(notes) >= MOST_NOTES) {
        notes_fold(notes, stamps);
    } else if (!exists) {
        fan_exception_note(e, Py_NewRef(note));
        note_stamp(stamps, note);
    }
    PyErr_Clear();
    Py_XDECREF(stamps);
    Py_XDECREF(notes);
    Py_DECREF(note);
}

/* note_of_node: "in NAME (node 3, made at file.py:3): 1 of 2 nodes had run"; a node without a name
 * has its number in its text. */
static PyObject *note_of_node(const fan_node *n, uint32_t ran, uint32_t all)
{
    const fan_node_label name = fan_node_name(n);
    const char *word = n->ops->leaf ? "leaf" : "node";
    PyObject *call_site = call_site_of(n);
    char number[32] = "";
    if (fan_node_object(n)->name)
        PyOS_snprintf(number, sizeof number, "%s %llu", word, (unsigned long long)n->number);
    if (!number[0] && !call_site)
        return PyUnicode_FromFormat("in %s: %u of %u nodes had run", name.text, ran, all);
    if (!call_site) {
        return PyUnicode_FromFormat("in %s (%s): %u of %u nodes had run", name.text, number, ran,
                                    all);
    }
    if (number[0])
        fan_append(number, sizeof number, ", ");
    return PyUnicode_FromFormat("in %s (%smade at %U): %u of %u nodes had run", name.text, number,
                                call_site, ran, all);
}

void *fan_error_take(const fan_pass *pass, const fan_node *n, uint32_t ran, fan_status status,
                     const fan_error *err)
{
    uint32_t ran_now, all;
    (void)fan_pass_at(pass, &ran_now, &all);
    fan_raise(status, err);
    PyObject *e = fan_exception_take();
    const char *where = fan_pass_seeded(pass) ? "between nodes" : "in the roots";
    PyObject *note;
    if (n)
        note = note_of_node(n, ran, all);
    else
        note = PyUnicode_FromFormat("%s: %u of %u nodes had run", where, ran, all);
    add_note(pass, e, note);
    return e;
}

void fan_py_pass_failed(const fan_pass *pass, fan_status status, const fan_error *err)
{
    uint32_t ran, all;
    const fan_node *n = fan_pass_at(pass, &ran, &all);
    PyObject *e;
    if (fan_pass_error_has_location(pass))
        e = fan_exception_take();
    else
        e = fan_error_take(pass, n, ran, status, err);
    PyObject *lost = PyUnicode_FromString("");
    fan_pass_lost(pass, &(fan_text){text_append, &lost});
    add_note(pass, e, lost);
    fan_exception_put(e);
}

/* note_other: adds to an exception that another one was raised beside it, with its notes. */
static void note_other(PyObject *e, PyObject *other)
{
    PyObject *notes = PyObject_GetAttrString(other, "__notes__");
    PyErr_Clear();
    PyObject *text = PyUnicode_FromFormat("beside it: %R, %S", other, fan_or_none(notes));
    PyObject *stamps = note_stamps(e);
    note_stamp(stamps, text);
    fan_exception_note(e, text);
    Py_XDECREF(stamps);
    Py_XDECREF(notes);
}

/* An exception that is no Exception, such as KeyboardInterrupt, goes before one that is; else the
 * first. */
void *fan_error_both(void *first, void *second)
{
    bool swap = PyErr_GivenExceptionMatches(first, PyExc_Exception) &&
                !PyErr_GivenExceptionMatches(second, PyExc_Exception);
    PyObject *e = first;
    PyObject *other = second;
    if (swap) {
        e = second;
        other = first;
    }
    if (e != other) /* else two nodes raised one object */
        note_other(e, other);
    Py_DECREF(other);
    return e;
}

/* _exit: buffered output of the parent must not be written twice. */
void fan_error_orphaned(void *error)
{
    PyObject *e = error;
    PyObject *text = PyUnicode_FromFormat("%s: %S", Py_TYPE(e)->tp_name, e);
    const char *words = NULL;
    if (text)
        words = PyUnicode_AsUTF8(text);
    if (!words)
        words = Py_TYPE(e)->tp_name;
    const char *const parts[] = {"fanin: a fork on a worker of a pass: the pass cannot continue in "
                                 "this child process, which ends: ",
                                 words, "\n"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (write(STDERR_FILENO, parts[i], strlen(parts[i])) < 0)
            break;
    }
    _exit(1);
}
