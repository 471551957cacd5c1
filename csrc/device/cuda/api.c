#define _GNU_SOURCE /* dladdr */
/* The driver's functions: finds them in the library, with the advice for a driver that cannot be
 * opened; then the texts and the meaning of the driver's codes. */
#include "device/cuda/api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#ifdef __APPLE__
#define SYSTEM "libcuda.dylib"
#else
#define SYSTEM "libcuda.so.1"
#endif

typedef fan_cu_result get_address(const char *name, void **out, int version, uint64_t flags);
typedef fan_cu_result get_address_v2(const char *name, void **out, int version, uint64_t flags,
                                     int *status);

/* POSIX guarantees that a function's address may be copied from an object pointer. */
static void *api_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}

typedef struct finder {
    void *library;
    get_address *get;
    get_address_v2 *get2;
} finder;

static void *api_find(const finder *f, const char *name, const char *suffix, int version)
{
    char full[64];
    void *p = NULL;
    int status = 0;
    int code = 0;
    if (f->get2)
        code = f->get2(name, &p, version, 0, &status);
    else if (f->get)
        code = f->get(name, &p, version, 0);
    if (code == 0 && p)
        return p;
    if (f->get || f->get2) /* a function that it lacks for this version does not exist */
        return NULL;
    snprintf(full, sizeof full, "%s%s", name, suffix);
    return api_symbol(f->library, full);
}

/* api_advice: returns what to do about a code of cuInit. */
static const char *api_advice(fan_cu_result code)
{
    switch (code) {
    case 34:
        return "this is the stub library of a toolkit, not a driver: take its folder out of "
               "LD_LIBRARY_PATH";
    case 35:
        return "the driver is older than this library requires: install a newer one";
    case 100:
        return "the driver finds no GPU: is one plugged in, passed into the container, or hidden "
               "by CUDA_VISIBLE_DEVICES?";
    case 802:
        return "the machine's GPUs are not connected yet: on HGX and DGX machines "
               "nvidia-fabricmanager must run (systemctl status nvidia-fabricmanager)";
    case 803:
        return "the driver's kernel module and its library are of different releases: restart the "
               "machine after an update";
    case 804:
        return "the compatibility library does not work with this GPU: take it out of "
               "LD_LIBRARY_PATH";
    case 999:
    case 3:
        return "the driver could not be initialised: nvidia-smi may show why";
    default:
        return "nvidia-smi may show why";
    }
}

fan_status fan_cuda_api_open(fan_cuda_api *api, const char *path, fan_error *err)
{
    char text[256];
    memset(api, 0, sizeof *api);
    if (!path)
        path = SYSTEM;
    snprintf(api->path, sizeof api->path, "%s", path); /* it may be truncated */
    (void)dlerror();
    api->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!api->library) {
        const char *why = dlerror();
        return fan_fail_code(err, FAN_ERR_DEVICE, 0,
                             "no CUDA driver: %s. Everything else works without it",
                             why ? why : api->path);
    }
    finder f = {.library = api->library};
    void *p = api_symbol(api->library, "cuGetProcAddress_v2");
    memcpy(&f.get2, &p, sizeof p);
    p = api_symbol(api->library, "cuGetProcAddress");
    memcpy(&f.get, &p, sizeof p);
    for (int i = 0; i < FAN_CUDA_FEATURES; i++)
        api->has[i] = true;
#define X(name, suffix, version, feature, parameters)      \
    p = api_find(&f, "cu" #name, suffix, version);         \
    memcpy(&api->name, &p, sizeof p);                      \
    if (!p) {                                              \
        api->has[FAN_CUDA_##feature] = false;              \
        if (!api->missing[FAN_CUDA_##feature])             \
            api->missing[FAN_CUDA_##feature] = "cu" #name; \
    }
    FAN_CUDA_LIST(X)
#undef X
    Dl_info where;
    memcpy(&p, &api->Init, sizeof p);
    if (p && dladdr(p, &where) && where.dli_fname)
        snprintf(api->path, sizeof api->path, "%s", where.dli_fname);
    if (api->DriverGetVersion)
        (void)api->DriverGetVersion(&api->version);
    if (!api->has[FAN_CUDA_MUST]) {
        return fan_fail_code(
            err, FAN_ERR_DEVICE, 0,
            "the CUDA driver %s (CUDA %d.%d) has no %s: fanin needs a driver of CUDA 11.0 or later",
            api->path, api->version / 1000, api->version % 1000 / 10, api->missing[FAN_CUDA_MUST]);
    }
    fan_cu_result code = api->Init(0);
    if (code) {
        return fan_fail_code(err, FAN_ERR_DEVICE, code,
                             "cuInit failed: %s (%s, CUDA %d.%d; fanin needs 11.0 or later); %s",
                             fan_cuda_text(api, code, text, sizeof text), api->path,
                             api->version / 1000, api->version % 1000 / 10, api_advice(code));
    }
    return FAN_OK;
}

char *fan_cuda_text(const fan_cuda_api *api, fan_cu_result code, char *buf, size_t size)
{
    const char *name = NULL;
    const char *text = NULL;
    if (api->GetErrorName && api->GetErrorName(code, &name))
        name = NULL;
    if (api->GetErrorString && api->GetErrorString(code, &text))
        text = NULL;
    snprintf(buf, size, "%s (%d)", name ? name : "error", code);
    if (text)
        fan_append(buf, size, ": %s", text);
    return buf;
}

bool fan_cuda_sticky(fan_cu_result code)
{
    switch (code) {
    case FAN_CU_DEINITIALIZED:
    case 201: /* invalid context: made by another library, or reset */
    case 214: /* ECC */
    case 220: /* NVLink */
    case 226: /* contained error */
    case 700: /* illegal address */
    case 702: /* timeout */
    case 709: /* context is destroyed */
    case 710: /* assert */
    case 714: /* hardware stack */
    case 715: /* illegal instruction */
    case 716: /* misaligned address */
    case 717: /* address space */
    case 718: /* program counter */
    case 719: /* launch failed */
    case 721: /* tensor memory leak */
    case 810: /* the MPS server terminated this client */
    case 911: /* an external device failed */
        return true;
    default:
        return false;
    }
}

bool fan_cuda_stale(fan_cu_result code)
{
    return code == 201 || code == 709;
}

const char *fan_cuda_feature_words(fan_cuda_feature f)
{
    static const char *const words[] = {
#define X(name, text) text,
        FAN_CUDA_FEATURE_LIST(X)
#undef X
    };
    return words[f];
}
