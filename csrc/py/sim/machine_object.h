/* machine_object: what the files of the simulated machine share: the machine, its kernels and
 * graphs. */
#ifndef FAN_PY_MACHINE_OBJECT_H
#define FAN_PY_MACHINE_OBJECT_H

#include "device/sim/explore.h"
#include "device/sim/sim.h"
#include "py/base/py.h"

typedef struct machine_object machine_object;

/* A queued kernel. The list and `fn` belong to the GIL. */
typedef struct fan_kernel {
    /* among its machine's */
    struct fan_kernel *prev;
    struct fan_kernel *next;
    machine_object *owner; /* NULL once that is gone */
    fan_sim *m;            /* no hold: the caller that runs it has one */
    PyObject *fn;          /* NULL: forgotten, it does nothing */
    bool lost;             /* .. its machine was collected: running it raises that */
    PyObject *name;        /* a str */
    size_t reads;
    size_t n;
    fan_array *views[]; /* reads, then writes; geometry alone */
} fan_kernel;

/* Chooses the host thread that runs next. */
typedef struct chooser {
    enum {
        BY_SEED,
        FOLLOW,
        GIVE_UP
    } mode;
    PyObject *search; /* FOLLOW: the capsule, held */
    fan_explore *x;   /* FOLLOW: what is in it */
} chooser;

struct machine_object {
    PyObject_HEAD fan_sim *m; /* held */
    int devices;
    fan_kernel *kernels;
    chooser chooser;
};

static inline machine_object *fan_machine_self(PyObject *o)
{
    return (machine_object *)o;
}

/* ---- kernel.c ---- */

/* fan_kernel_unlink: removes a kernel from the list of its machine. */
void fan_kernel_unlink(fan_kernel *k);
/* fan_machine_launch: Machine._launch. */
PyObject *fan_machine_launch(PyObject *o, PyObject *const *a);
/* fan_machine_refuse_stream: ValueError of a call for an object that is no stream of the machine;
 * s: the stream that it is, or NULL. */
void fan_machine_refuse_stream(const char *call, PyObject *o, const fan_stream *s);

#endif
