/* inside_rules: the pure functions of the rules as Python has them: plain numbers in, plain tuples
 * and dicts out. For tests that enumerate them.
 *
 * A place is a pair (device, stream); a slot is (C, A, R, has_event); rules come as a frozenset of
 * strings: {"S4", "S9"}. Argument order and names are those of tests/spec/stream_rules.py for the
 * rules S, and of tests/reference for the rules
 * A. */
#include "inside.h"

#include "array/sparse.h"
#include "buffer/accum.h"
#include "buffer/sync.h"
#include "device/capture_rule.h"

typedef unsigned long long ull;

static int place_arg(PyObject *o, void *out)
{
    ull device, stream;
    if (!PyTuple_Check(o) ||
        !PyArg_ParseTuple(o, "KK;a place is (device, stream)", &device, &stream)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a place is (device, stream)");
        return 0;
    }
    *(fan_stream_id *)out = (fan_stream_id){device, stream};
    return 1;
}

static int slot_arg(PyObject *o, void *out)
{
    fan_sync_slot *s = out;
    int has_event;
    *s = (fan_sync_slot){0};
    if (!PyTuple_Check(o) ||
        !PyArg_ParseTuple(o, "O&O&O&p;a slot is (C, A, R, has_event)", place_arg, &s->consumer,
                          place_arg, &s->accum, place_arg, &s->ready, &has_event)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a slot is (C, A, R, has_event)");
        return 0;
    }
    s->has_event = has_event;
    return 1;
}

static PyObject *place_of(fan_stream_id p)
{
    return Py_BuildValue("(KK)", (ull)p.device, (ull)p.stream);
}

static PyObject *slot_of(fan_sync_slot s)
{
    return Py_BuildValue("(NNNN)", place_of(s.consumer), place_of(s.accum), place_of(s.ready),
                         PyBool_FromLong(s.has_event));
}

static PyObject *rules_of(uint64_t rules)
{
    PyObject *set = PyFrozenSet_New(NULL);
    for (int bit = 0; set && bit < FAN_S_RULES + FAN_A_RULES; bit++) {
        bool of_s = bit < FAN_S_RULES;
        PyObject *word = NULL;
        if (!(rules >> bit & 1u))
            continue;
        if (of_s) {
            word = PyUnicode_FromFormat("S%d", bit + 1);
        } else {
            word = PyUnicode_FromFormat("A%d", bit + 1 - FAN_S_RULES);
        }
        if (!word || PySet_Add(set, word) < 0)
            Py_CLEAR(set);
        Py_XDECREF(word);
    }
    return set;
}

static PyObject *truth(bool b)
{
    return PyBool_FromLong(b);
}

/* S */

static PyObject *sync_add(PyObject *Py_UNUSED(module), PyObject *args)
{
    ull D;
    fan_stream_id P, C, current;
    fan_sync_slot slot;
    fan_sync_add p;
    if (!PyArg_ParseTuple(args, "KO&O&O&O&:rules_sync_add", &D, place_arg, &P, place_arg, &C,
                          place_arg, &current, slot_arg, &slot))
        return NULL;
    p = fan_sync_add_plan(D, P, C, current, slot);
    return Py_BuildValue("{s:C,s:N,s:N,s:N,s:N,s:N}", "how", fan_sync_letter(p.stream_case), "P",
                         place_of(p.producer), "slot", slot_of(p.slot), "record", truth(p.record),
                         "mark", truth(p.mark), "rules", rules_of(p.rules));
}

static PyObject *sync_convert(PyObject *Py_UNUSED(module), PyObject *args)
{
    ull D;
    fan_sync_add add = {0};
    fan_sync_convert p;
    if (!PyArg_ParseTuple(args, "KO&O&:rules_sync_convert", &D, place_arg, &add.producer, place_arg,
                          &add.slot.accum))
        return NULL;
    p = fan_sync_convert_plan(D, &add);
    return Py_BuildValue("{s:N,s:N}", "on_producer", truth(p.on_producer), "rules",
                         rules_of(p.rules));
}

static PyObject *sync_fold(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_sync_slot slot;
    fan_sync_fold p;
    if (!PyArg_ParseTuple(args, "O&:rules_sync_fold", slot_arg, &slot))
        return NULL;
    p = fan_sync_fold_plan(slot);
    return Py_BuildValue("{s:N,s:N}", "slot", slot_of(p.slot), "rules", rules_of(p.rules));
}

static PyObject *sync_term(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_stream_id A, P;
    int first, covered;
    fan_sync_term p;
    if (!PyArg_ParseTuple(args, "O&O&pp:rules_sync_term", place_arg, &A, place_arg, &P, &first,
                          &covered))
        return NULL;
    p = fan_sync_term_plan(A, P, first, covered);
    return Py_BuildValue("{s:N,s:N,s:N}", "wait", truth(p.wait), "mark", truth(p.mark), "rules",
                         rules_of(p.rules));
}

