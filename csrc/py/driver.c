#include "py/driver.h"

#include "base/fork.h"

#include <string.h>

/* The driver of this process. The lock is held while it is opened, with the GIL let go. */
static struct {
    pthread_mutex_t lock;
    fan_cuda *cuda; /* held; NULL: not opened */
    char *path;     /* NULL: the system's */
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void in_child(void) { (void)pthread_mutex_init(&driver.lock, NULL); /* who held it is not here */ }

static fan_fork driver_fork = {.child = in_child};

fan_status fan_driver_open(fan_cuda **out, fan_error *err)
{
    fan_status status = FAN_OK;
    *out = NULL;
    (void)fan_fork_add(&driver_fork);
    (void)pthread_mutex_lock(&driver.lock);
    if (!driver.cuda)
        status = fan_cuda_open(driver.path, &driver.cuda, err);
    if (status == FAN_OK)
        *out = fan_cuda_hold(driver.cuda);
    (void)pthread_mutex_unlock(&driver.lock);
    return status;
}

fan_cuda *fan_driver_opened(void)
{
    (void)pthread_mutex_lock(&driver.lock);
    fan_cuda *c = driver.cuda ? fan_cuda_hold(driver.cuda) : NULL;
    (void)pthread_mutex_unlock(&driver.lock);
    return c;
}

/* driver_compile: has fanin._kernels compile the kernels for a device that has none. -1 with an exception. */
static int driver_compile(fan_cuda *c, int index, int compute, fan_error *refused)
{
    const fan_cuda_api *api = fan_cuda_driver(c);
    PyObject *module = PyImport_ImportModule("fanin._kernels"), *made = NULL;
    const char *words;
    Py_buffer code;
    int result = -1;
    if (module)
        made = PyObject_CallMethod(module, "image", "siis", api->path, api->version, compute, refused->text);
    if (made && PyArg_ParseTuple(made, "y*s:fanin._kernels.image", &code, &words)) {
        fan_status status = fan_cuda_give_kernels(c, index, code.buf, (size_t)code.len, words, refused);
        PyBuffer_Release(&code);
        if (status == FAN_OK)
            result = 0;
        else
            fan_raise(status, refused);
    }
    Py_XDECREF(made);
    Py_XDECREF(module);
    return result;
}

int fan_cuda_device_at(long index, fan_device **out)
{
    fan_cuda *c = NULL;
    fan_error err = {0};
    fan_status status;
    int compute = 0;
    *out = NULL;
    if (index < 0 || index > FAN_MOST_DEVICES) {
        PyErr_Format(PyExc_ValueError, "there is no cuda:%ld: no machine has so many devices", index);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = fan_driver_open(&c, &err);
    if (status == FAN_OK)
        status = fan_cuda_device(c, (int)index, out, &err);
    if (status != FAN_OK && c)
        compute = fan_cuda_wants_kernels(c, (int)index);
    if (!compute)
        fan_cuda_drop(c);
    Py_END_ALLOW_THREADS;
    if (compute) {
        bool raised = driver_compile(c, (int)index, compute, &err) < 0;
        Py_BEGIN_ALLOW_THREADS;
        if (!raised)
            status = fan_cuda_device(c, (int)index, out, &err);
        fan_cuda_drop(c);
        Py_END_ALLOW_THREADS;
        if (raised)
            return -1;
    }
    if (status == FAN_OK)
        return 0;
    fan_raise(status, &err);
    return -1;
}

int fan_cuda_device_arg(const char *name, fan_device **out)
{
    const char *digits = name + 5;
    long index = 0;
    *out = NULL;
    if (strcmp(name, "cuda") != 0 &&
        (strncmp(name, "cuda:", 5) != 0 || !*digits || digits[strspn(digits, "0123456789")])) {
        PyErr_Format(PyExc_ValueError, "unknown device '%.80s': CUDA's devices are \"cuda:0\", \"cuda:1\" ..", name);
        return -1;
    }
    for (const char *at = digits; name[4] && *at; at++)
        index = index > FAN_MOST_DEVICES ? index : 10 * index + (*at - '0'); /* beyond it no driver has any */
    if (index <= FAN_MOST_DEVICES)
        return fan_cuda_device_at(index, out);
    PyErr_Format(PyExc_ValueError, "there is no %.80s: no machine has so many devices", name);
    return -1;
}

fan_stream *fan_cuda_stream_arg(fan_device *d, uint64_t handle)
{
    fan_stream *s = NULL;
    fan_error err = {0};
    fan_status status = fan_cuda_stream(d, handle, &s, &err);
    if (status != FAN_OK)
        fan_raise(status, &err);
    return s;
}

void fan_driver_use(char *path)
{
    (void)pthread_mutex_lock(&driver.lock);
    fan_cuda *old = driver.cuda;
    driver.cuda = NULL;
    char *was = driver.path;
    driver.path = path;
    (void)pthread_mutex_unlock(&driver.lock);
    PyMem_RawFree(was);
    fan_cuda_drop(old);
}
