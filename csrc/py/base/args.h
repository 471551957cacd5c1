/* args: how calls from Python reach their C functions, and how these read their arguments.
 *
 * csrc/py/declare.py writes py/declared/X.h from core.pyi, for each class X and each file with
 * functions of the module. A C file includes it after its functions. It defines tables of names for
 * fan_parse, and a door for each function: the function with CPython's signature that parses the
 * arguments and calls ours. A door that is a step of explored schedules (base/thread.h, Calls and
 * turns) first reports to the scheduler, if there is one, what the call may
 * access. */
#ifndef FAN_PY_ARGS_H
#define FAN_PY_ARGS_H

#include "py/base/py.h"

/* A function's parameters, in order: first those that are given by position only. */
typedef struct fan_decl {
    const char *call; /* for messages: "add", "Node" */
    const char *const *names;
    /* a letter for each, "o" for any object (declare.py, KINDS); NULL: all are "o" */
    const char *kinds;
    /* by_place: how many may be given by position */
    unsigned char n;
    unsigned char by_place_only;
    unsigned char by_place;
    unsigned char required;
} fan_decl;

/* fan_parse: writes the arguments of a vectorcall to values[n]: borrowed; NULL: not given. Returns
 * -1 with a TypeError. A bool, NumPy's too, is written as Py_True or Py_False. */
int fan_parse(const fan_decl *d, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
              PyObject **values);
/* fan_parse_tuple: as fan_parse, for tp_new and tp_init; named may be NULL. */
int fan_parse_tuple(const fan_decl *d, PyObject *args, PyObject *named, PyObject **values);

/* fan_sched_enter_or_raise: -1 with an exception if the machine starts no more calls. */
int fan_sched_enter_or_raise(void);
/* fan_step_begin: opens a call as a step of an explored schedule, and reports what it may access:
 * the call writes its self and those of its arguments that are ours. */
