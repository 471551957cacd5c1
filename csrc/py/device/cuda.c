/* cuda: the CUDA driver for Python: opened at its first use.
 *
 * In order: the driver in use; what cuda_info returns of it; the kernels that it lacks, compiled in
 * Python; devices by number and address. */
#include "py/base/args.h"
#include "py/base/handles.h"
#include "py/device/backends.h"

#include "device/cuda/cuda.h"

#include <stdio.h>
#include <string.h>

static PyObject *cuda_use(PyObject *Py_UNUSED(module), PyObject *path)
{
    const char *given = NULL;
    if (path != Py_None) {
        given = PyUnicode_AsUTF8(path);
        if (!given)
            return NULL;
    }
    return FAN_DONE_UNLOCKED(fan_driver_use(given, &err));
}

/* driver_open: the driver in use; a hold, or NULL with an exception, which may have been live. */
static fan_cuda *driver_open(void)
{
    fan_cuda *c = NULL;
    if (PyErr_Occurred())
        return NULL;
    if (FAN_CHECK(fan_driver_open(&c, &err)) < 0)
        return NULL;
    return c;
}

/* put_text: sets (*dict)[name] to a text; without memory *dict becomes NULL, with an exception. */
static void put_text(PyObject **dict, const char *name, const char *words)
{
    PyObject *text = PyUnicode_FromString(words);
    if (!text || PyDict_SetItemString(*dict, name, text) < 0)
        Py_CLEAR(*dict);
    Py_XDECREF(text);
}

/* devices_of: a list with a line about each device; NULL with an exception. */
static PyObject *devices_of(fan_cuda *c)
{
    PyObject *devices = PyList_New(0);
    for (int i = 0; devices && i < fan_cuda_count(c); i++) {
        char text[256];
        fan_error err = {0};
        if (fan_cuda_describe(c, i, text, sizeof text, &err) != FAN_OK)
            snprintf(text, sizeof text, "%.250s", err.text);
        fan_list_add(&devices, PyUnicode_FromString(text));
    }
    return devices;
}

/* kernels_of: a dict from the devices that have kernels to how they came; NULL with an exception.
 */
static PyObject *kernels_of(fan_cuda *c)
{
    PyObject *kernels = PyDict_New();
    for (int i = 0; kernels && i < fan_cuda_count(c); i++) {
        const char *words = fan_cuda_kernels(c, i);
        char name[32];
        if (!words)
            continue;
        snprintf(name, sizeof name, "cuda:%d", i);
        put_text(&kernels, name, words);
    }
    return kernels;
}

/* missing_of: a dict from the features that the driver lacks to the functions it lacks; NULL with
 * an exception. */
static PyObject *missing_of(const fan_cuda_api *api)
{
    PyObject *missing = PyDict_New();
    for (fan_cuda_feature i = 0; missing && i < FAN_CUDA_FEATURES; i++) {
        if (!api->has[i])
            put_text(&missing, fan_cuda_feature_words(i), api->missing[i]);
    }
    return missing;
}

static PyObject *cuda_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_cuda *c = NULL;
    fan_error err = {0};
    fan_status status;
    Py_BEGIN_ALLOW_THREADS
        status = fan_driver_open(&c, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return Py_BuildValue("{s:s,s:i}", "why", err.text, "code", err.code);
    const fan_cuda_api *api = fan_cuda_driver(c);
    PyObject *devices = devices_of(c);
    PyObject *kernels = kernels_of(c);
    PyObject *missing = missing_of(api);
    PyObject *made = NULL;
    if (devices && kernels && missing) {
        made = Py_BuildValue("{s:s,s:i,s:O,s:O,s:O}", "path", api->path, "version", api->version,
                             "devices", devices, "kernels", kernels, "missing", missing);
    }
    Py_XDECREF(devices);
    Py_XDECREF(kernels);
    Py_XDECREF(missing);
    fan_cuda_drop(c);
    return made;
}

static PyObject *cuda_leave_out(PyObject *Py_UNUSED(module), PyObject *words)
{
    uint64_t bits;
    if (fan_plans_arg(words, &bits) < 0)
        return NULL;
    fan_cuda *c = driver_open();
    if (!c)
        return NULL;
    fan_cuda_leave_out(c, bits);
    fan_cuda_drop(c);
    Py_RETURN_NONE;
}

static PyObject *kernels_made(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyUnicode_FromString(fan_kernels_made);
}

/* cuda_compile: fan_compile_kernels by fanin._kernels, on any thread. */
static fan_status cuda_compile(fan_cuda *c, int index, int compute, fan_error *err)
{
    const fan_cuda_api *api = fan_cuda_driver(c);
    const char *words;
    Py_buffer code;
    fan_status status;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *made =
        fan_call("fanin._kernels", "image", "(siis)", api->path, api->version, compute, err->text);
    if (made && PyArg_ParseTuple(made, "y*s:fanin._kernels.image", &code, &words)) {
        status = fan_cuda_give_kernels(c, index, code.buf, (size_t)code.len, words, err);
        PyBuffer_Release(&code);
    } else {
        status = fan_from_python(err);
    }
    Py_XDECREF(made);
    PyGILState_Release(gil);
    return status;
}

void fan_cuda_compile_in_python(void)
{
    fan_driver_compile(cuda_compile);
}

static PyObject *kernels_source(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBytes_FromStringAndSize((const char *)fan_kernels_source,
                                     (Py_ssize_t)fan_kernels_source_bytes);
}

static PyObject *cuda_here(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_cuda *c = driver_open();
    if (!c)
        return NULL;
    int index = fan_cuda_here(c);
    fan_cuda_drop(c);
    return PyLong_FromLong(index);
}

static PyObject *cuda_holding(PyObject *Py_UNUSED(module), PyObject *address)
{
    unsigned long long at = PyLong_AsUnsignedLongLong(address);
    fan_cuda *c = driver_open();
    if (!c)
        return NULL;
    int index = fan_cuda_holding(c, at);
    fan_cuda_drop(c);
    return PyLong_FromLong(index);
}

static PyObject *cuda_active(PyObject *Py_UNUSED(module), PyObject *number)
{
    long index = PyLong_AsLong(number);
    fan_cuda *c = driver_open();
    if (!c)
        return NULL;
    bool active = index >= 0 && index <= INT32_MAX && fan_cuda_active(c, (int)index);
    fan_cuda_drop(c);
    return PyBool_FromLong(active);
}

#include "py/declared/cuda.h"
