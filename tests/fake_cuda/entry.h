/* entry: the driver's entry points. Each bears our name in here, and is shown by the driver's. Each
 * begins with CALL, which checks the plan of faults and a lost context, and then does what the
 * driver would. */
#ifndef FAN_FAKE_ENTRY_H
#define FAN_FAKE_ENTRY_H

#include "fake_cuda/thing.h"

#define API FAN_FAKE_SHOWN fan_cu_result
#define X(name, suffix, version, feature, parameters) \
    FAN_FAKE_SHOWN fan_cu_result fan_fake_##name parameters __asm__("cu" #name suffix);
FAN_CUDA_LIST(X)
#undef X

#endif
