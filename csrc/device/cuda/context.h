/* context: calls of the driver: the primary context made current, codes turned into statuses, forks. */
#ifndef FAN_DEVICE_CUDA_CONTEXT_H
#define FAN_DEVICE_CUDA_CONTEXT_H

#include "device/cuda/part.h"

/* fan__cuda_usable: not in a forked child, and not dead. */
bool fan__cuda_usable(const fan_cuda_part *p);
bool fan__cuda_forked(const fan_cuda *c);
/* fan__cuda_refuse_dead: the first cause, told again. */
fan_status fan__cuda_refuse_dead(fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_refuse_child(const fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_enter(fan_cuda_part *p, fan__cuda_scope *scope, fan_error *err);
void fan__cuda_leave(fan__cuda_scope *scope);
/* fan__cuda_check: what a driver's code means: FAN_OK, FAN_ERR_DEVICE_NOMEM, FAN_ERR_CAPTURE, FAN_ERR_DEVICE; `call`
 * names the function and what it was for. */
fan_status fan__cuda_check(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err);
/* fan__cuda_capture_advice: what to do about the codes 900 to 908. */
const char *fan__cuda_capture_advice(fan_cu_result code);
/* fan__cuda_lives: the primary context is there, as far as the driver knows. */
bool fan__cuda_lives(const fan_cuda_part *p);
/* fan__cuda_relax: from here to the same call with what it returned (-1: nothing was changed), this thread's unsafe
 * calls disturb nobody's capture. */
int fan__cuda_relax(const fan_cuda_part *p, int mode);
/* fan__cuda_pass: blocks until all that is queued on a stream, which is not captured, has run. The captures of others
 * are not disturbed. */
fan_status fan__cuda_pass(fan_cuda_part *p, fan_cu_stream on, fan_error *err);

/* Who makes a device ready has it; a child makes it anew. */
extern pthread_mutex_t fan__cuda_making;

/* fan__cuda_list_add, _remove: the list of all that are open. */
void fan__cuda_list_add(fan_cuda *c);
void fan__cuda_list_remove(fan_cuda *c);

#endif
