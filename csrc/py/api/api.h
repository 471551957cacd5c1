/* api: what the files of the C API share (include/fanin.h): errors, options, arrays, streams. Needs
 * no interpreter. */
#ifndef FAN_PY_API_API_H
#define FAN_PY_API_API_H

#include "device/stream.h"
#include "py/base/api_failure.h"
#include "py/engine/c_function.h"
#include "py/arrays/dlpack.h"

_Static_assert(sizeof(fanin_tensor) == sizeof(fan_dl_tensor), "as DLTensor in dlpack.h");
_Static_assert(sizeof(fanin_managed) == sizeof(fan_dl_versioned), "as the managed one there");
static inline const fan_dl_tensor *fan_api_tensor(const fanin_tensor *t)
{
    return (const void *)t;
}

/* ---- value.c ---- */

/* fan_api_device_of: the device of a value; not held. */
fan_device *fan_api_device_of(const fanin_value *v);
/* fan_api_show: fills in a value of an array on `d`, and takes its hold; NULL: undefined. */
void fan_api_show(fan_array *a, const fan_device *d, fanin_value *out);
/* fan_api_device: a device by DLPack's numbers, or FANIN_DEVICE_SIM; a hold. */
fan_status fan_api_device(int32_t type, int32_t id, fan_device **out, fan_error *err);
/* fan_api_stream: a stream, which may be `near` (NULL: none), the device of an argument: of two
 * machines that one is meant; NULL: NULL. A hold. FAN_ERR_VALUE, FAN_ERR_DEVICE, FAN_ERR_NOMEM. */
fan_status fan_api_stream(const fanin_stream *s, fan_device *near, fan_stream **out,
                          fan_error *err);
/* fan_api_view: memory of the CPU that the caller keeps, as an array; `lent`: until the sum is
 * taken (fan_frontend.lent), else until the array is freed. FAN_ERR_BUFFER: it is on a device. */
fan_status fan_api_view(const fanin_tensor *t, bool lent, fan_array **out, fan_error *err);
bool fan_api_is_lent(const fan_array *a);
/* fan_api_out: memory of the caller's to write into, `what` in messages. FAN_ERR_BUFFER: two
 * elements share bytes. */
fan_status fan_api_out(const fanin_tensor *t, const char *what, fan_array **out, fan_error *err);
/* fan_api_lend: lent memory as an array; the caller has checked it. */
fan_status fan_api_lend(char *data, fan_dtype dtype, int ndim, const int64_t *shape,
                        const int64_t *strides, fan_array **out, fan_error *err);

/* ---- the table ---- */

/* X(name): the entries of fanin_api, by file; fanin.h describes them, and the entry `name` is
 * fan_api_name. */
// clang-format off
#define FAN_API_LIST(X) \
    /* value.c */ X(empty) X(like) X(share) X(wrap) X(may_write) X(drop) X(of_managed) \
        X(to_managed) \
    /* buffer.c */ X(buffer_new) X(buffer_free) X(buffer_add) X(buffer_add_value) \
        X(buffer_add_many) X(buffer_expect) X(buffer_ready) X(buffer_take) X(buffer_take_one) \
        X(buffer_target) X(target_end) X(buffer_clear) X(buffer_stats) X(buffer_counters) \
        X(buffer_explain) X(buffer_of_python) X(buffer_to_python) X(buffer_snapshot) \
    /* engine.c */ X(leaf_new) X(leaf_grad) X(backward) X(grad) X(function_new) X(node_new) \
        X(to_python) X(of_python) \
    /* stream.c */ X(overlap) X(event_record) X(event_free) X(stream_wait) X(stream_sync) \
        X(value_read)
/* .. of the simulated machine */
#define FAN_API_MACHINE_LIST(X) \
    /* sim/machine.c */ X(machine_new) X(machine_entered) X(machine_free) X(machine_enter) \
        X(machine_leave) X(machine_stream) X(machine_array) X(machine_launch) \
        X(machine_synchronize) X(machine_races) X(machine_spawn) X(machine_join)
// clang-format on
#define X(name) __typeof__(*((const fanin_api *)0)->name) fan_api_##name;
FAN_API_LIST(X)
FAN_API_MACHINE_LIST(X)
#undef X

/* ---- calls that wait for devices (stream.c, sim/machine.c): turns of a simulated machine's thread
 * (base/thread.h, Calls and turns), without the interpreter ---- */

typedef struct fan_api_call {
    bool turn;
    void *left;
} fan_api_call;

static inline fan_status fan_api_call_begin(fan_api_call *call, fan_error *err)
{
    fan_error_clear(err);
    *call = (fan_api_call){.turn = fan_sched_active()};
    if (call->turn && !fan_sched_enter())
        return fan_fail(err, FAN_ERR_STATE, "the machine ends this run");
    call->left = fan_allow_threads_begin();
    return FAN_OK;
}

static inline void fan_api_call_end(const fan_api_call *call)
{
    fan_allow_threads_end(call->left);
    if (call->turn)
        fan_sched_leave();
}

/* FAN_API_RUN: the body of such an entry: `run` is a fan_status and gets &err. */
#define FAN_API_RUN(run)                                 \
    FAN_UNINITIALIZED fan_error err;                     \
    fan_api_call call;                                   \
    fan_status status = fan_api_call_begin(&call, &err); \
    if (status == FAN_OK) {                              \
        status = (run);                                  \
        fan_api_call_end(&call);                         \
    }                                                    \
    return fan_api_fail(why, status, &err)

#endif
