/* Two threads of C fill one buffer, without the interpreter. two_threads.py compiles and runs it.
 *
 * Each producer makes gradients in memory of its own, which it writes again after each add, so it lets the buffer copy
 * them (FANIN_ADD_COPY). Each gradient has a key, so the sum has the same bits whichever thread is faster.
 */
#include <Python.h>

#include <fanin.h>

#include <pthread.h>
#include <string.h>

#define SIZE 8

static const fanin_api *api;

typedef struct producer {
    fanin_buffer *buffer;
    long number, steps;
    fanin_status status;
    fanin_failure why;
} producer;

/* produce: a thread; gradient k of producer i is (i + 1) / (k + 1) everywhere, and has key 2 * k + i. */
static void *produce(void *arg)
{
    producer *p = arg;
    float gradient[SIZE];
    int64_t shape[1] = {SIZE};
    fanin_tensor view = {.data = gradient, .device = {1, 0}, .ndim = 1, .dtype = {2, 32, 1}, .shape = shape};
    fanin_add_options options = {.struct_size = sizeof options, .flags = FANIN_ADD_KEY | FANIN_ADD_COPY};
    for (long k = 0; k < p->steps && p->status == FANIN_OK; k++) {
        for (int i = 0; i < SIZE; i++)
            gradient[i] = (float)(p->number + 1) / (float)(k + 1);
        options.key = 2 * k + p->number;
        p->status = api->buffer_add(p->buffer, 0, &view, &options, &p->why);
    }
    return NULL;
}

/* fill: both threads, from the first add to the sum. */
static fanin_status fill(long steps, fanin_value *sum, fanin_failure *why)
{
    pthread_t threads[2];
    producer producers[2];
    fanin_buffer *buffer;
    int started = 0;
    fanin_buffer_options options = {.struct_size = sizeof options, .name = "two threads"};
    fanin_status status = api->buffer_new(1, &options, &buffer, why);
    if (status != FANIN_OK)
        return status;
    status = api->buffer_expect(buffer, 0, 2 * steps, why);
    for (; started < 2 && status == FANIN_OK; started++) {
        producers[started] = (producer){.buffer = buffer, .number = started, .steps = steps};
        producers[started].why.struct_size = sizeof(fanin_failure);
        if (pthread_create(&threads[started], NULL, produce, &producers[started]) != 0) {
            strcpy(why->text, "a thread could not be started");
            status = FANIN_ERR_STATE;
            break;
        }
    }
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < started && status == FANIN_OK; i++)
        if ((status = producers[i].status) != FANIN_OK)
            *why = producers[i].why;
    if (status == FANIN_OK)
        status = api->buffer_take_one(buffer, 0, NULL, sum, why);
    api->buffer_free(buffer);
    return status;
}

/* sum(steps): an ndarray. */
static PyObject *sum(PyObject *module, PyObject *arg)
{
    fanin_failure why = {.struct_size = sizeof why};
    fanin_status status;
    fanin_value made;
    PyObject *result = NULL;
    long steps = PyLong_AsLong(arg);
    (void)module;
    if (steps == -1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        status = fill(steps, &made, &why);
    Py_END_ALLOW_THREADS
    if (status != FANIN_OK)
        return PyErr_Format(PyExc_ValueError, "%s", why.text);
    result = (PyObject *)api->to_python(&made);
    api->drop(&made);
    return result;
}

static PyMethodDef methods[] = {{"sum", sum, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "two_threads", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_two_threads(void)
{
    api = fanin_import();
    return api ? PyModule_Create(&module) : NULL;
}
