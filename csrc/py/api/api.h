/* api: what the files of the C API share (include/fanin.h): errors, options, arrays, streams. Needs no interpreter. */
#ifndef FAN_PY_API_API_H
#define FAN_PY_API_API_H

#include "device/stream.h"
#include "py/base/api_failure.h"
#include "py/engine/c_function.h"
#include "py/arrays/dlpack.h"

_Static_assert(sizeof(fanin_tensor) == sizeof(fan_dl_tensor) && sizeof(fanin_managed) == sizeof(fan_dl_versioned),
               "fanin.h declares DLPack's structs as dlpack.h of this folder does");
static inline const fan_dl_tensor *fan_api_tensor(const fanin_tensor *t) { return (const void *)t; }

/* ---- value.c ---- */

/* fan_api_device_of: where a value lies; not held. fan_api_show: an array on `d`, which takes its hold; NULL:
 * undefined. */
fan_device *fan_api_device_of(const fanin_value *v);
void fan_api_show(fan_array *a, const fan_device *d, fanin_value *out);
/* fan_api_device: a device by DLPack's numbers, or FANIN_DEVICE_SIM; a hold. fan_api_stream: a stream, which may be
 * `near` (NULL: none), the device of an argument: of two machines that one is meant; NULL: NULL. A hold. FAN_ERR_VALUE,
 * FAN_ERR_DEVICE, FAN_ERR_NOMEM. */
fan_status fan_api_device(int32_t type, int32_t id, fan_device **out, fan_error *err);
fan_status fan_api_stream(const fanin_stream *s, fan_device *near, fan_stream **out, fan_error *err);
/* fan_api_view: memory of the CPU that the caller keeps, as an array; `lent`: until the sum is taken
 * (fan_frontend.lent), else until the array goes. FAN_ERR_BUFFER: it is on a device. */
fan_status fan_api_view(const fanin_tensor *t, bool lent, fan_array **out, fan_error *err);
bool fan_api_is_lent(const fan_array *a);
/* fan_api_out: memory of the caller's to write into, `what` in messages. FAN_ERR_BUFFER: two elements share bytes. */
fan_status fan_api_out(const fanin_tensor *t, const char *what, fan_array **out, fan_error *err);
/* fan_api_lend: lent memory, of which all is known. */
fan_status fan_api_lend(char *data, fan_dtype dtype, int ndim, const int64_t *shape, const int64_t *strides,
                        fan_array **out, fan_error *err);
fanin_status fan_api_of_managed(fanin_managed *tensor, fanin_value *out, fanin_failure *why);
fanin_status fan_api_to_managed(const fanin_value *v, fanin_managed **out, fanin_failure *why);

/* ---- buffer.c ---- */

fanin_status fan_api_buffer_new(size_t slots, const fanin_buffer_options *options, fanin_buffer **out,
                                fanin_failure *why);
void fan_api_buffer_free(fanin_buffer *b);
fanin_status fan_api_buffer_add(fanin_buffer *b, size_t slot, const fanin_tensor *gradient,
                                const fanin_add_options *options, fanin_failure *why);
fanin_status fan_api_buffer_add_value(fanin_buffer *b, size_t slot, const fanin_value *gradient,
                                      const fanin_add_options *options, fanin_failure *why);
fanin_status fan_api_buffer_add_many(fanin_buffer *b, const fanin_gradient *gradients, size_t n,
                                     const fanin_add_options *options, fanin_failure *why);
fanin_status fan_api_buffer_expect(fanin_buffer *b, size_t slot, int64_t n, fanin_failure *why);
fanin_status fan_api_buffer_ready(fanin_buffer *b, size_t slot, int *ready, fanin_failure *why);
fanin_status fan_api_buffer_take(fanin_buffer *b, const fanin_take_options *options, fanin_value *sums, size_t n,
                                 fanin_failure *why);
fanin_status fan_api_buffer_take_one(fanin_buffer *b, size_t slot, const fanin_take_options *options, fanin_value *sum,
                                     fanin_failure *why);
fanin_status fan_api_buffer_target(fanin_buffer *b, size_t slot, const fanin_add_options *options, fanin_target **t,
                                   fanin_value *out, fanin_failure *why);
fanin_status fan_api_target_end(fanin_target *t, int good, fanin_failure *why);
fanin_status fan_api_buffer_clear(fanin_buffer *b, fanin_failure *why);
fanin_status fan_api_buffer_stats(fanin_buffer *b, size_t slot, fanin_stats *out, fanin_failure *why);
fanin_status fan_api_buffer_counters(fanin_buffer *b, fanin_counters *out, fanin_failure *why);
fanin_object *fan_api_buffer_explain(fanin_buffer *b, size_t slot);
fanin_status fan_api_buffer_snapshot(fanin_buffer *b, size_t slot, const fanin_stream *stream, fanin_value *sum,
                                     fanin_failure *why);
fanin_buffer *fan_api_buffer_of_python(fanin_object *o);
fanin_object *fan_api_buffer_to_python(fanin_buffer *b);

/* ---- engine.c: inside the interpreter; NULL or not 0: an exception is set ---- */

fanin_object *fan_api_leaf_new(const fanin_value *array, fanin_object *name);
int fan_api_leaf_grad(fanin_object *leaf, fanin_value *out);
int fan_api_backward(const fanin_root *roots, size_t n, const fanin_pass_options *options);
int fan_api_grad(const fanin_root *roots, size_t n, const fanin_pass_options *options, fanin_value *out);

/* ---- stream.c ---- */

fanin_status fan_api_event_record(const fanin_stream *stream, fanin_event **out, fanin_failure *why);
void fan_api_event_free(fanin_event *e);
fanin_status fan_api_stream_wait(const fanin_stream *stream, fanin_event *e, fanin_failure *why);
fanin_status fan_api_stream_sync(const fanin_stream *stream, fanin_failure *why);
fanin_status fan_api_value_read(const fanin_value *v, const fanin_stream *stream, const fanin_tensor *out,
                                fanin_failure *why);
fanin_status fan_api_overlap(const fanin_tensor *a, const fanin_tensor *b, uint64_t budget, int64_t *at_a,
                             int64_t *at_b, fanin_verdict *out, fanin_failure *why);

/* ---- machine.c ---- */

fanin_status fan_api_machine_new(const fanin_machine_options *options, fanin_machine **out, fanin_failure *why);
fanin_status fan_api_machine_entered(fanin_machine **out, fanin_failure *why);
void fan_api_machine_free(fanin_machine *m);
fanin_status fan_api_machine_enter(fanin_machine *m, fanin_failure *why);
void fan_api_machine_leave(fanin_machine *m);
fanin_status fan_api_machine_stream(fanin_machine *m, int32_t device, fanin_stream *out, fanin_failure *why);
fanin_status fan_api_machine_array(fanin_machine *m, int32_t device, const fanin_tensor *init, fanin_value *out,
                                   fanin_failure *why);
fanin_status fan_api_machine_launch(fanin_machine *m, const fanin_stream *stream, const fanin_kernel *kernel,
                                    fanin_failure *why);
fanin_status fan_api_machine_synchronize(fanin_machine *m, fanin_failure *why);
uint64_t fan_api_machine_races(fanin_machine *m);
fanin_status fan_api_machine_spawn(fanin_machine *m, void (*run)(void *ctx), void *ctx, fanin_failure *why);
fanin_status fan_api_machine_join(fanin_machine *m, fanin_failure *why);

#endif
