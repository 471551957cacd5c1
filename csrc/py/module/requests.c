/* requests: messages of an MPI library, which comes as addresses of its functions (dist/mpi.py):
 * one call starts all messages of an operation and polls them for a while, where Python would need
 * a call for each, and one for each poll of it. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"

#include <limits.h>
#include <sched.h>

/* The words of the library, which begin the state of an operation: functions; the datatype MPI_BYTE
 * and the bytes of a handle; the communicator, this rank in it, and the tag. */
enum {
    SEND,
    RECEIVE,
    TEST,
    COUNT,
    BYTE,
    HANDLE_BYTES,
    COMM,
    RANK,
    TAG,
    LIBRARY
};

/* After them: how many messages there are, and how many of them come; then for each message, those
 * that come first: its memory, the bytes of it, the rank at the other end, the library's request,
 * whether it is complete, and the bytes that came. */
enum {
    MESSAGES = LIBRARY,
    RECEIVES,
    FIRST
};

enum {
    MEMORY,
    BYTES,
    PEER,
    REQUEST,
    OVER,
    CAME,
    WORDS
};

#define STATUS_BYTES 256 /* of an MPI_Status at most */
#define LOOKS 32         /* at each message, in one call */

typedef int test_fn(void *request, int *flag, void *status);
typedef int count_fn_of_ints(const void *status, int datatype, int *count);
typedef int count_fn_of_pointers(const void *status, void *datatype, int *count);
typedef int start_fn_of_ints(void *memory, int count, int datatype, int peer, int tag, int comm,
                             void *request);
typedef int start_fn_of_pointers(void *memory, int count, void *datatype, int peer, int tag,
                                 void *comm, void *request);

static void *pointer(int64_t address)
{
    return (void *)(intptr_t)address; /* NOLINT(performance-no-int-to-ptr) */
}

static int start_one(const int64_t *state, int64_t *m, int64_t function)
{
    int bytes = (int)m[BYTES];
    int peer = (int)m[PEER];
    int tag = (int)state[TAG];
    void *start = pointer(state[function]);
    if (state[HANDLE_BYTES] == sizeof(int)) {
        return ((start_fn_of_ints *)start)(pointer(m[MEMORY]), bytes, (int)state[BYTE], peer, tag,
                                           (int)state[COMM], &m[REQUEST]);
    }
    return ((start_fn_of_pointers *)start)(pointer(m[MEMORY]), bytes, pointer(state[BYTE]), peer,
                                           tag, pointer(state[COMM]), &m[REQUEST]);
}

static int start_all(int64_t *state)
{
    int64_t *m = state + FIRST;
    for (int64_t k = 0; k < state[MESSAGES]; k++, m += WORDS) {
        int code = start_one(state, m, k < state[RECEIVES] ? RECEIVE : SEND);
        if (code)
            return code;
        m[OVER] = 0;
    }
    return 0;
}

/* bytes_of: the bytes of a message that came. */
static int bytes_of(const int64_t *state, const void *status, int64_t *bytes)
{
    int count = 0;
    int code;
    if (state[HANDLE_BYTES] == sizeof(int))
        code = ((count_fn_of_ints *)pointer(state[COUNT]))(status, (int)state[BYTE], &count);
    else {
        code =
            ((count_fn_of_pointers *)pointer(state[COUNT]))(status, pointer(state[BYTE]), &count);
    }
    *bytes = count;
    return code;
}

/* look: polls each message that is not complete once; *missing: how many are not. */
static int look(int64_t *state, int64_t *missing)
{
    test_fn *test = (test_fn *)pointer(state[TEST]);
    _Alignas(16) char status[STATUS_BYTES];
    int64_t *m = state + FIRST;
    *missing = 0;
    for (int64_t k = 0; k < state[MESSAGES]; k++, m += WORDS) {
        int done = 0;
        if (m[OVER])
            continue;
        int code = test(&m[REQUEST], &done, status);
        if (!code && done && k < state[RECEIVES])
            code = bytes_of(state, status, &m[CAME]);
        if (code)
            return code;
        m[OVER] = done;
        *missing += !done;
    }
    return 0;
}