static PyObject *sync_take(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_sync_slot slot;
    fan_stream_id consumer;
    fan_sync_take p;
    if (!PyArg_ParseTuple(args, "O&O&:rules_sync_take", slot_arg, &slot, place_arg, &consumer))
        return NULL;
    p = fan_sync_take_plan(slot, consumer);
    return Py_BuildValue("{s:N,s:N,s:N,s:N}", "wait", truth(p.wait), "record_now",
                         truth(p.record_now), "mark", truth(p.mark), "rules", rules_of(p.rules));
}

static PyObject *sync_finish(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_sync_slot slot;
    fan_stream_id taker;
    int has_out;
    fan_sync_fold p;
    if (!PyArg_ParseTuple(args, "O&pO&:rules_sync_finish", slot_arg, &slot, &has_out, place_arg,
                          &taker))
        return NULL;
    p = fan_sync_finish_plan(slot, has_out, taker);
    return Py_BuildValue("{s:N,s:N,s:N,s:N}", "wait_taker", truth(p.wait_taker), "mark_out",
                         truth(p.mark_out), "slot", slot_of(p.slot), "rules", rules_of(p.rules));
}

static PyObject *capture(PyObject *Py_UNUSED(module), PyObject *args)
{
    static const char *const words[] = {"go", "redirect", "error"};
    ull s, t;
    int s_free, s_legacy;
    if (!PyArg_ParseTuple(args, "KKpp:rules_capture", &s, &t, &s_free, &s_legacy))
        return NULL;
    return PyUnicode_FromString(words[fan_capture_rule(s, t, s_free, s_legacy)]);
}

static PyObject *plan_words(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *made = PyTuple_New(FAN_PLAN_COUNT);
    for (int i = 0; made && i < FAN_PLAN_COUNT; i++) {
        PyObject *word = PyUnicode_FromString(fan_plan_word(i));
        if (!word) {
            Py_CLEAR(made);
        } else {
            PyTuple_SET_ITEM(made, i, word);
        }
    }
    return made;
}

/* A */

static const char *const forms[] = {"undefined", "zero", "dense", "sparse", "object"};

static int side_arg(PyObject *o, void *out)
{
    fan_side *side = out;
    const char *form, *format;
    int reusable = 0;
    fan_format f = FAN_FORMAT_COO;
    if (!PyTuple_Check(o) ||
        !PyArg_ParseTuple(o, "ssp;a side is (form, format, reusable)", &form, &format, &reusable)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a side is (form, format, reusable)");
        return 0;
    }
    *side = (fan_side){.reusable = reusable};
    if (*format && !fan_format_from_name(format, &f)) {
        PyErr_Format(PyExc_ValueError, "no sparse format is called %s", format);
        return 0;
    }
    side->format = (int)f;
    for (int i = 0; i < 5; i++) {
        if (strcmp(form, forms[i]) == 0) {
            side->form = (fan_form)i;
            return 1;
        }
    }
    PyErr_Format(PyExc_ValueError, "no form is called %s", form);
    return 0;
}

static PyObject *accum(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_side old, new_;
    int recording = 0;
    fan_accum_plan p;
    if (!PyArg_ParseTuple(args, "O&O&|p:rules_accum", side_arg, &old, side_arg, &new_, &recording))
        return NULL;
    p = fan_accum(old, new_, recording);
    return Py_BuildValue("{s:s,s:s,s:N}", "action", fan_action_word(p.action), "result",
                         forms[p.result], "rules", rules_of(p.rules));
}

static PyObject *reusable(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dense", "writable",  "same_dtype", "disjoint",
                            "ours",  "exposed",   "donated",    "unshared",
                            "host",  "exclusive", "read_later", NULL};
    int f[11] = {0};
    fan_reuse facts;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$ppppppppppp:rules_reusable", names, f, f + 1,
                                     f + 2, f + 3, f + 4, f + 5, f + 6, f + 7, f + 8, f + 9,
                                     f + 10))
        return NULL;
    facts = (fan_reuse){f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10]};
    return PyUnicode_FromString(fan_reuse_words(fan_reusable(&facts)));
}

static PyObject *dtype_word(fan_dtype d)
{
    return d == FAN_DT_NONE ? Py_NewRef(Py_None) : PyUnicode_FromString(fan_dtype_name(d));
}

static int dtype_arg(PyObject *o, void *out)
{
    const char *name = PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : NULL;
    fan_dtype d = FAN_DT_NONE;
    if (o != Py_None && (!name || (d = fan_dtype_from_name(name)) == FAN_DT_NONE)) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "no dtype is called %R", o);
        return 0;
    }
    *(fan_dtype *)out = d;
    return 1;
}

