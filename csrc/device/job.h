/* job: work that a stream orders, and its execution on memory that the host can access. */
#ifndef FAN_DEVICE_JOB_H
#define FAN_DEVICE_JOB_H

#include "array/array.h"
#include "array/device_stats.h"
#include "array/sparse.h"
#include "array/sum.h"
#include "base/status.h"

typedef struct fan_device fan_device;
typedef struct fan_stream fan_stream;

/* Work that a stream orders. Arrays in a job belong to the caller: a backend that runs later copies
 * geometry and addresses, and does not hold the storages (the rules keep memory alive until the
 * work has run: Lifetime). */
typedef enum fan_job_kind {
    FAN_JOB_SUM,     /* out = fold of in[0..n) with scale (fan_sum) */
    FAN_JOB_EXACT,   /* out = their exact sum in in[0].acc, with scale (fan_exact_fold) */
    FAN_JOB_REDUCE,  /* out = in[0], rounded to in[0].acc, summed to out's shape (fan_reduce) */
    FAN_JOB_COPY,    /* out = in[0], same shape, converted (fan_array_copy) */
    FAN_JOB_ZERO,    /* out = 0 */
    FAN_JOB_SCATTER, /* out += sparse (fan_sparse_scatter); reads and writes out */
    FAN_JOB_UPLOAD,  /* out (device) = in[0] (host memory, read before the call returns) */
    /* the statistics of in[0], and the first of in[first_suspect..n) with an inf or a NaN. No
     * out */
    FAN_JOB_STATS
} fan_job_kind;

/* Statistics that a job writes on its device (array/device_stats.h), for fan_stats_out_read. */
typedef struct fan_stats_out {
    const fan_array *words; /* of fan_stats_out_new; written in the order of the stream */
    /* NULL, or the words of an earlier job (perhaps the same memory): if they name a first inf or
     * NaN, it stays the first */
    const fan_array *before;
    const int64_t *keys; /* the key of each operand; -1: none */
} fan_stats_out;

typedef struct fan_job {
    fan_job_kind kind;
    const fan_array *out;
    const fan_operand *in;
    size_t n;
    const fan_scale *scale;   /* NULL: none */
    const fan_sparse *sparse; /* FAN_JOB_SCATTER */
    /* FAN_JOB_SUM on a device without streams: receives the statistics of the result
     * (fan_sum_options). NULL: not wanted. */
    fan_stats *stats;
    /* FAN_JOB_SUM and FAN_JOB_STATS on a device with streams: the same, for n >= 1 operands; never
     * under capture. NULL: not wanted. */
    const fan_stats_out *stats_out;
    /* with statistics: earlier operands are not reported as the first non-finite one */
    size_t first_suspect;
    const char *label; /* for traces and reports; copied */
} fan_job;

/* The state of a job that was queued together with others. */
typedef enum fan_job_state {
    FAN_JOB_PENDING, /* not queued */
    FAN_JOB_QUEUED,
    FAN_JOB_FAILED /* as after a `run` that failed with the same status */
} fan_job_state;

/* fan_job_run: runs a job at once on memory that the host can access; parallel: other threads may
 * help. */
void fan_job_run(const fan_job *job, bool parallel);
/* fan_job_check: calls fan_storage_check for all its memory. */
fan_status fan_job_check(const fan_job *job, fan_error *err);
/* fan_job_bytes: returns the bytes that it reads and writes, each element counted once. */
uint64_t fan_job_bytes(const fan_job *job);
/* fan_job_word: returns "sum", "copy": the default label. */
const char *fan_job_word(fan_job_kind kind);
/* fan_job_name: the job's label, or the word for its kind. */
const char *fan_job_name(const fan_job *job);
/* fan_jobs_label: writes "3 slots: sum grads[0], sum grads[1], .." for n jobs in one launch.
 * Returns buf. */
char *fan_jobs_label(const fan_job *jobs, size_t n, char *buf, size_t size);

/* Copies of jobs that outlive their callers: with the geometry of their arrays, and their uploads,
 * in one block. In a first pass `to` is NULL and the room is counted. */
typedef struct fan__packer {
    char *to;
    size_t used;
} fan__packer;

/* fan__pack: returns the place of the next `bytes`; NULL in the first pass. The others: the place
 * of the copies. */
void *fan__pack(fan__packer *p, size_t bytes);
fan_job *fan__pack_jobs(fan__packer *p, const fan_job *jobs, size_t n);
fan_array **fan__pack_arrays(fan__packer *p, fan_array *const *arrays, size_t n);

#endif
