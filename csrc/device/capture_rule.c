/* The rule for a wait across captures, row by row of the table in capture_rule.h: a pure
 * function. */
#include "device/capture_rule.h"

fan_capture_answer fan_capture_rule(uint64_t s_capture, uint64_t t_capture, bool s_free,
                                    bool s_legacy)
{
    if (s_capture == t_capture)
        return FAN_CAPTURE_GO;
    if (s_capture != 0)
        return FAN_CAPTURE_ERROR;
    if (s_free)
        return FAN_CAPTURE_REDIRECT;
    if (s_legacy)
        return FAN_CAPTURE_ERROR;
    return FAN_CAPTURE_GO;
}