static int run(int64_t *state, bool begin)
{
    int64_t missing = 0;
    int code = begin ? start_all(state) : 0;
    for (int k = 0; k < LOOKS && !code; k++) {
        code = look(state, &missing);
        if (code || !missing)
            return code;
        sched_yield(); /* a rank that it waits for may need this core */
    }
    return code ? code : -1;
}

/* words_of: the words of an array of int64, or NULL with an exception. */
static int64_t *words_of(PyObject *o, npy_intp least)
{
    PyArrayObject *a = (PyArrayObject *)o;
    bool is_flat = PyArray_NDIM(a) == 1 && PyArray_IS_C_CONTIGUOUS(a);
    if (is_flat && PyArray_TYPE(a) == NPY_INT64 && PyArray_SIZE(a) >= least)
        return PyArray_DATA(a);
    PyErr_SetString(PyExc_ValueError, "requests: expected their words");
    return NULL;
}

/* message_of: the array of bytes for a rank; NULL: it is of this rank, or has no bytes; *failed. */
static PyArrayObject *message_of(PyObject *arrays, int64_t rank, int64_t self, bool *failed)
{
    PyArrayObject *a = (PyArrayObject *)PyList_GET_ITEM(arrays, rank);
    if (rank == self)
        return NULL;
    *failed = !PyArray_Check(a) || PyArray_TYPE(a) != NPY_UBYTE || !PyArray_IS_C_CONTIGUOUS(a);
    if (*failed)
        PyErr_SetString(PyExc_TypeError, "requests: expected contiguous arrays of uint8");
    return !*failed && PyArray_SIZE(a) ? a : NULL;
}

/* put_all: writes a message for each array of other ranks, those of the next rank first. Returns
 * how many there are; -1 with an exception; -2 if one is too large for the library's ints. */
static int64_t put_all(PyObject *arrays, int64_t self, int64_t *m)
{
    int64_t ranks = PyList_GET_SIZE(arrays);
    int64_t n = 0;
    for (int64_t step = 1; step < ranks; step++) {
        int64_t rank = (self + step) % ranks;
        bool failed = false;
        PyArrayObject *a = message_of(arrays, rank, self, &failed);
        if (failed)
            return -1;
        if (!a)
            continue;
        if (PyArray_SIZE(a) > INT_MAX)
            return -2;
        m[MEMORY] = (int64_t)(intptr_t)PyArray_DATA(a);
        m[BYTES] = (int64_t)PyArray_SIZE(a);
        m[PEER] = rank;
        m += WORDS;
        n++;
    }
    return n;
}

static PyObject *requests_new(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const int64_t *library = words_of(a[0], LIBRARY);
    int64_t ranks = PyList_GET_SIZE(a[1]);
    if (!library)
        return NULL;
    if (PyList_GET_SIZE(a[2]) != ranks) {
        PyErr_SetString(PyExc_ValueError, "requests: expected one array for each rank, twice");
        return NULL;
    }
    npy_intp words = FIRST + (2 * ranks * WORDS);
    PyObject *made = PyArray_ZEROS(1, &words, NPY_INT64, 0);
    if (!made)
        return NULL;
    int64_t *state = PyArray_DATA((PyArrayObject *)made);
    memcpy(state, library, LIBRARY * sizeof *state);
    int64_t come = put_all(a[1], library[RANK], state + FIRST);
    int64_t go = come < 0 ? come : put_all(a[2], library[RANK], state + FIRST + (WORDS * come));
    if (go < 0) {
        Py_DECREF(made);
        return go == -1 ? NULL : Py_NewRef(Py_None);
    }
    state[MESSAGES] = come + go;
    state[RECEIVES] = come;
    return made;
}

static PyObject *requests_run(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    bool begin = a[1] == Py_True;
    int64_t *state = words_of(a[0], FIRST);
    int code;
    if (!state || !words_of(a[0], FIRST + (WORDS * state[MESSAGES])))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        code = run(state, begin);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

#include "py/declared/requests.h"
