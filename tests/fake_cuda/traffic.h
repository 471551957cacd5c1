/* traffic: how many bytes kernels read and write. Each byte counts once for each block of a launch
 * that touches it, for blocks share no cache but the device's. Tests turn it on while one thread
 * uses the driver. */
#ifndef FAN_FAKE_TRAFFIC_H
#define FAN_FAKE_TRAFFIC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* fan__traffic_begin: counts from zero; false: out of memory. fan__traffic_end: no more. */
bool fan__traffic_begin(void);
void fan__traffic_end(void);
/* fan__traffic_counts: whether traffic is counted. */
bool fan__traffic_counts(void);
/* fan__traffic_block: another block begins. */
void fan__traffic_block(void);
void fan__traffic_touch(uint64_t address, size_t bytes, bool reads);
uint64_t fan__traffic_read(void);
uint64_t fan__traffic_written(void);

#endif
