/* Modules, kernels, launches. */
#include "base/mem.h"
#include "fake_cuda/entry.h"
#include "fake_cuda/fake.h"
#include "fake_cuda/work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FATBIN UINT32_C(0xBA55ED50) /* how a fatbin begins */
#define CUBIN UINT32_C(0x464C457F)  /* how an ELF file begins */

/* launch_takes: what a driver of this compute capability returns for an image: OK, INVALID_IMAGE
 * for one without the kernels, NO_BINARY_FOR_GPU for a CUBIN of another major version or a later
 * minor one, or PTX of a later version. */
static fan_cu_result launch_takes(const char *image, int compute)
{
    uint32_t magic = 0;
    uint32_t flags = 0;
    memcpy(&magic, image, sizeof magic);
    if (magic == FATBIN)
        return OK;
    /* e_flags has the architecture: from CUDA 13 on, ABI version 8, in its second byte */
    if (magic == CUBIN) {
        memcpy(&flags, image + 48, sizeof flags);
        int arch = (int)(image[8] >= 8 ? flags >> 8 : flags) & 0xFF;
        bool fits = arch / 10 == compute / 10 && arch <= compute;
        return fan__ok_or(fits, NO_BINARY_FOR_GPU);
    }
    const char *target = strstr(image, ".target sm_");
    if (!target || !strstr(image, ".entry fan_any"))
        return INVALID_IMAGE;
    long arch = strtol(target + strlen(".target sm_"), NULL, 10);
    return fan__ok_or(arch <= compute, NO_BINARY_FOR_GPU);
}

