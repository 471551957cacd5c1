/* Planted faults, by name, for tests of the checkers. */
#include "base/fault.h"

#ifdef FAN_TEST
#include <string.h>

atomic_int fan_fault_planted = FAN_FAULT_NONE;

fan_fault_id fan_fault_named(const char *name)
{
#define NAME(name) #name,
    static const char *const names[] = {"NONE", FAN_FAULTS(NAME)};
#undef NAME
    for (int i = 1; i < FAN_FAULT_COUNT; i++) {
        if (strcmp(names[i], name) == 0)
            return (fan_fault_id)i;
    }
    return FAN_FAULT_NONE;
}
#else
typedef int fan_fault_nothing; /* a translation unit is not empty */
#endif
