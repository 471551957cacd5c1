/* requests: persistent requests of an MPI library, which comes as addresses of its functions
 * (dist/mpi.py): one call starts them and polls them for a while, where Python would need a call
 * for each poll of each. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"

#include <sched.h>

/* The words of the state: functions, the datatype MPI_BYTE and the bytes of its handle, how many
 * requests there are and how many of them receive; then for each request the address of its handle,
 * for each whether it is not complete, and for each that receives the bytes that came. */
enum {
    START,
    TEST,
    COUNT,
    BYTE,
    BYTE_SIZE,
    REQUESTS,
    RECEIVES,
    FIRST
};

#define STATUS_BYTES 256 /* of an MPI_Status at most */
#define LOOKS 32         /* at each request, in one call */

typedef int start_fn(void *request);
typedef int test_fn(void *request, int *flag, void *status);
typedef int count_fn_of_ints(const void *status, int datatype, int *count);
typedef int count_fn_of_pointers(const void *status, void *datatype, int *count);

static void *pointer(int64_t address)
{
    return (void *)(intptr_t)address; /* NOLINT(performance-no-int-to-ptr) */
}

static int start_all(const int64_t *state, int64_t *left)
{
    start_fn *start = (start_fn *)pointer(state[START]);
    for (int64_t k = 0; k < state[REQUESTS]; k++) {
        int code = start(pointer(state[FIRST + k]));
        if (code)
            return code;
        left[k] = 1;
    }
    return 0;
}

/* bytes_of: the bytes of a message that came. */
static int bytes_of(const int64_t *state, const void *status, int64_t *bytes)
{
    int count = 0;
    int code;
    if (state[BYTE_SIZE] == sizeof(int))
        code = ((count_fn_of_ints *)pointer(state[COUNT]))(status, (int)state[BYTE], &count);
    else {
        code =
            ((count_fn_of_pointers *)pointer(state[COUNT]))(status, pointer(state[BYTE]), &count);
    }
    *bytes = count;
    return code;
}

/* look: polls each request that is not complete once; *missing: how many are not. */
static int look(const int64_t *state, int64_t *left, int64_t *sizes, int64_t *missing)
{
    test_fn *test = (test_fn *)pointer(state[TEST]);
    _Alignas(16) char status[STATUS_BYTES];
    *missing = 0;
    for (int64_t k = 0; k < state[REQUESTS]; k++) {
        int done = 0;
        if (!left[k])
            continue;
        int code = test(pointer(state[FIRST + k]), &done, status);
        if (!code && done && k < state[RECEIVES])
            code = bytes_of(state, status, &sizes[k]);
        if (code)
            return code;
        left[k] = !done;
        *missing += !done;
    }
    return 0;
}

static int run(int64_t *state, bool begin)
{
    int64_t *left = state + FIRST + state[REQUESTS];
    int64_t *sizes = left + state[REQUESTS];
    int64_t missing = 0;
    int code = begin ? start_all(state, left) : 0;
    for (int k = 0; k < LOOKS && !code; k++) {
        code = look(state, left, sizes, &missing);
        if (code || !missing)
            return code;
        sched_yield(); /* a rank that it waits for may need this core */
    }
    return code ? code : -1;
}

static PyObject *requests_run(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyArrayObject *words = (PyArrayObject *)a[0];
    bool begin = a[1] == Py_True;
    bool is_flat = PyArray_NDIM(words) == 1 && PyArray_IS_C_CONTIGUOUS(words);
    int64_t *state = PyArray_DATA(words);
    int code;
    bool is_state = is_flat && PyArray_TYPE(words) == NPY_INT64 && PyArray_SIZE(words) >= FIRST;
    if (!is_state || PyArray_SIZE(words) != FIRST + 2 * state[REQUESTS] + state[RECEIVES]) {
        PyErr_SetString(PyExc_ValueError, "requests_run: expected its state");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        code = run(state, begin);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

#include "py/declared/requests.h"
