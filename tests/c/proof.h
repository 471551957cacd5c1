/* proof: the parts of the proof program (tests/c/proof.c). */
#ifndef FAN_TESTS_PROOF_H
#define FAN_TESTS_PROOF_H

#include "base/fault.h"
#include "proof_run.h"

/* A planted fault: plan bits left out on the machine, a fault in the buffer's own code (FAN_FAULT),
 * or one of the driver's. */
typedef struct fault {
    char name[96];
    uint64_t bits;
    fan_fault_id planted;
    unsigned driver; /* DRIVER_COUNT .. */
} fault;
/* fault_parse: "none", "plan:S9.mark", "plan:S9.mark+S13.mark", "fault:SLOT_KEPT",
 * "driver:count". */
bool fault_parse(fault *f, const char *text);
void fault_plant(const fault *f, world *w);

/* How a search goes. */
typedef struct search {
    int K, D, S;
    richness options;
    bool raw;            /* every configuration, not one of each class */
    bool reduce;         /* sleep sets */
    bool first;          /* a configuration is done with when it has failed once */
    bool soon;           /* so is the search */
    uint64_t from, step; /* one part of the shapes (config_part) */
    /* .. of the classes: alike for every search that sees all or one of each */
    bool by_class;
    fault fault;
    /* called for each configuration; may be NULL */
    void (*seen)(void *ctx, const config *c, verdict v);
    void *ctx;
} search;

typedef struct tally {
    uint64_t shapes, configs, traces, abandoned, steps;
    uint64_t failing;      /* configurations */
    uint64_t by[VERDICTS]; /* traces */
    char worst[512];       /* the first failing configuration, its schedule and its sentence */
    char sentence[FAN_ERROR_TEXT];
} tally;

/* search_whole: adds are steps. false: the search itself went wrong (it says so on stderr). */
bool search_whole(const search *how, tally *out);
bool search_config(world *w, const search *how, const config *c, tally *out, verdict *v);
/* search_split: the buffer's own yield points are steps (proof_split.c). */
typedef struct split_search {
    int D, S;
    unsigned scenes; /* mask of split_scene */
    bool raw, reduce, first, soon;
    bool imports;   /* the first gradient may be imported; else none has kin */
    uint64_t limit; /* runs for each configuration; 0: all */
    /* not a search but so many random orders for each configuration; 0: a search */
    uint64_t samples;
    uint64_t seed;
    uint64_t from, step;
    fault fault;
    void (*seen)(void *ctx, const config *c, int scene, verdict v);
    void *ctx;
} split_search;
#define SPLIT_SCENES 6
extern const char *const split_scene_words[SPLIT_SCENES];
bool search_split(const split_search *how, tally *out);

/* values: sampled runs judged twice, by order and by value (proof_values.c). */
typedef struct values_tally {
    uint64_t runs, racy, racy_wrong, clean, clean_wrong, schedules;
} values_tally;
bool search_values(int K, int D, int S, const fault *f, uint64_t samples, uint64_t seed,
                   values_tally *out);

double seconds(void);

#endif
