/* race: an operation, and a race of two. */
#ifndef FAN_DEVICE_SIM_RACE_H
#define FAN_DEVICE_SIM_RACE_H

#include <stdbool.h>
#include <stdint.h>

/* fan_op: an operation: its lane, name and line. Stored once per queued operation, shared by its accesses. */
typedef struct fan_op {
    uint64_t number;     /* counts operations */
    uint32_t lane, host; /* host: the lane that queued it */
    uint64_t count;      /* of its lane */
    uint64_t owner;      /* the stream or thread of the lane at that time (fan_race_check_name) */
    bool over, awaited;  /* fan_race_check_over */
    char name[48];       /* "mul", "sum" */
    char call_site[96];  /* "train.py:31", or "" */
} fan_op;

typedef struct fan_race {
    fan_op first, second;
    bool first_writes, second_writes;
    bool release;     /* the second is a release of memory */
    bool released;    /* the first is one: the second accesses freed memory */
    uintptr_t lo, hi; /* bytes in common (one run of them) */
} fan_race;

#endif
