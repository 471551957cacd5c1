/* The driver's entry points. Each begins with CALL, where the plan of faults and a lost context are looked at, and then
 * does what the driver would. */
#define _POSIX_C_SOURCE 200809L
#include "fake/fake.h"

#include "base/mem.h"
#include "device/kernels/tag.h"
#include "device/machine.h"

#include <stdio.h>
#include <string.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    UNKNOWN = 999
};

/* X(number, name, text): the codes that are known by name. */
#define CODE_LIST(X)                                                                                               \
    X(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument")                                                           \
    X(2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")                                                              \
    X(3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error")                                                     \
    X(4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down")                                                       \
    X(34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library")                                              \
    X(35, "CUDA_ERROR_INSUFFICIENT_DRIVER", "CUDA driver version is insufficient for CUDA runtime version")        \
    X(100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")                                           \
    X(101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")                                                  \
    X(200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid")                                           \
    X(201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context")                                                 \
    X(209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device")             \
    X(214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered")                                  \
    X(400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle")                                                 \
    X(500, "CUDA_ERROR_NOT_FOUND", "named symbol not found")                                                       \
    X(600, "CUDA_ERROR_NOT_READY", "device not ready")                                                             \
    X(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered")                               \
    X(701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch")                        \
    X(709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed")                                              \
    X(716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address")                                                  \
    X(719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure")                                               \
    X(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination") \
    X(804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW") \
    X(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing")            \
    X(901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture")     \
    X(902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences")   \
    X(903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began")          \
    X(904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work")                             \
    X(905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream")       \
    X(906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",                                                                   \
      "operation would make the legacy stream depend on a capturing blocking stream")                              \
    X(907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream") \
    X(908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",                                                               \
      "attempt to terminate a thread-local capture sequence from another thread")                                  \
    X(999, "CUDA_ERROR_UNKNOWN", "unknown error")

/* ---- the state: one machine ---- */

#define FATBIN UINT32_C(0xBA55ED50) /* how a fatbin begins */
enum { MOST_DEVICES = 8, MOST_DEPTH = 16, MOST_HIDDEN = 8 };
typedef enum kind {
    A_STREAM = 1,
    AN_EVENT,
    A_MODULE,
    A_FUNCTION,
    AN_OBJECT,
    MEMORY,
    DESTROYED,
    KINDS
} kind; /* DESTROYED: a stream that was */

/* Whatever the driver gave a handle for. */
typedef struct thing {
    struct thing *next;
    kind kind;
    int device;
    fan_stream *stream; /* A_STREAM */
    uint64_t thread;    /* of a per-thread stream; else 0 */
    fan_event *event;
    const fan_fake_kernel *kernel; /* A_FUNCTION */
    uint64_t address;              /* MEMORY, tagged */
    size_t bytes;
    char *sent;           /* .. what the host copied there, in the order of its calls; NULL: nothing */
    fan_cu_call *destroy; /* AN_OBJECT */
    void *ctx;
    size_t refs;
} thing;

struct fan_cu_context {
    struct fan_cu_context *older; /* of the first device: the last machine's */
    int device;
    atomic_int retained;
    _Atomic fan_cu_result lost; /* the code of the error that sticks */
};

static pthread_mutex_t lock_ = PTHREAD_MUTEX_INITIALIZER;
static struct {
    fan_sim *m;
    int devices;
    unsigned era; /* machines so far */
    atomic_bool initialised;
    bool pools;
    int version;
    thing *things[KINDS];
    thing **memory; /* MEMORY by address */
    size_t nmemory, memory_cap;
    size_t live[KINDS];
    struct fan_cu_context
        *contexts; /* of this machine; those of older ones stay, so that nobody's address comes again */
    char hidden[MOST_HIDDEN][48];
    uint64_t calls, calls_of[128];
    char fail_name[48]; /* "": any */
    int64_t fail_at;
    fan_cu_result fail_with;
    bool fail_sticks;
    char said[FAN_ERROR_TEXT]; /* the last thing that went wrong */
    char race[FAN_ERROR_TEXT]; /* the first race */
} fake = {.devices = 1, .version = 12040, .fail_at = -1, .pools = true};

static _Thread_local struct {
    unsigned era;
    int depth;
    struct fan_cu_context *stack[MOST_DEPTH];
} here;

static void lock(void) { (void)pthread_mutex_lock(&lock_); }

static void unlock(void) { (void)pthread_mutex_unlock(&lock_); }

enum {
#define X(name, suffix, version, feature, parameters) NUMBER_##name,
    FAN_CUDA_LIST(X)
#undef X
        NUMBERS
};
_Static_assert(NUMBERS <= 128, "more functions than are counted");

static const char *const names[] = {
#define X(name, suffix, version, feature, parameters) #name,
    FAN_CUDA_LIST(X)
#undef X
};

static fan_cu_result planned(int number)
{
    fan_cu_result code = OK;
    lock();
    fake.calls++;
    fake.calls_of[number]++;
    if (fake.fail_at >= 0 && (!fake.fail_name[0] || strcmp(fake.fail_name, names[number]) == 0) &&
        fake.fail_at-- == 0) {
        code = fake.fail_with;
        if (fake.fail_sticks && here.era == fake.era && here.depth > 0)
            here.stack[here.depth - 1]->lost = code;
    }
    unlock();
    return code;
}

