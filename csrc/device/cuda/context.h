/* context: calls of the driver: makes the primary context current, converts codes to statuses, handles forks. */
#ifndef FAN_DEVICE_CUDA_CONTEXT_H
#define FAN_DEVICE_CUDA_CONTEXT_H

#include "device/cuda/part.h"

/* fan__cuda_usable: returns whether the part is alive and this is no forked child. */
bool fan__cuda_usable(const fan_cuda_part *p);
bool fan__cuda_forked(const fan_cuda *c);
/* fan__cuda_refuse_dead: FAN_ERR_DEVICE with the failure that ended the context. */
fan_status fan__cuda_refuse_dead(fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_refuse_child(const fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_enter(fan_cuda_part *p, fan__cuda_scope *scope, fan_error *err);
void fan__cuda_leave(fan__cuda_scope *scope);
/* fan__cuda_check: converts a driver's code: FAN_OK, FAN_ERR_DEVICE_NOMEM, FAN_ERR_CAPTURE, FAN_ERR_DEVICE; `call`
 * names the function and its purpose. fan__cuda_refuse: the same for a nonzero code. */
fan_status fan__cuda_refuse(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err);
static inline fan_status fan__cuda_check(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err)
{
    return code == 0 ? FAN_OK : fan__cuda_refuse(p, code, call, err);
}
/* fan__cuda_capture_advice: returns what to do about the codes 900 to 908. */
const char *fan__cuda_capture_advice(fan_cu_result code);
/* fan__cuda_lives: returns whether the driver still has the primary context. */
bool fan__cuda_lives(const fan_cuda_part *p);
/* fan__cuda_relax: puts this thread into a capture mode in which its unsafe calls do not disturb captures of other
 * threads. Returns the argument of a second call that undoes it (-1: the mode was already set). */
int fan__cuda_relax(const fan_cuda_part *p, int mode);
/* fan__cuda_pass: blocks until all that is queued on a stream, which is not captured, has run. Does not disturb other
 * captures. */
fan_status fan__cuda_pass(fan_cuda_part *p, fan_cu_stream on, fan_error *err);

/* Held by the thread that initializes a device; initialized again in a forked child. */
extern pthread_mutex_t fan__cuda_making;

/* fan__cuda_list_add, fan__cuda_list_remove: maintain the list of all open drivers. */
void fan__cuda_list_add(fan_cuda *c);
void fan__cuda_list_remove(fan_cuda *c);

#endif