static PyObject *promote(PyObject *Py_UNUSED(module), PyObject *words)
{
    static const struct {
        const char *name;
        fan_dtype_set bit;
    } weak[] = {{"weak bool", FAN_WEAK_BOOL},
                {"int", FAN_WEAK_INT},
                {"float", FAN_WEAK_FLOAT},
                {"complex", FAN_WEAK_COMPLEX}};
    fan_dtype_set set = 0;
    PyObject *items = PySequence_Tuple(words);
    if (!items)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        fan_dtype_set bit = 0;
        fan_dtype d;
        for (size_t k = 0; k < sizeof weak / sizeof *weak; k++) {
            if (PyUnicode_Check(item) && PyUnicode_CompareWithASCIIString(item, weak[k].name) == 0)
                bit = weak[k].bit;
        }
        if (!bit && (!dtype_arg(item, &d) || d == FAN_DT_NONE)) {
            Py_DECREF(items);
            return PyErr_Occurred() ? NULL
                                    : PyErr_Format(PyExc_ValueError, "no dtype is called None");
        }
        set = bit ? set | bit : fan_dtype_set_add(set, d, false);
    }
    Py_DECREF(items);
    return dtype_word(fan_dtype_set_promote(set));
}

static PyObject *accum_dtype(PyObject *Py_UNUSED(module), PyObject *args)
{
    fan_dtype d;
    fan_dtype wish = FAN_DT_NONE;
    if (!PyArg_ParseTuple(args, "O&|O&:rules_accum_dtype", dtype_arg, &d, dtype_arg, &wish))
        return NULL;
    return dtype_word(fan_accum_dtype(d, wish));
}

static PyObject *fit(PyObject *Py_UNUSED(module), PyObject *args)
{
    static const char *const words[] = {"exact", "reduce", "no"};
    int declared, slot_ndim, ndim;
    PyObject *slot, *given;
    int64_t slot_shape[FAN_MAX_NDIM], shape[FAN_MAX_NDIM];
    if (!PyArg_ParseTuple(args, "pOO:rules_fit", &declared, &slot, &given))
        return NULL;
    if ((slot_ndim = inside_ints(slot, slot_shape)) < 0 || (ndim = inside_ints(given, shape)) < 0)
        return NULL;
    return PyUnicode_FromString(words[fan_accum_fit(declared, slot_ndim, slot_shape, ndim, shape)]);
}

PyMethodDef inside_rules[] = {
    {"rules_sync_add", sync_add, METH_VARARGS,
     "rules_sync_add(D, P, C, current, slot, /)\n--\n\nS3-S5, S8-S11."},
    {"rules_sync_convert", sync_convert, METH_VARARGS,
     "rules_sync_convert(D, P, A, /)\n--\n\nS21."},
    {"rules_sync_fold", sync_fold, METH_VARARGS, "rules_sync_fold(slot, /)\n--\n\nS13-S17."},
    {"rules_sync_term", sync_term, METH_VARARGS, "rules_sync_term(A, P, /)\n--\n\nS12."},
    {"rules_sync_take", sync_take, METH_VARARGS,
     "rules_sync_take(slot, consumer, /)\n--\n\nS18, S19."},
    {"rules_sync_finish", sync_finish, METH_VARARGS,
     "rules_sync_finish(slot, has_out, taker, /)\n--\n\nS22."},
    {"rules_capture", capture, METH_VARARGS, "rules_capture(s, t, free, legacy, /)\n--\n\nS7."},
    {"rules_plan_words", plan_words, METH_NOARGS,
     "rules_plan_words()\n--\n\nThe waits, records and marks that can be left out."},
    {"rules_accum", accum, METH_VARARGS,
     "rules_accum(old, new, recording=False, /)\n--\n\nA1-A8; a side is (form, format, reusable)."},
    {"rules_reusable", (PyCFunction)(void (*)(void))reusable, METH_VARARGS | METH_KEYWORDS,
     "rules_reusable(**facts)\n--\n\nWhy an operand may or may not be written, in words."},
    {"rules_promote", promote, METH_O,
     "rules_promote(names, /)\n--\n\nA10; \"int\", \"float\", \"complex\" are Python scalars. None "
     "where there is "
     "none."},
    {"rules_accum_dtype", accum_dtype, METH_VARARGS,
     "rules_accum_dtype(dtype, wish=None, /)\n--\n\nA11."},
    {"rules_fit", fit, METH_VARARGS,
     "rules_fit(declared, slot_shape, shape, /)\n--\n\nA9: \"exact\", \"reduce\" or \"no\"."},
    {NULL, NULL, 0, NULL},
};
