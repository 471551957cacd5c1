/* backends: the table of backends. In order: a backend by number and name; the entries of all
 * backends; what threads enter of them; devices by their names, and fanin.devices. */
#include "py/device/backends.h"
#include "py/base/args.h"

#include <limits.h>
#include <string.h>

#define X(name) extern const fan_backend_entry fan_##name##_entry;
FAN_BACKENDS(X)
#undef X
#pragma weak fan_sim_entry

static const fan_backend_entry *const listed[] = {
#define X(name) &fan_##name##_entry,
    FAN_BACKENDS(X)
#undef X
};

/* next_backend: the first backend from number *i on that is there, whose number *i becomes; NULL:
 * none. */
static const fan_backend_entry *next_backend(size_t *i)
{
    while (*i < sizeof listed / sizeof *listed) {
        if (listed[*i])
            return listed[*i];
        ++*i;
    }
    return NULL;
}


const fan_backend_entry *fan_backend_of_dlpack(long type)
{
    const fan_backend_entry *b;
    for (size_t i = 0; (b = next_backend(&i)) != NULL; i++) {
        for (size_t k = 0; type && k < 2; k++) {
            if (b->backend->dlpack[k] == type)
                return b;
        }
    }
    return NULL;
}

const fan_backend_entry *fan_backend_named(const char *name)
{
    const fan_backend_entry *b;
    for (size_t i = 0; (b = next_backend(&i)) != NULL; i++) {
        if (strcmp(b->backend->name, name) == 0)
            return b;
    }
    return NULL;
}

int fan_backend_device(const fan_backend_entry *b, long index, fan_device **out)
{
    return FAN_CHECK_UNLOCKED(b->find(index, out, &err));
}

fan_stream *fan_backend_stream(fan_device *d, uint64_t handle)
{
    fan_stream *s = NULL;
    if (FAN_CHECK(d->backend->find_stream(d, handle, &s, &err)) < 0)
        return NULL;
    return s;
}

void fan_backends_keep(size_t bytes)
{
    const fan_backend_entry *b;
    for (size_t i = 0; (b = next_backend(&i)) != NULL; i++) {
        if (b->keep)
            b->keep(bytes);
    }
}

size_t fan_backends_trim(void)
{
    const fan_backend_entry *b;
    size_t bytes = 0;
    for (size_t i = 0; (b = next_backend(&i)) != NULL; i++) {
        if (b->trim)
            bytes += b->trim();
    }
    return bytes;
}

#define SCOPE "fanin.scope" /* a capsule of a scope; its context is the table */

static const fan_backend_scope *scope_table(PyObject *capsule)
{
    return PyCapsule_GetContext(capsule);
}

static void scope_drop(PyObject *capsule)
{
    scope_table(capsule)->drop(PyCapsule_GetPointer(capsule, SCOPE));
}

PyObject *fan_backends_entered(void)
{
    PyObject *list = PyList_New(0);
    const fan_backend_entry *b;
    for (size_t i = 0; list && (b = next_backend(&i)) != NULL; i++) {
        const fan_backend_scope *table = b->scope;
        if (!table)
            continue;
        void *scope = table->entered();
        if (!scope)
            continue;
        PyObject *capsule = PyCapsule_New(scope, SCOPE, NULL);
        if (!capsule)
            table->drop(scope);
        else if (PyCapsule_SetContext(capsule, (void *)(uintptr_t)table) == 0)
            (void)PyCapsule_SetDestructor(capsule, scope_drop);
        fan_list_add(&list, capsule);
    }
    return fan_tuple_of(list);
}

void fan_backends_enter(PyObject *entered)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entered); i++) {
        PyObject *capsule = PyTuple_GET_ITEM(entered, i);
        scope_table(capsule)->enter(PyCapsule_GetPointer(capsule, SCOPE));
    }
}

void fan_backends_leave(PyObject *entered)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entered); i++) {
        PyObject *capsule = PyTuple_GET_ITEM(entered, i);
        scope_table(capsule)->leave(PyCapsule_GetPointer(capsule, SCOPE));
    }
}

/* backend_index: the number after the name of a backend in `name`: 0 where there is none; LONG_MAX
 * if it is too large; -1: `name` is no name of its devices. */
static long backend_index(const fan_backend_entry *b, const char *name)
{
    size_t n = strlen(b->backend->name);
    long index = 0;
    if (strncmp(name, b->backend->name, n) != 0)
        return -1;
    if (!name[n] && b->bare_name)
        return 0;
    if (!b->count || name[n] != ':')
        return -1;
    const char *digits = name + n + 1;
    if (!*digits)
        return -1;
    if (digits[strspn(digits, "0123456789")])
        return -1;
    for (; *digits; digits++) {
        if (index > INT_MAX)
            return LONG_MAX;
        index = 10 * index + (*digits - '0');
    }
    return index;
}

int fan_device_arg(PyObject *o, fan_device **out)
{
    *out = NULL;
    if (!o || o == Py_None)
        return 0;
    if (!PyUnicode_Check(o)) {
        return fan_set_error(PyExc_TypeError,
                             "expected a device's name, as in \"cpu\" or \"sim:0\", got %.80s",
                             Py_TYPE(o)->tp_name);
    }
    const char *name = fan_word_of(o);
    if (!name)
        return -1;
    const fan_backend_entry *b;
    for (size_t i = 0; (b = next_backend(&i)) != NULL; i++) {
        long index = backend_index(b, name);
        if (index >= 0 && index <= INT_MAX)
            return fan_backend_device(b, index, out);
        if (index > 0) {
            return fan_set_error(PyExc_ValueError, "there is no %U: no machine has so many devices",
                                 o);
        }
    }
    return fan_set_error(PyExc_ValueError,
                         "unknown device %R: devices are \"cpu\", \"cuda:0\" .. where there is a "
                         "driver, and, inside `with "
                         "fanin.sim.Machine():`, \"sim:0\", \"sim:1\" ..",
                         o);
}

static PyObject *devices(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *names = PyList_New(0);
    const fan_backend_entry *b;
    for (size_t i = 0; names && (b = next_backend(&i)) != NULL; i++) {
        const char *name = b->backend->name;
        int n = 0;
        if (!b->count) {
            fan_list_add(&names, PyUnicode_FromString(name));
            continue;
        }
        Py_BEGIN_ALLOW_THREADS
            n = b->count();
        Py_END_ALLOW_THREADS
        for (int k = 0; names && k < n; k++)
            fan_list_add(&names, PyUnicode_FromFormat("%s:%d", name, k));
    }
    return names;
}

static PyObject *backend_of_dlpack(PyObject *Py_UNUSED(module), PyObject *type)
{
    long n = PyLong_AsLong(type);
    if (n == -1 && PyErr_Occurred())
        PyErr_Clear();
    const fan_backend_entry *b = fan_backend_of_dlpack(n);
    if (!b)
        Py_RETURN_NONE;
    return PyUnicode_FromString(b->backend->name);
}

#include "py/declared/backends.h"