fan_cu_result fan_fake_ModuleLoadData(fan_cu_module *out, const void *image)
{
    CALL(ModuleLoadData);
    INSIDE(c);
    BESIDE(ModuleLoadData);
    if (!image)
        return INVALID_VALUE;
    fan_cu_result code = launch_takes(image, fan__fake.compute);
    if (code)
        return code;
    fan__thing *t = fan__thing_new(A_MODULE, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan__thing_add(t);
    *out = (fan_cu_module)(void *)t;
    return OK;
}

fan_cu_result fan_fake_ModuleUnload(fan_cu_module m)
{
    CALL(ModuleUnload);
    INSIDE(c);
    BESIDE(ModuleUnload);
    fan__thing *t = fan__thing_find(A_MODULE, m);
    if (!t)
        return INVALID_HANDLE;
    fan__thing_drop(t);
    return OK;
}

fan_cu_result fan_fake_ModuleGetFunction(fan_cu_function *out, fan_cu_module m, const char *name)
{
    CALL(ModuleGetFunction);
    INSIDE(c);
    BESIDE(ModuleGetFunction);
    if (!fan__thing_find(A_MODULE, m))
        return INVALID_HANDLE;
    const fan_fake_kernel *k = fan_fake_kernel_find(name);
    if (!k)
        return NOT_FOUND;
    fan__thing *t = fan__thing_new(A_FUNCTION, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    t->kernel = k;
    fan__thing_add(t);
    *out = (fan_cu_function)(void *)t;
    return OK;
}

/* launch_lose: from now on every call in the context fails: what a kernel does wrong shows when it
 * runs. */
static void launch_lose(const fan__fake_work *w, fan_cu_result code)
{
    fan_cu_result none = OK;
    if (code) { /* the first cause stays */
        (void)atomic_compare_exchange_strong(&fan__fake.contexts[w->device->index].lost, &none,
                                             code);
    }
}

static void launch_run_kernel(fan__fake_work *w)
{
    launch_lose(w, w->kernel->run(w->payload, w->threads));
}

/* launch_run_stray: a kernel that touches what is no memory. */
static void launch_run_stray(fan__fake_work *w)
{
    launch_lose(w, ILLEGAL_ADDRESS);
}

/* launch_run_table: behind the arguments lies the table as it was to be when the kernel was queued.
 * Where something else is there now the kernel would stray. */
static void launch_run_table(fan__fake_work *w)
{
    fan_k_many *a = (fan_k_many *)(void *)w->payload;
    const char *table = w->payload + w->kernel->bytes;
    if (memcmp(fan__host(a->table), table, fan_fake_table_bytes(a)) != 0) {
        launch_lose(w, ILLEGAL_ADDRESS);
        return;
    }
    launch_lose(w, w->kernel->run(w->payload, w->threads));
}

/* launch_table: what will lie where a kernel's table is once its turn comes: what the host sent
 * there last, in the order of its calls. That the kernel waits for the copies is the checker's
 * business, for it reads that memory. NULL: nothing was sent there. */
static const char *launch_table(const fan_k_many *a)
{
    const fan__thing *t = fan__thing_memory(a->table, fan_fake_table_bytes(a));
    return t && t->sent ? t->sent + (a->table - t->address) : NULL;
}

/* launch_accesses: what a kernel touches; *stray: something that is no memory. */
static size_t launch_accesses(const fan_fake_kernel *k, const void *args, const char *table,
                              fan_fake_access *a, fan_array **all, size_t *written, bool *stray)
{
    size_t n = k->accesses(args, table, a, written);
    for (size_t i = 0; i < n; i++) {
        int64_t lo, hi;
        a[i].array.shape = a[i].dims;
        a[i].array.strides = a[i].dims + a[i].array.ndim;
        all[i] = &a[i].array;
        fan_array_reach(all[i], &lo, &hi);
        *stray |=
            hi > lo &&
            !fan__thing_memory(((uint64_t)(uintptr_t)a[i].array.data + (uint64_t)lo) | FAN_FAKE_TAG,
                               (uint64_t)(hi - lo));
    }
    return n;
}

static fan_cu_result launch_queue_stray(fan_stream *s, const fan_fake_kernel *k)
{
    fan__fake_work *w = fan__work_new(launch_run_stray, 0, 0, 0);
    if (!w)
        return OUT_OF_MEMORY;
    w->device = s->device;
    return fan__work_queue(s, k->name, w, NULL, 0, NULL, 0);
}

static fan_cu_result launch_queue(fan_stream *s, const fan_fake_kernel *k, const void *args,
                                  int64_t threads)
{
    fan_cu_result code = OUT_OF_MEMORY;
    atomic_fetch_add_explicit(&fan__fake.launches[fan_fake_kernel_number(k)], 1,
                              memory_order_relaxed);
    const char *table = k->table ? launch_table(args) : NULL;
    if (k->table && !table)
        return launch_queue_stray(s, k);
    size_t written;
    size_t behind = k->table ? fan_fake_table_bytes(args) : 0;
    size_t most = k->most(args);
    fan_fake_access *a = fan_calloc(most * sizeof *a);
    fan_array **all = fan_calloc(most * sizeof *all);
    fan__fake_work *w =
        fan__work_new(k->table ? launch_run_table : launch_run_kernel, 0, 0, k->bytes + behind);
    if (a && all && w) {
        bool stray = false;
        size_t n = launch_accesses(k, args, table, a, all, &written, &stray);
        if (stray) {
            fan_free(w);
            code = launch_queue_stray(s, k);
        } else {
            w->kernel = k;
            w->threads = threads;
            w->device = s->device;
            memcpy(w->payload, args, k->bytes);
            if (table)
                memcpy(w->payload + k->bytes, table, behind);
            code = fan__work_queue(s, k->name, w, all, n - written, all + n - written, written);
        }
        w = NULL;
    }
    fan_free(w);
    fan_free(a);
    fan_free(all);
    return code;
}

fan_cu_result fan_fake_OccupancyMaxActiveBlocksPerMultiprocessor(int *out, fan_cu_function f,
                                                                 int threads, size_t shared)
{
    CALL(OccupancyMaxActiveBlocksPerMultiprocessor);
    INSIDE(c);
    if (!fan__thing_find(A_FUNCTION, f))
        return INVALID_HANDLE;
    if (threads < 1 || threads > 1024 || shared)
        return INVALID_VALUE;
    *out = 2048 / threads;
    return OK;
}

fan_cu_result fan_fake_LaunchKernel(fan_cu_function f, unsigned gx, unsigned gy, unsigned gz,
                                    unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                    fan_cu_stream handle, void **params, void **extra)
{
    fan_stream *s;
    CALL(LaunchKernel);
    INSIDE(c);
    const fan__thing *t = fan__thing_find(A_FUNCTION, f);
    if (!t || t->device != c->device)
        return INVALID_HANDLE;
    bool is_flat = gy == 1 && gz == 1 && by == 1;
    if (!is_flat || bz != 1)
        return INVALID_VALUE;
    if (!gx || gx > INT32_MAX)
        return INVALID_VALUE;
    if (!bx || bx > 1024)
        return INVALID_VALUE;
    if (shared || extra || !params)
        return INVALID_VALUE;
    if (bx > FAN_K_BLOCK) /* its launch bounds */
        return LAUNCH_OUT_OF_RESOURCES;
    fan_cu_result code = fan__thing_stream(c, handle, &s);
    if (code)
        return code;
    code = INVALID_HANDLE;
    if (s->device->index == c->device)
        code = launch_queue(s, t->kernel, params[0], (int64_t)gx * bx);
    fan_stream_drop(s);
    return code;
}
