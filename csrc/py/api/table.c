/* table: the function table of include/fanin.h, which the module offers in a capsule. Without
 * py/api/sim the entries of the simulated machine are NULL. */
#include "py/api/api.h"

/* A copy of the tree may lack py/api/sim (docs/design.md, The parts). */
#define X(name) __typeof__(fan_api_##name) fan_api_##name __attribute__((weak));
FAN_API_MACHINE_LIST(X)
#undef X

#define X(NAME, ...)                                        \
    _Static_assert((int)FANIN_##NAME == (int)FAN_DT_##NAME, \
                   "fanin.h numbers dtypes as the core does");
FAN_DTYPE_LIST(X)
#undef X

const fanin_api fan_api_table = {.version = FANIN_API_VERSION,
                                 .size = sizeof(fanin_api),
#define X(name) .name = fan_api_##name,
                                 FAN_API_LIST(X) FAN_API_MACHINE_LIST(X)
#undef X
};
