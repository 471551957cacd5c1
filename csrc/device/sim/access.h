/* access: the memory that an operation accesses: reported to the search, and checked against happens-before. */
#ifndef FAN_DEVICE_SIM_ACCESS_H
#define FAN_DEVICE_SIM_ACCESS_H

#include "array/extents.h"
#include "device/sim/machine.h"

/* Visits the accesses of an operation; returns false after the last. */
typedef bool fan__visit(const void *what, size_t i, const fan_array **a, bool *write);

bool fan__visit_job(const void *what, size_t i, const fan_array **a, bool *write);
bool fan__visit_kernel(const void *what, size_t i, const fan_array **a, bool *write);
bool fan__visit_read(const void *what, size_t i, const fan_array **a, bool *write);

fan_sim_device_part *fan__access_part(fan_sim *m, uintptr_t address);
fan_block *fan__access_block(fan_sim *m, const void *address);
void fan__access_report(fan_sim *m, fan__visit *next, const void *what);

/* The owner of the accessed memory until the operation has run: none, the graph that contains it, or the host thread
 * that waits for it. */
typedef enum keeper { KEPT_BY_NONE, KEPT_BY_GRAPH, KEPT_BY_HOST } fan__keeper;

/* fan__access_judge: checks an operation on `lane` against all earlier ones, and, if a kernel of the user's (`by_user`)
 * is what accesses it, that the memory was not donated. FAN_ERR_RACE with *race; FAN_ERR_NOMEM
 * leaves the history unchanged. */
fan_status fan__access_judge(fan_sim *m, uint32_t lane, const char *name, const char *call_site, fan__keeper kept,
                             bool by_user, fan__visit *next, const void *what, fan_race *race, fan_error *err);

/* fan__access_take_back: ends each donation of these bytes. */
void fan__access_take_back(fan_sim *m, fan_extent bytes);
fan_status fan__sim_use(fan_device *d, const fan_array *a, const char *name, bool donate, fan_error *err);
void fan__sim_returned(fan_device *d, const fan_array *a);

#endif