#define CALL(name)                                                                                         \
    do {                                                                                                   \
        fan_cu_result call_code = planned(NUMBER_##name);                                                  \
        if (call_code)                                                                                     \
            return call_code;                                                                              \
        if (!fake.initialised && NUMBER_##name != NUMBER_Init && NUMBER_##name != NUMBER_DriverGetVersion) \
            return NOT_INITIALIZED;                                                                        \
    } while (0)

/* ---- contexts ---- */

static struct fan_cu_context *current(void)
{
    if (here.era != fake.era) {
        here.era = fake.era;
        here.depth = 0;
    }
    return here.depth ? here.stack[here.depth - 1] : NULL;
}

/* inside: the current context, of which nothing is lost yet. */
static fan_cu_result inside(struct fan_cu_context **out)
{
    *out = current();
    if (!*out || !fake.m)
        return INVALID_CONTEXT;
    return (*out)->lost;
}

#define INSIDE(c)                               \
    struct fan_cu_context *c;                   \
    do {                                        \
        fan_cu_result inside_code = inside(&c); \
        if (inside_code)                        \
            return inside_code;                 \
    } while (0)

/* ---- things ---- */

static thing *new_thing(kind k, int device)
{
    thing *t = fan_calloc(sizeof *t);
    if (t) {
        t->kind = k;
        t->device = device;
    }
    return t;
}

/* memory_place: of the first memory that does not lie before `address`. Locked. */
static size_t memory_place(uint64_t address)
{
    size_t lo = 0, hi = fake.nmemory;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (fake.memory[mid]->address < address)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* show: t is made, and found from here on by every thread. Memory needs a place that was made for it. */
static void show(thing *t)
{
    lock();
    t->next = fake.things[t->kind];
    fake.things[t->kind] = t;
    fake.live[t->kind]++;
    if (t->kind == MEMORY) {
        size_t i = memory_place(t->address);
        memmove(fake.memory + i + 1, fake.memory + i, (fake.nmemory++ - i) * sizeof *fake.memory);
        fake.memory[i] = t;
    }
    unlock();
}

static thing *find(kind k, const void *handle)
{
    thing *found = NULL;
    lock();
    for (thing *t = fake.things[k]; t && !found; t = t->next)
        if (t == handle)
            found = t;
    unlock();
    return found;
}

static thing *memory_at(uint64_t address, uint64_t bytes)
{
    lock();
    size_t i = memory_place(address + 1);
    thing *t = i ? fake.memory[i - 1] : NULL;
    bool inside = t && address - t->address < t->bytes && bytes <= t->bytes - (address - t->address);
    unlock();
    return inside ? t : NULL;
}

/* unlist: nobody finds it any more. Locked. */
static void unlist(thing *gone)
{
    for (thing **at = &fake.things[gone->kind]; *at; at = &(*at)->next)
        if (*at == gone) {
            *at = gone->next;
            fake.live[gone->kind]--;
            break;
        }
}

static void drop_thing(thing *gone)
{
    lock();
    unlist(gone);
    size_t i = gone->kind == MEMORY ? memory_place(gone->address) : fake.nmemory;
    if (i < fake.nmemory && fake.memory[i] == gone)
        memmove(fake.memory + i, fake.memory + i + 1, (--fake.nmemory - i) * sizeof *fake.memory);
    unlock();
    fan_stream_drop(gone->stream);
    fan_event_drop(gone->event);
    fan_free(gone->sent);
    fan_free(gone);
}

/* own_stream: the calling thread's per-thread stream of a device, made when it is first named. */
static fan_stream *own_stream(int device)
{
    uint64_t id = fan_thread_id();
    fan_stream *s = NULL;
    lock();
    for (thing *t = fake.things[A_STREAM]; t && !s; t = t->next)
        if (t->thread == id && t->device == device)
            s = t->stream;
    unlock();
    if (s)
        return fan_stream_hold(s);
    thing *t = new_thing(A_STREAM, device);
    if (!t || fan_sim_stream(fake.m, device, true, &t->stream, NULL) != FAN_OK) {
        fan_free(t);
        return NULL;
    }
    t->thread = id;
    s = fan_stream_hold(t->stream);
    show(t);
    lock();
    fake.live[A_STREAM]--; /* nobody asked for it */
    unlock();
    return s;
}

/* stream_of: a hold on what a handle means in this context. */
static fan_cu_result stream_of(const struct fan_cu_context *c, fan_cu_stream handle, fan_stream **out)
{
    fan_device *d = fan_sim_device(fake.m, c->device);
    uintptr_t number = (uintptr_t)handle;
    if (number <= 1)
        *out = d->backend->current(d);
    else if (number == 2)
        *out = own_stream(c->device);
    else {
        thing *t = find(A_STREAM, handle);
        if (!t || t->thread)
            return find(DESTROYED, handle) ? CONTEXT_IS_DESTROYED : INVALID_HANDLE;
        *out = fan_stream_hold(t->stream);
    }
    return *out ? OK : OUT_OF_MEMORY;
}

/* code_of: what the machine said, as the driver's code; what it said is kept for tests. */
static fan_cu_result code_of(fan_status status, const fan_error *err)
{
    if (status == FAN_OK)
        return OK;
    lock();
    snprintf(fake.said, sizeof fake.said, "%s", err->text);
    unlock();
    switch (status) {
    case FAN_ERR_DEVICE_NOMEM:
    case FAN_ERR_NOMEM:
        return OUT_OF_MEMORY;
    case FAN_ERR_CAPTURE:
        return err->code ? err->code : 900;
    case FAN_ERR_VALUE:
        return INVALID_VALUE;
    default:
        return UNKNOWN;
    }
}

/* note_race: the checker's finding is for the test; the driver knows nothing of it. */
static fan_status note_race(fan_status status, const fan_error *err)
{
    if (status != FAN_ERR_RACE)
        return status;
    lock();
    if (!fake.race[0])
        snprintf(fake.race, sizeof fake.race, "%s", err->text);
    unlock();
    return FAN_OK;
}

/* settle: a race that a release found is taken note of, so that no later call stumbles over it. */
static void settle(void)
{
    fan_error err = {.status = FAN_OK};
    (void)note_race(fan_sim_pending(fake.m, &err), &err);
}

static fan_cu_result done(fan_status status, const fan_error *err) { return code_of(note_race(status, err), err); }

/* unsafe: a call that disturbs the captures of others unless this thread is in relaxed mode. */
static fan_cu_result unsafe(const char *call)
{
    fan_error err = {.status = FAN_OK};
    return done(fan_sim_unsafe(fake.m, call, &err), &err);
}

#define UNSAFE(call)                              \
    do {                                          \
        fan_cu_result unsafe_code = unsafe(call); \
        if (unsafe_code)                          \
            return unsafe_code;                   \
    } while (0)

/* ---- work ---- */

typedef struct work {
    void (*run)(struct work *w);
    const fan_fake_kernel *kernel;
    int64_t threads;
    void *to;
    uint64_t address;
    size_t bytes;
    unsigned char byte;
    fan_device *device;
    char payload[];
} work;

static fan_status run_work(void *ctx, fan_error *err)
{
    work *w = ctx;
    (void)err;
    w->run(w);
    return FAN_OK;
}

/* queue: puts w behind what s has; the machine frees it. */
static fan_cu_result queue(fan_stream *s, const char *name, work *w, fan_array *const *reads, size_t nreads,
                           fan_array *const *writes, size_t nwrites)
{
    fan_error err = {.status = FAN_OK};
    settle();
    fan_sim_kernel k = {.name = name,
                        .fn = run_work,
                        .fini = fan_free,
                        .ctx = w,
                        .reads = reads,
                        .nreads = nreads,
                        .writes = writes,
                        .nwrites = nwrites,
                        .us = -1};
    fan_status status = fan_sim_launch(fake.m, s, &k, &err);
    if (status != FAN_OK)
        fan_free(w); /* it was not taken over */
    return done(status, &err);
}

static void *host(uint64_t address) { return (void *)(uintptr_t)(address & ~FAN_FAKE_TAG); }

static fan_array bytes_at(uint64_t address, size_t bytes, int64_t *dims)
{
    dims[0] = (int64_t)bytes;
    dims[1] = 1;
    return (fan_array){.data = host(address),
                       .dtype = FAN_DT_UINT8,
                       .ndim = 1,
                       .size = (int64_t)bytes,
                       .shape = dims,
                       .strides = dims + 1,
                       .writable = true};
}

static void run_copy_in(work *w) { memcpy(host(w->address), w->payload, w->bytes); }

static void run_copy_out(work *w) { memcpy(w->to, host(w->address), w->bytes); }

static void run_fill(work *w) { memset(host(w->address), w->byte, w->bytes); }

static void run_kernel(work *w) { w->kernel->run(w->payload, w->threads); }

/* run_with_table: behind the arguments lies the table as it was to be when the kernel was queued. Where something else
 * is there now the kernel would stray. */
static void run_with_table(work *w)
{
    fan_k_many *a = (fan_k_many *)(void *)w->payload;
    const char *table = w->payload + w->kernel->bytes;
    if (memcmp(host(a->table), table, fan_fake_table_bytes(a)) != 0) {
        fake.contexts[w->device->index].lost = ILLEGAL_ADDRESS;
        return;
    }
    w->kernel->run(w->payload, w->threads);
}

static void run_free(work *w) { w->device->backend->free(w->device, host(w->address), w->bytes); }

static work *new_work(void (*run)(work *), uint64_t address, size_t bytes, size_t payload)
{
    work *w = fan_calloc(sizeof *w + payload);
    if (w) {
        w->run = run;
        w->address = address;
        w->bytes = bytes;
    }
    return w;
}

/* ---- the driver ---- */

#define API FAN_FAKE_SHOWN fan_cu_result
/* Each bears our name in here, and is shown by the driver's. */
#define X(name, suffix, version, feature, parameters) \
    FAN_FAKE_SHOWN fan_cu_result fan_fake_##name parameters __asm__("cu" #name suffix);
FAN_CUDA_LIST(X)
#undef X

fan_cu_result fan_fake_Init(unsigned flags)
{
    CALL(Init);
    fake.initialised = flags == 0;
    return flags ? INVALID_VALUE : OK;
}

fan_cu_result fan_fake_DriverGetVersion(int *version)
{
    CALL(DriverGetVersion);
    *version = fake.version;
    return OK;
}

static fan_cu_result known_code(fan_cu_result code, const char **name, const char **text)
{
    static const struct {
        int code;
        const char *name, *text;
    } codes[] = {
#define X(number, name, text) {number, name, text},
        CODE_LIST(X)
#undef X
    };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code == code) {
            *(name ? name : text) = name ? codes[i].name : codes[i].text;
            return OK;
        }
    return INVALID_VALUE;
}

fan_cu_result fan_fake_GetErrorName(fan_cu_result code, const char **name) { return known_code(code, name, NULL); }

fan_cu_result fan_fake_GetErrorString(fan_cu_result code, const char **text) { return known_code(code, NULL, text); }

fan_cu_result fan_fake_DeviceGetCount(int *count)
{
    CALL(DeviceGetCount);
    *count = fake.devices;
    return OK;
}

fan_cu_result fan_fake_DeviceGet(fan_cu_device *out, int ordinal)
{
    CALL(DeviceGet);
    *out = ordinal;
    return ordinal >= 0 && ordinal < fake.devices ? OK : INVALID_DEVICE;
}

fan_cu_result fan_fake_DeviceGetName(char *name, int size, fan_cu_device d)
{
    CALL(DeviceGetName);
    (void)d;
    snprintf(name, (size_t)size, "fanin's fake device");
    return OK;
}

fan_cu_result fan_fake_DeviceGetAttribute(int *out, int which, fan_cu_device d)
{
    CALL(DeviceGetAttribute);
    (void)d;
    switch (which) {
    case FAN_CU_ATTRIBUTE_MULTIPROCESSORS:
        *out = 1;
        return OK;
    case FAN_CU_ATTRIBUTE_MEMORY_POOLS:
        *out = fake.pools;
        return OK;
    default:
        *out = which == FAN_CU_ATTRIBUTE_MAJOR ? 7 : 5;
        return OK;
    }
}

fan_cu_result fan_fake_DevicePrimaryCtxRetain(fan_cu_context *out, fan_cu_device d)
{
    CALL(DevicePrimaryCtxRetain);
    if (d < 0 || d >= fake.devices)
        return INVALID_DEVICE;
    fake.contexts[d].retained++;
    *out = &fake.contexts[d];
    return OK;
}

fan_cu_result fan_fake_DevicePrimaryCtxRelease(fan_cu_device d)
{
    CALL(DevicePrimaryCtxRelease);
    if (d < 0 || d >= fake.devices || fake.contexts[d].retained == 0)
        return INVALID_CONTEXT;
    fake.contexts[d].retained--;
    return OK;
}

fan_cu_result fan_fake_DevicePrimaryCtxGetState(fan_cu_device d, unsigned *flags, int *active)
{
    CALL(DevicePrimaryCtxGetState);
    if (d < 0 || d >= fake.devices)
        return INVALID_DEVICE;
    *flags = 0;
    *active = fake.contexts[d].retained > 0;
    return OK;
}

fan_cu_result fan_fake_CtxGetCurrent(fan_cu_context *out)
{
    CALL(CtxGetCurrent);
    *out = current();
    return OK;
}

fan_cu_result fan_fake_CtxPushCurrent(fan_cu_context c)
{
    CALL(CtxPushCurrent);
    (void)current();
    bool known = false;
    for (int i = 0; i < fake.devices; i++)
        known |= c == &fake.contexts[i];
    if (!known || !c->retained)
        return INVALID_CONTEXT;
    if (here.depth == MOST_DEPTH)
        return OUT_OF_MEMORY;
    here.stack[here.depth++] = c;
    return OK;
}

fan_cu_result fan_fake_CtxPopCurrent(fan_cu_context *out)
{
    struct fan_cu_context *c = current();
    if (!c)
        return INVALID_CONTEXT;
    *out = c;
    here.depth--; /* a pop that is told to fail has popped all the same: nothing else would leave the thread in order */
    CALL(CtxPopCurrent);
    return OK;
}

fan_cu_result fan_fake_CtxSynchronize(void)
{
    fan_error err = {.status = FAN_OK};
    CALL(CtxSynchronize);
    INSIDE(c);
    settle();
    return done(fan_sim_synchronize(fake.m, &err), &err);
}

fan_cu_result fan_fake_ModuleLoadData(fan_cu_module *out, const void *image)
{
    CALL(ModuleLoadData);
    INSIDE(c);
    UNSAFE("cuModuleLoadData");
    uint32_t magic = 0;
    if (!image)
        return INVALID_VALUE;
    memcpy(&magic, image, sizeof magic);
    if (magic != FATBIN && !strstr(image, ".entry fan_any"))
        return INVALID_IMAGE;
    thing *t = new_thing(A_MODULE, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    show(t);
    *out = (fan_cu_module)(void *)t;
    return OK;
}

fan_cu_result fan_fake_ModuleUnload(fan_cu_module m)
{
    CALL(ModuleUnload);
    INSIDE(c);
    UNSAFE("cuModuleUnload");
    thing *t = find(A_MODULE, m);
    if (!t)
        return INVALID_HANDLE;
    drop_thing(t);
    return OK;
}

fan_cu_result fan_fake_ModuleGetFunction(fan_cu_function *out, fan_cu_module m, const char *name)
{
    CALL(ModuleGetFunction);
    INSIDE(c);
    if (!find(A_MODULE, m))
        return INVALID_HANDLE;
    const fan_fake_kernel *k = fan_fake_kernel_find(name);
    if (!k)
        return NOT_FOUND;
    thing *t = new_thing(A_FUNCTION, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    t->kernel = k;
    show(t);
    *out = (fan_cu_function)(void *)t;
    return OK;
}

/* table_of: what will lie where a kernel's table is once its turn comes: what the host sent there last, in the order of
 * its calls. That the kernel waits for the copies is the checker's business, for it reads that memory. NULL: nothing
 * was sent there. */
static const char *table_of(const fan_k_many *a)
{
    const thing *t = memory_at(a->table, fan_fake_table_bytes(a));
    return t && t->sent ? t->sent + (a->table - t->address) : NULL;
}

/* list_accesses: what a kernel touches; *stray: something that is no memory. */
static size_t list_accesses(const fan_fake_kernel *k, const void *args, const char *table, fan_fake_access *a,
                            fan_array **all, size_t *written, bool *stray)
{
    size_t n = k->accesses(args, table, a, written);
    for (size_t i = 0; i < n; i++) {
        int64_t lo, hi;
        a[i].array.shape = a[i].dims;
        a[i].array.strides = a[i].dims + a[i].array.ndim;
        all[i] = &a[i].array;
        fan_array_reach(all[i], &lo, &hi);
        *stray |= hi > lo &&
                  !memory_at(((uint64_t)(uintptr_t)a[i].array.data + (uint64_t)lo) | FAN_FAKE_TAG, (uint64_t)(hi - lo));
    }
    return n;
}

/* launch_on: a kernel that touches what is no memory loses the context, as it would when it runs. */
static fan_cu_result launch_on(struct fan_cu_context *c, fan_stream *s, const fan_fake_kernel *k, const void *args,
                               int64_t threads)
{
    fan_cu_result code = OUT_OF_MEMORY;
    const char *table = k->table ? table_of(args) : NULL;
    if (k->table && !table) {
        c->lost = ILLEGAL_ADDRESS;
        return OK;
    }
    size_t behind = k->table ? fan_fake_table_bytes(args) : 0, most = k->most(args), written;
    fan_fake_access *a = fan_calloc(most * sizeof *a);
    fan_array **all = fan_calloc(most * sizeof *all);
    work *w = new_work(k->table ? run_with_table : run_kernel, 0, 0, k->bytes + behind);
    if (a && all && w) {
        bool stray = false;
        size_t n = list_accesses(k, args, table, a, all, &written, &stray);
        if (stray) {
            c->lost = ILLEGAL_ADDRESS;
            fan_free(w);
            code = OK;
        } else {
            w->kernel = k;
            w->threads = threads;
            w->device = s->device;
            memcpy(w->payload, args, k->bytes);
            if (table)
                memcpy(w->payload + k->bytes, table, behind);
            code = queue(s, k->name, w, all, n - written, all + n - written, written);
        }
        w = NULL;
    }
    fan_free(w);
    fan_free(a);
    fan_free(all);
    return code;
}

fan_cu_result fan_fake_LaunchKernel(fan_cu_function f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                    unsigned bz, unsigned shared, fan_cu_stream handle, void **params, void **extra)
{
    fan_stream *s;
    CALL(LaunchKernel);
    INSIDE(c);
    const thing *t = find(A_FUNCTION, f);
    if (!t || t->device != c->device)
        return INVALID_HANDLE;
    if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra || !params)
        return INVALID_VALUE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = s->device->index == c->device ? launch_on(c, s, t->kernel, params[0], (int64_t)gx * bx) : INVALID_HANDLE;
    fan_stream_drop(s);
    return code;
}

/* ---- memory ---- */

static fan_cu_result allocate(const struct fan_cu_context *c, fan_stream *s, size_t bytes, uint64_t *out)
{
    fan_error err = {.status = FAN_OK};
    fan_device *d = fan_sim_device(fake.m, c->device);
    void *data = NULL;
    if (!bytes)
        return INVALID_VALUE;
    lock();
    int failed = fan_grow((void **)&fake.memory, &fake.memory_cap, fake.nmemory + 16,
                          sizeof *fake.memory); /* several threads may be about to show theirs */
    unlock();
    thing *t = failed ? NULL : new_thing(MEMORY, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code = code_of(d->backend->alloc(d, s, bytes, &data, &err), &err);
    if (code) {
        drop_thing(t);
        return code;
    }
    t->address = (uint64_t)(uintptr_t)data | FAN_FAKE_TAG;
    t->bytes = bytes;
    show(t);
    *out = t->address;
    return OK;
}

fan_cu_result fan_fake_MemAlloc(fan_cu_pointer *out, size_t bytes)
{
    CALL(MemAlloc);
    INSIDE(c);
    UNSAFE("cuMemAlloc");
    return allocate(c, NULL, bytes, out);
}

fan_cu_result fan_fake_MemAllocAsync(fan_cu_pointer *out, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemAllocAsync);
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = allocate(c, s, bytes, out);
    fan_stream_drop(s);
    return code;
}

/* tell: the checker holds against each other all that touched the memory and this release of it. */
static void tell(const thing *t, fan_stream *s)
{
    fan_device *d = fan_sim_device(fake.m, t->device);
    d->backend->dropped(d, host(t->address), t->bytes, &s, s ? 1 : 0);
    settle();
}

fan_cu_result fan_fake_MemFree(fan_cu_pointer p)
{
    CALL(MemFree);
    INSIDE(c);
    UNSAFE("cuMemFree");
    thing *t = memory_at(p, 1);
    if (!t || t->address != p)
        return INVALID_VALUE;
    fan_device *d = fan_sim_device(fake.m, t->device);
    size_t bytes = t->bytes;
    tell(t, NULL);
    drop_thing(t); /* before its address is anybody else's */
    d->backend->free(d, host(p), bytes);
    return OK;
}

fan_cu_result fan_fake_MemFreeAsync(fan_cu_pointer p, fan_cu_stream handle)
{
    fan_stream *s;
    CALL(MemFreeAsync);
    INSIDE(c);
    thing *t = memory_at(p, 1);
    if (!t || t->address != p)
        return INVALID_VALUE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_free, p, t->bytes, 0);
    if (w) {
        w->device = fan_sim_device(fake.m, t->device);
        tell(t, s);
        drop_thing(t);
        code = queue(s, "free", w, NULL, 0, NULL, 0);
    }
    fan_stream_drop(s);
    return w ? code : OUT_OF_MEMORY;
}

fan_cu_result fan_fake_PointerGetAttribute(void *out, int which, fan_cu_pointer p)
{
    CALL(PointerGetAttribute);
    const thing *t = memory_at(p, 1);
    if (!t || which != FAN_CU_POINTER_DEVICE_ORDINAL)
        return INVALID_VALUE;
    *(int *)out = t->device;
    return OK;
}

fan_cu_result fan_fake_DeviceGetDefaultMemPool(fan_cu_pool *out, fan_cu_device d)
{
    CALL(DeviceGetDefaultMemPool);
    *out = (fan_cu_pool)(void *)&fake.contexts[d];
    return OK;
}

fan_cu_result fan_fake_MemPoolTrimTo(fan_cu_pool pool, size_t keep)
{
    fan_error err = {.status = FAN_OK};
    bool ran = true;
    CALL(MemPoolTrimTo);
    UNSAFE("cuMemPoolTrimTo");
    (void)pool, (void)keep;
    while (ran) /* what was freed in the order of a stream goes */
        if (fan_sim_step(fake.m, &ran, &err) != FAN_OK)
            break;
    return OK;
}

/* transfer: the start of the three: the range must be memory. */
static fan_cu_result transfer(const struct fan_cu_context *c, uint64_t p, size_t bytes, fan_cu_stream handle,
                              fan_stream **s)
{
    if (!memory_at(p, bytes))
        return INVALID_VALUE;
    return stream_of(c, handle, s);
}

fan_cu_result fan_fake_MemcpyHtoDAsync(fan_cu_pointer to, const void *from, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyHtoDAsync);
    INSIDE(c);
    fan_cu_result code = transfer(c, to, bytes, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_copy_in, to, bytes, bytes);
    fan_array a = bytes_at(to, bytes, dims);
    thing *t = memory_at(to, bytes);
    if (w)
        memcpy(w->payload, from, bytes);
    if (t && (t->sent || (t->sent = fan_calloc(t->bytes)) != NULL))
        memcpy(t->sent + (to - t->address), from, bytes);
    code = w ? queue(s, "copy in", w, NULL, 0, (fan_array *const[]){&a}, 1) : OUT_OF_MEMORY;
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_MemcpyDtoHAsync(void *to, fan_cu_pointer from, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemcpyDtoHAsync);
    INSIDE(c);
    fan_cu_result code = transfer(c, from, bytes, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_copy_out, from, bytes, 0);
    fan_array a = bytes_at(from, bytes, dims);
    if (w)
        w->to = to;
    code = w ? queue(s, "copy out", w, (fan_array *const[]){&a}, 1, NULL, 0) : OUT_OF_MEMORY;
    if (code == OK) { /* into pageable memory: the call returns when it is there */
        fan_error err = {.status = FAN_OK};
        code = done(s->device->backend->sync(s, &err), &err);
    }
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_MemsetD8Async(fan_cu_pointer p, unsigned char byte, size_t bytes, fan_cu_stream handle)
{
    fan_stream *s;
    int64_t dims[2];
    CALL(MemsetD8Async);
    INSIDE(c);
    fan_cu_result code = transfer(c, p, bytes, handle, &s);
    if (code)
        return code;
    work *w = new_work(run_fill, p, bytes, 0);
    fan_array a = bytes_at(p, bytes, dims);
    if (w)
        w->byte = byte;
    code = w ? queue(s, "fill", w, NULL, 0, (fan_array *const[]){&a}, 1) : OUT_OF_MEMORY;
    fan_stream_drop(s);
    return code;
}

/* ---- streams and events ---- */

fan_cu_result fan_fake_StreamCreate(fan_cu_stream *out, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    CALL(StreamCreate);
    INSIDE(c);
    thing *t = new_thing(A_STREAM, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code =
        code_of(fan_sim_stream(fake.m, c->device, !(flags & FAN_CU_STREAM_NON_BLOCKING), &t->stream, &err), &err);
    if (code) {
        drop_thing(t);
        return code;
    }
    show(t);
    *out = (fan_cu_stream)(void *)t;
    return OK;
}

fan_cu_result fan_fake_StreamDestroy(fan_cu_stream s)
{
    CALL(StreamDestroy);
    INSIDE(c);
    thing *t = find(A_STREAM, s);
    if (!t)
        return find(DESTROYED, s) ? CONTEXT_IS_DESTROYED : INVALID_HANDLE;
    lock();
    unlist(t);
    unlock();
    t->kind = DESTROYED; /* its handle is nobody else's; what is queued still runs, and the device is waited for with it */
    show(t);
    return OK;
}

fan_cu_result fan_fake_StreamGetCtx(fan_cu_stream s, fan_cu_context *out)
{
    CALL(StreamGetCtx);
    INSIDE(c);
    const thing *t = (uintptr_t)s > 2 ? find(A_STREAM, s) : NULL;
    if ((uintptr_t)s > 2 && !t)
        return find(DESTROYED, s) ? CONTEXT_IS_DESTROYED : INVALID_HANDLE;
    *out = t ? &fake.contexts[t->device] : c;
    return OK;
}

fan_cu_result fan_fake_StreamSynchronize(fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(StreamSynchronize);
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    settle();
    code = done(s->device->backend->sync(s, &err), &err);
    fan_stream_drop(s);
    return code ? code : c->lost;
}

fan_cu_result fan_fake_StreamWaitEvent(fan_cu_stream handle, fan_cu_event e, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(StreamWaitEvent);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t || flags)
        return t ? INVALID_VALUE : INVALID_HANDLE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = done(s->device->backend->wait(s, t->event, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_EventCreate(fan_cu_event *out, unsigned flags)
{
    fan_error err = {.status = FAN_OK};
    CALL(EventCreate);
    INSIDE(c);
    (void)flags;
    thing *t = new_thing(AN_EVENT, c->device);
    if (!t)
        return OUT_OF_MEMORY;
    fan_cu_result code = code_of(fan_event_new(fan_sim_device(fake.m, c->device), &t->event, &err), &err);
    if (code) {
        drop_thing(t);
        return code;
    }
    show(t);
    *out = (fan_cu_event)(void *)t;
    return OK;
}

fan_cu_result fan_fake_EventDestroy(fan_cu_event e)
{
    CALL(EventDestroy);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    drop_thing(t);
    return OK;
}

fan_cu_result fan_fake_EventRecord(fan_cu_event e, fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    CALL(EventRecord);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = s->device->index == t->device ? done(s->device->backend->record(t->event, s, &err), &err) : INVALID_HANDLE;
    fan_stream_drop(s);
    return code;
}

fan_cu_result fan_fake_EventQuery(fan_cu_event e)
{
    fan_error err = {.status = FAN_OK};
    bool passed = false;
    CALL(EventQuery);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    if (!fan_sim_event_captured(fake.m, t->event)) /* else it has no time at all */
        UNSAFE("cuEventQuery");
    fan_cu_result code = done(t->event->device->backend->query(t->event, &passed, &err), &err);
    return code ? code : passed ? OK : NOT_READY;
}

fan_cu_result fan_fake_EventSynchronize(fan_cu_event e)
{
    fan_error err = {.status = FAN_OK};
    CALL(EventSynchronize);
    INSIDE(c);
    thing *t = find(AN_EVENT, e);
    if (!t)
        return INVALID_HANDLE;
    settle();
    fan_cu_result code = done(t->event->device->backend->event_sync(t->event, &err), &err);
    return code ? code : c->lost;
}

/* ---- capture ---- */

fan_cu_result fan_fake_ThreadExchangeStreamCaptureMode(int *mode)
{
    CALL(ThreadExchangeStreamCaptureMode);
    if (*mode < 0 || *mode > FAN_CU_CAPTURE_MODE_RELAXED)
        return INVALID_VALUE;
    *mode = fan_sim_capture_mode(*mode);
    return OK;
}

/* A graph: what was captured, and what is to be told when nobody has it any more. */
struct fan_cu_graph {
    fan_sim_graph *graph; /* held; NULL while the capture is under way */
    uint64_t id;
    thing *objects[256];
    size_t nobjects, refs;
    struct fan_cu_graph *next;
};

static struct fan_cu_graph *graphs;

/* graph_of: the graph of a capture under way, made when it is first asked for. */
static struct fan_cu_graph *graph_of(uint64_t id)
{
    lock();
    struct fan_cu_graph *g = graphs;
    while (g && g->id != id)
        g = g->next;
    if (!g && (g = fan_calloc(sizeof *g))) { /* under the lock: two threads that ask get one graph */
        g->id = id;
        g->refs = 1;
        g->next = graphs;
        graphs = g;
    }
    unlock();
    return g;
}

static void object_release(thing *t)
{
    lock();
    bool last = --t->refs == 0;
    unlock();
    if (!last)
        return;
    t->destroy(t->ctx);
    drop_thing(t);
}

static void graph_release(struct fan_cu_graph *g)
{
    lock();
    bool last = --g->refs == 0;
    for (struct fan_cu_graph **at = &graphs; last && *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    unlock();
    if (!last)
        return;
    fan_sim_graph_drop(g->graph);
    for (size_t i = 0; i < g->nobjects; i++)
        object_release(g->objects[i]);
    fan_free(g);
}

/* blocking_captured: a stream that the legacy stream of a device would have to wait for is captured. */
static bool blocking_captured(int device)
{
    bool found = false;
    lock();
    for (const thing *t = fake.things[A_STREAM]; t && !found; t = t->next)
        if (t->device == device && t->stream) {
            const fan_sim_queue *q = t->stream->impl;
            found = q->blocking && fan_sim_capture_state(fake.m, t->stream, NULL, NULL);
        }
    unlock();
    return found;
}

fan_cu_result fan_fake_StreamGetCaptureInfo(fan_cu_stream handle, int *status, uint64_t *id, fan_cu_graph *graph,
                                            const void **frontier, size_t *count)
{
    fan_stream *s;
    uint64_t number = 0;
    CALL(StreamGetCaptureInfo);
    INSIDE(c);
    (void)frontier, (void)count;
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    *status = fan_sim_capture_state(fake.m, s, &number, NULL);
    bool rests = (uintptr_t)handle <= 1 && blocking_captured(c->device);
    fan_stream_drop(s);
    if (rests)
        return 906; /* and no capture is broken */
    if (id)
        *id = *status == 1 ? number : UINT64_MAX; /* of one that is none, or broken, it says nothing */
    if (graph && *status == 1 && !(*graph = graph_of(number)))
        return OUT_OF_MEMORY;
    return OK;
}

fan_cu_result fan_fake_UserObjectCreate(fan_cu_object *out, void *ctx, fan_cu_call *destroy, unsigned refs,
                                        unsigned flags)
{
    CALL(UserObjectCreate);
    if (flags != FAN_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC || !refs || !destroy)
        return INVALID_VALUE;
    thing *t = new_thing(AN_OBJECT, 0);
    if (!t)
        return OUT_OF_MEMORY;
    t->destroy = destroy;
    t->ctx = ctx;
    t->refs = refs;
    show(t);
    *out = (fan_cu_object)(void *)t;
    return OK;
}

fan_cu_result fan_fake_UserObjectRelease(fan_cu_object o, unsigned count)
{
    CALL(UserObjectRelease);
    thing *t = find(AN_OBJECT, o);
    if (!t || count != 1)
        return INVALID_VALUE;
    object_release(t);
    return OK;
}

fan_cu_result fan_fake_GraphRetainUserObject(fan_cu_graph g, fan_cu_object o, unsigned count, unsigned flags)
{
    CALL(GraphRetainUserObject);
    thing *t = find(AN_OBJECT, o);
    if (!t || count != 1 || flags != FAN_CU_GRAPH_USER_OBJECT_MOVE)
        return INVALID_VALUE;
    lock();
    bool room = g->nobjects < sizeof g->objects / sizeof *g->objects;
    if (room)
        g->objects[g->nobjects++] = t;
    unlock();
    return room ? OK : INVALID_VALUE;
}

/* What callers of the driver use, and the backend does not. */

API cuStreamBeginCapture_v2(fan_cu_stream handle, int mode);
API cuStreamEndCapture(fan_cu_stream handle, fan_cu_graph *out);
API cuGraphInstantiateWithFlags(fan_cu_graph *out, fan_cu_graph g, uint64_t flags);
API cuGraphLaunch(fan_cu_graph g, fan_cu_stream handle);
API cuGraphDestroy(fan_cu_graph g);
API cuGraphExecDestroy(fan_cu_graph g);
API cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

fan_cu_result cuStreamBeginCapture_v2(fan_cu_stream handle, int mode)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    code = done(fan_sim_capture_begin(fake.m, s, mode, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result cuStreamEndCapture(fan_cu_stream handle, fan_cu_graph *out)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    fan_sim_graph *graph = NULL;
    uint64_t id = 0;
    *out = NULL;
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    (void)fan_sim_capture_state(fake.m, s, &id, NULL);
    struct fan_cu_graph *g = id ? graph_of(id) : NULL;
    code = done(fan_sim_capture_end(fake.m, s, &graph, &err), &err);
    bool ended = g && fan_sim_capture_state(fake.m, s, NULL, NULL) == 0;
    fan_stream_drop(s);
    if (g && ended) {
        g->graph = graph;
        if (code)
            graph_release(g);
        else
            *out = g;
    }
    return code;
}

fan_cu_result cuGraphInstantiateWithFlags(fan_cu_graph *out, fan_cu_graph g, uint64_t flags)
{
    (void)flags;
    lock();
    g->refs++; /* what is launched is what was captured */
    unlock();
    *out = g;
    return OK;
}

fan_cu_result cuGraphLaunch(fan_cu_graph g, fan_cu_stream handle)
{
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    INSIDE(c);
    fan_cu_result code = stream_of(c, handle, &s);
    if (code)
        return code;
    settle();
    code = done(fan_sim_graph_launch(g->graph, s, &err), &err);
    fan_stream_drop(s);
    return code;
}

fan_cu_result cuGraphDestroy(fan_cu_graph g)
{
    graph_release(g);
    return OK;
}

fan_cu_result cuGraphExecDestroy(fan_cu_graph g)
{
    graph_release(g);
    return OK;
}

/* ---- by name ---- */

static bool hidden(const char *name)
{
    bool found = false;
    for (int i = 0; i < MOST_HIDDEN; i++)
        found |= strcmp(fake.hidden[i], name) == 0;
    return found;
}

fan_cu_result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    static const struct {
        const char *name;
        int version;
        size_t at;
    } rows[] = {
#define X(name, suffix, version, feature, parameters) {"cu" #name, version, NUMBER_##name},
        FAN_CUDA_LIST(X)
#undef X
    };
    (void)flags;
    *out = NULL;
    *status = 1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].name, name) != 0 || version < rows[i].version || fake.version < rows[i].version ||
            hidden(name + 2))
            continue;
        switch (rows[i].at) {
#define X(name, suffix, version, feature, parameters)   \
    case NUMBER_##name: {                               \
        fan_cu_result(*f) parameters = fan_fake_##name; \
        memcpy(out, &f, sizeof f);                      \
        break;                                          \
    }
            FAN_CUDA_LIST(X)
#undef X
        default:
            break;
        }
        *status = 0;
        return OK;
    }
    return NOT_FOUND;
}

/* ---- for tests ---- */

FAN_FAKE_SHOWN int fanFakeReset(int devices, uint64_t seed, int schedule, uint64_t starve, uint64_t memory, int check);
FAN_FAKE_SHOWN void fanFakeFail(const char *name, int64_t at, int code, int sticks);
FAN_FAKE_SHOWN void fanFakeSet(int version, int pools, int initialised);
FAN_FAKE_SHOWN void fanFakeHide(int place, const char *name);
FAN_FAKE_SHOWN uint64_t fanFakeCalls(const char *name);
FAN_FAKE_SHOWN uint64_t fanFakeRaces(void);
FAN_FAKE_SHOWN const char *fanFakeRace(void);
FAN_FAKE_SHOWN const char *fanFakeSaid(void);
FAN_FAKE_SHOWN int fanFakeSynchronize(void);
FAN_FAKE_SHOWN int fanFakeStep(void);
FAN_FAKE_SHOWN int64_t fanFakeLive(int which);
FAN_FAKE_SHOWN int fanFakeDepth(void);
FAN_FAKE_SHOWN int fanFakeMode(void);
FAN_FAKE_SHOWN int fanFakeLaunch(fan_cu_stream handle, const char *name, void (*call)(int64_t), int64_t token,
                                 const int64_t *reads, int nreads, const int64_t *writes, int nwrites);

static void forget_all(void)
{
    while (graphs) {
        graphs->refs = 1;
        graph_release(graphs);
    }
    for (int k = 0; k < KINDS; k++)
        while (fake.things[k])
            drop_thing(fake.things[k]);
    fan_free(fake.memory);
    fake.memory = NULL;
    fake.memory_cap = 0;
}

int fanFakeReset(int devices, uint64_t seed, int schedule, uint64_t starve, uint64_t memory, int check)
{
    fan_error err = {.status = FAN_OK};
    forget_all();
    fan_sim_drop(fake.m);
    unsigned era = fake.era + 1;
    struct fan_cu_context *contexts = fan_calloc(MOST_DEVICES * sizeof *contexts);
    if (!contexts)
        return -1;
    contexts->older = fake.contexts;
    bool initialised = fake.initialised;
    memset(&fake, 0, sizeof fake);
    fake.initialised = initialised;
    fake.era = era;
    fake.contexts = contexts;
    for (int i = 0; i < MOST_DEVICES; i++)
        contexts[i].device = i;
    fake.version = 12040;
    fake.fail_at = -1;
    fake.pools = true;
    fake.devices = devices;
    if (devices == 0)
        return 0;
    fan_sim_config config = {.devices = devices > 0 && devices <= MOST_DEVICES ? devices : 1,
                             .seed = seed,
                             .schedule = (fan_sim_schedule)schedule,
                             .starve = starve,
                             .memory = memory,
                             .run_work = true,
                             .bare = true};
    if (fan_sim_new(&config, NULL, &fake.m, &err) != FAN_OK) {
        fake.m = NULL;
        snprintf(fake.said, sizeof fake.said, "%s", err.text);
        return -1;
    }
    fan_sim_check(fake.m, check);
    return 0;
}

void fanFakeFail(const char *name, int64_t at, int code, int sticks)
{
    lock();
    snprintf(fake.fail_name, sizeof fake.fail_name, "%s", name ? name : "");
    fake.fail_at = at;
    fake.fail_with = code;
    fake.fail_sticks = sticks;
    unlock();
}

void fanFakeSet(int version, int pools, int initialised)
{
    fake.version = version;
    fake.pools = pools;
    fake.initialised = initialised;
}

void fanFakeHide(int place, const char *name)
{
    if (place >= 0 && place < MOST_HIDDEN)
        snprintf(fake.hidden[place], sizeof fake.hidden[place], "%s", name);
}

uint64_t fanFakeCalls(const char *name)
{
    uint64_t n = UINT64_MAX;
    lock();
    if (!name || !name[0])
        n = fake.calls;
    for (int i = 0; i < NUMBERS && n == UINT64_MAX; i++)
        if (strcmp(names[i], name) == 0)
            n = fake.calls_of[i];
    unlock();
    return n;
}

uint64_t fanFakeRaces(void)
{
    if (!fake.m)
        return 0;
    settle();
    return fan_sim_races(fake.m);
}

/* told: a text as it is now; it lives until the thread asks again. */
static const char *told(const char *text)
{
    static _Thread_local char copy[FAN_ERROR_TEXT];
    lock();
    snprintf(copy, sizeof copy, "%s", text);
    unlock();
    return copy;
}

const char *fanFakeRace(void) { return told(fake.race); }

const char *fanFakeSaid(void) { return told(fake.said); }

int fanFakeSynchronize(void)
{
    fan_error err = {.status = FAN_OK};
    if (!fake.m)
        return INVALID_CONTEXT;
    settle();
    return done(fan_sim_synchronize(fake.m, &err), &err);
}

int fanFakeStep(void)
{
    fan_error err = {.status = FAN_OK};
    bool ran;
    settle();
    return done(fan_sim_step(fake.m, &ran, &err), &err);
}

int64_t fanFakeLive(int which)
{
    int64_t n = 0;
    if (which > 0 && which < KINDS) {
        lock();
        n = (int64_t)fake.live[which];
        unlock();
        return n;
    }
    for (int i = 0; fake.contexts && i < MOST_DEVICES; i++)
        n += fake.contexts[i].retained;
    return n;
}

int fanFakeMode(void)
{
    int mode = fan_sim_capture_mode(0);
    (void)fan_sim_capture_mode(mode);
    return mode;
}

int fanFakeDepth(void)
{
    (void)current();
    return here.depth;
}

/* A kernel of a test's. */
typedef struct callback {
    void (*call)(int64_t);
    int64_t token;
} callback;

static fan_status run_callback(void *ctx, fan_error *err)
{
    callback *c = ctx;
    (void)err;
    c->call(c->token);
    return FAN_OK;
}

/* views: from (address, dtype, ndim, extents .., strides ..) one after the other. */
static const int64_t *view(const int64_t *at, fan_fake_access *a)
{
    a->array = (fan_array){
        .data = host((uint64_t)at[0]), .dtype = (fan_dtype)at[1], .ndim = (int)at[2], .size = 1, .writable = true};
    memcpy(a->dims, at + 3, 2 * (size_t)at[2] * sizeof *at);
    a->array.shape = a->dims;
    a->array.strides = a->dims + at[2];
    for (int64_t i = 0; i < at[2]; i++)
        a->array.size *= a->dims[i];
    return at + 3 + 2 * at[2];
}

int fanFakeLaunch(fan_cu_stream handle, const char *name, void (*call)(int64_t), int64_t token, const int64_t *reads,
                  int nreads, const int64_t *writes, int nwrites)
{
    enum { MOST = 16 };
    static _Thread_local fan_fake_access a[2 * MOST];
    fan_array *in[MOST], *out[MOST];
    fan_error err = {.status = FAN_OK};
    fan_stream *s;
    INSIDE(c);
    if (nreads > MOST || nwrites > MOST)
        return INVALID_VALUE;
    callback *k = fan_alloc(sizeof *k);
    fan_cu_result code = k ? stream_of(c, handle, &s) : OUT_OF_MEMORY;
    if (code) {
        fan_free(k);
        return code;
    }
    *k = (callback){call, token};
    for (int i = 0; i < nreads; i++, in[i - 1] = &a[i - 1].array)
        reads = view(reads, &a[i]);
    for (int i = 0; i < nwrites; i++, out[i - 1] = &a[MOST + i - 1].array)
        writes = view(writes, &a[MOST + i]);
    settle();
    fan_sim_kernel job = {.name = name,
                          .fn = run_callback,
                          .fini = fan_free,
                          .ctx = k,
                          .reads = in,
                          .nreads = (size_t)nreads,
                          .writes = out,
                          .nwrites = (size_t)nwrites,
                          .us = -1};
    fan_status status = fan_sim_launch(fake.m, s, &job, &err);
    if (status != FAN_OK)
        fan_free(k);
    fan_stream_drop(s);
    return done(status, &err);
}