int fan_step_begin(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
/* fan_step_begin_one: as fan_step_begin, for a call with one argument, or with none (NULL). */
int fan_step_begin_one(PyObject *self, PyObject *arg);
/* fan_step_begin_type: as fan_step_begin, for a call of a class, which may make a node. Each
 * returns -1 with an exception. */
int fan_step_begin_type(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#define FAN_FASTCALL PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames

#define FAN_DOOR_ANY(call, n)                                          \
    static PyObject *call##_door(FAN_FASTCALL)                         \
    {                                                                  \
        PyObject *values[n];                                           \
        if (fan_parse(&call##_decl, args, nargs, kwnames, values) < 0) \
            return NULL;                                               \
        return call(self, values);                                     \
    }
#define FAN_DOOR_ONE(call)                                             \
    static PyObject *call##_door(FAN_FASTCALL)                         \
    {                                                                  \
        PyObject *value;                                               \
        if (fan_parse(&call##_decl, args, nargs, kwnames, &value) < 0) \
            return NULL;                                               \
        return call(self, value);                                      \
    }
/* Two functions, so that the fast one saves no registers for the other. */
#define FAN_DOOR_FAST(call, n)                                             \
    __attribute__((noinline)) static PyObject *call##_parsed(FAN_FASTCALL) \
    {                                                                      \
        PyObject *values[n];                                               \
        if (fan_parse(&call##_decl, args, nargs, kwnames, values) < 0)     \
            return NULL;                                                   \
        return call(self, values);                                         \
    }                                                                      \
    static PyObject *call##_door(FAN_FASTCALL)                             \
    {                                                                      \
        PyObject *result = NULL;                                           \
        if (call##_fast(self, args, nargs, kwnames, &result))              \
            return result;                                                 \
        return call##_parsed(self, args, nargs, kwnames);                  \
    }
/* A class: tp_new, and the type's vectorcall (FAST: which calls fast first). */
#define FAN_VECTORCALL PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames
#define FAN_DOOR_NEW(call, n)                                                                \
    __attribute__((unused)) static PyObject *call##_door(PyTypeObject *type, PyObject *args, \
                                                         PyObject *named)                    \
    {                                                                                        \
        PyObject *values[n];                                                                 \
        if (fan_parse_tuple(&call##_decl, args, named, values) < 0)                          \
            return NULL;                                                                     \
        return call(type, values);                                                           \
    }                                                                                        \
    __attribute__((unused, noinline)) static PyObject *call##_vector(FAN_VECTORCALL)         \
    {                                                                                        \
        PyObject *values[n];                                                                 \
        Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);                                       \
        if (fan_parse(&call##_decl, args, nargs, kwnames, values) < 0)                       \
            return NULL;                                                                     \
        return call((PyTypeObject *)type, values);                                           \
    }
#define FAN_DOOR_NEW_FAST(call, n)                             \
    FAN_DOOR_NEW(call, n)                                      \
    static PyObject *call##_fast_vector(FAN_VECTORCALL)        \
    {                                                          \
        PyObject *result = NULL;                               \
        if (call##_fast(type, args, nargsf, kwnames, &result)) \
            return result;                                     \
        return call##_vector(type, args, nargsf, kwnames);     \
    }

/* FAN_STEP: a function of CPython's that is a step of an explored schedule, if there is a
 * scheduler: `begin` opens it. Two functions, so that the usual one saves no registers for the
 * other; `given` are the parameters that are `declared`. */
#define FAN_STEP(type, failed, name, declared, given, begin, call)  \
    __attribute__((noinline)) static type name##_scheduled declared \
    {                                                               \
        if (begin < 0)                                              \
            return failed;                                          \
        type result = call;                                         \
        fan_sched_leave();                                          \
        return result;                                              \
    }                                                               \
    static type name##_step declared                                \
    {                                                               \
        if (fan_sched_active())                                     \
            return name##_scheduled given;                          \
        return call;                                                \
    }
#define FAN_STEP_FAST(call)                                                        \
    FAN_STEP(PyObject *, NULL, call, (FAN_FASTCALL), (self, args, nargs, kwnames), \
             fan_step_begin(self, args, nargs, kwnames), call##_door(self, args, nargs, kwnames))
#define FAN_STEP_VECTOR(call, vector)                                                          \
    FAN_STEP(PyObject *, NULL, call##_vector, (FAN_VECTORCALL), (type, args, nargsf, kwnames), \
             fan_step_begin_type(type, args, PyVectorcall_NARGS(nargsf), kwnames),             \
             vector(type, args, nargsf, kwnames))
/* Of METH_NOARGS, METH_O and METH_VARARGS. */
#define FAN_STEP_ONE(call)                                                           \
    FAN_STEP(PyObject *, NULL, call, (PyObject * self, PyObject * arg), (self, arg), \
             fan_step_begin_one(self, arg), call(self, arg))
#define FAN_STEP_REPR(call)                                                                     \
    FAN_STEP(PyObject *, NULL, call, (PyObject * self), (self), fan_step_begin_one(self, NULL), \
             call(self))
#define FAN_STEP_GET(call)                                                              \
    FAN_STEP(PyObject *, NULL, call, (PyObject * self, void *closure), (self, closure), \
             fan_step_begin_one(self, NULL), call(self, closure))
#define FAN_STEP_SET(call)                                                      \
    FAN_STEP(int, -1, call, (PyObject * self, PyObject * value, void *closure), \
             (self, value, closure), fan_step_begin_one(self, value), call(self, value, closure))

/* ---- one argument: each returns -1 (or NULL) with an exception that names it ---- */

/* fan_index: an exact integer: bool is a TypeError, a negative one an exception of class
 * `negative`; NULL: *out is -1 then, as for one that 64 bits do not hold. `what` begins the
 * message. -1 with an exception. */
int fan_index(PyObject *o, const char *what, PyObject *negative, int64_t *out);
/* fan_is_array: an ndarray, or an object of a class with DLPack. A live exception stays. */
bool fan_is_array(PyObject *o);
/* fan_slot_index: fan_index of a slot. An array is none, not even one of a single integer: it is
 * meant as a
 * gradient. */
int fan_slot_index(PyObject *o, const char *what, int64_t *out);
/* fan_budget_arg: a number of bytes, math.inf for no bound. -1 with an exception. */
int fan_budget_arg(PyObject *o, const char *what, uint64_t *out);
/* fan_buffer_budget_arg: as fan_budget_arg, or "auto". */
int fan_buffer_budget_arg(PyObject *o, uint64_t *out);
PyObject *fan_budget_wrap(uint64_t budget); /* "auto", a number or math.inf */
/* fan_number_arg: an int that fits 64 bits; NULL leaves *out as it is. `what` begins the
 * message. */
int fan_number_arg(PyObject *o, const char *what, int64_t *out);
/* fan_small_index: a plain int from 0 on; -1, without an exception: something else. */
static inline Py_ssize_t fan_small_index(PyObject *o)
{
    Py_ssize_t i;
    if (!PyLong_CheckExact(o))
        return -1;
    /* One digit, without a call: an add of a batch reads three. */
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)o))
        return PyUnstable_Long_CompactValue((PyLongObject *)o);
#else
    if (Py_SIZE(o) == 0)
        return 0;
    if (Py_SIZE(o) == 1)
        return (Py_ssize_t)((PyLongObject *)o)->ob_digit[0];
#endif
    i = PyLong_AsSsize_t(o);
    if (i == -1 && PyErr_Occurred())
        PyErr_Clear();
    return i;
}
/* fan_text_arg: a str as the core and its messages have it: no NUL in it. Lives as long as the
 * str. */
const char *fan_text_arg(PyObject *text);
/* fan_is_bare: is `o` one array (or Slot, or scalar) where a sequence of them was expected? */
int fan_is_bare(PyObject *o);
/* fan_sequence_arg: a tuple of what a sequence holds; *out is a new reference. */
int fan_sequence_arg(PyObject *o, const char *what, PyObject **out);
/* fan_accumulate_arg: a dtype, or "exact". */
int fan_accumulate_arg(PyObject *o, fan_dtype *dtype, bool *exact);
/* fan_scale_arg: D10: a number; the core checks whether the sum's dtype allows it. */
int fan_scale_arg(PyObject *o, fan_take *how);
/* fan_weight_arg: W4: a finite number, exact as a float; None: none. `name`: the parameter. */
int fan_weight_arg(PyObject *o, const char *name, fan_weight *out);
/* fan_late_arg: W5: weights= of a take: a mapping from keys, or a sequence in the order of arrival;
 * sorted by key, in memory of fan_alloc. */
int fan_late_arg(PyObject *o, fan_late_weight **out, size_t *n);
/* fan_scale_finish: fills in the integer of a scale whose real part is set (how->real). */
void fan_scale_finish(fan_take *how);
/* fan_plans_arg: the words of leave_out, a tuple, as bits of plans (fan_plan_bits). */
int fan_plans_arg(PyObject *words, uint64_t *bits);

/* fan_ints: integers as a tuple. */
PyObject *fan_ints(int n, const int64_t *items);

#endif
