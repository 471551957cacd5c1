/* context: calls of the driver: the primary context made current, codes turned into statuses, forks. */
#ifndef FAN_DEVICE_CUDA_CONTEXT_H
#define FAN_DEVICE_CUDA_CONTEXT_H

#include "device/cuda/part.h"

/* fan__cuda_usable: not in a forked child, and not dead. */
bool fan__cuda_usable(const fan_cuda_part *p);
bool fan__cuda_forked(const fan_cuda *c);
/* fan__cuda_refuse_dead: FAN_ERR_DEVICE with the first failure that ended the context. */
fan_status fan__cuda_refuse_dead(fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_refuse_child(const fan_cuda_part *p, fan_error *err);
fan_status fan__cuda_enter(fan_cuda_part *p, fan__cuda_scope *scope, fan_error *err);
void fan__cuda_leave(fan__cuda_scope *scope);
/* fan__cuda_check: what a driver's code means: FAN_OK, FAN_ERR_DEVICE_NOMEM, FAN_ERR_CAPTURE, FAN_ERR_DEVICE; `call`
 * names the function and what it was for. fan__cuda_refuse: of a code that is not 0. */
fan_status fan__cuda_refuse(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err);
static inline fan_status fan__cuda_check(fan_cuda_part *p, fan_cu_result code, const char *call, fan_error *err)
{
    return code == 0 ? FAN_OK : fan__cuda_refuse(p, code, call, err);
}
/* fan__cuda_capture_advice: what to do about the codes 900 to 908. */
const char *fan__cuda_capture_advice(fan_cu_result code);
/* fan__cuda_lives: whether the driver says that the primary context is there. */
bool fan__cuda_lives(const fan_cuda_part *p);
/* fan__cuda_relax: puts this thread into a capture mode in which its unsafe calls do not disturb the captures of other
 * threads. Returns what a second call takes to undo it (-1: nothing was changed: it was in that mode already). */
int fan__cuda_relax(const fan_cuda_part *p, int mode);
/* fan__cuda_pass: blocks until all that is queued on a stream, which is not captured, has run. The captures of others
 * are not disturbed. */
fan_status fan__cuda_pass(fan_cuda_part *p, fan_cu_stream on, fan_error *err);

/* Held by the thread that makes a device ready; made anew in a forked child. */
extern pthread_mutex_t fan__cuda_making;

/* fan__cuda_list_add, fan__cuda_list_remove: keep the list of all open drivers. */
void fan__cuda_list_add(fan_cuda *c);
void fan__cuda_list_remove(fan_cuda *c);

#endif
