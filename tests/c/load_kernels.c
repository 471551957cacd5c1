/* Which image a driver gets, and what is tried when it refuses it: argv: the compute capability (89), and of each image
 * the codes of its load and of its look-ups. Prints what was loaded, how often, and the status. */
#include "device/cuda/context.h"
#include "device/cuda/launch.h"
#include "device/kernels/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const unsigned char fan_kernels_fatbin[] = {0x50, 0xED, 0x55, 0xBA};
const size_t fan_kernels_fatbin_bytes = sizeof fan_kernels_fatbin;
const char fan_kernels_made[] = "sm_90 and PTX for compute_90, by nvcc 99.1", fan_kernels_ptx[] = "ptx",
           fan_kernels_ptx_newer[] = "newer ptx";

enum { MACHINE_CODE, NEWER, PTX, IMAGES };

static const void *const images[] = {fan_kernels_fatbin, fan_kernels_ptx_newer, fan_kernels_ptx};
static const char *const names[] = {"machine code", "newer ptx", "ptx"};
static int load_codes[IMAGES], look_up_codes[IMAGES], loads, unloads, live, strays;
static char modules[IMAGES];

static fan_cu_result load(fan_cu_module *out, const void *image)
{
    int i = 0;
    while (images[i] != image)
        i++;
    printf("%s ", names[i]);
    loads++;
    live += load_codes[i] == 0;
    *out = load_codes[i] ? NULL : (fan_cu_module)(void *)&modules[i];
    return load_codes[i];
}

static fan_cu_result unload(fan_cu_module m)
{
    (void)m;
    unloads++;
    live--;
    return 0;
}

static fan_cu_result function(fan_cu_function *out, fan_cu_module m, const char *name)
{
    int i = (int)((char *)(void *)m - modules);
    bool newer = strcmp(name, "fan_fold_e4m3fn") == 0 || strcmp(name, "fan_many_e4m3fn") == 0 ||
                 strcmp(name, "fan_fold_stats_e4m3fn") == 0;
    strays += i == NEWER && !newer;
    *out = (fan_cu_function)(void *)m;
    return look_up_codes[i];
}

static fan_cu_result resident(int *out, fan_cu_function f, int threads, size_t shared)
{
    (void)f, (void)shared;
    *out = 2048 / threads;
    return 0;
}

static fan_cu_result says(fan_cu_result code, const char **text)
{
    (void)code;
    *text = "refused";
    return 0;
}

int main(int argc, char **argv)
{
    fan_error err = {.status = FAN_OK};
    fan_cuda c = {.api = {.ModuleLoadData = load,
                          .ModuleUnload = unload,
                          .ModuleGetFunction = function,
                          .OccupancyMaxActiveBlocksPerMultiprocessor = resident,
                          .GetErrorName = says,
                          .GetErrorString = says}};
    fan_cuda_part p = {.cuda = &c};
    if (argc != 2 + 2 * IMAGES)
        return 2;
    p.compute = (int)strtol(argv[1], NULL, 10);
    for (int i = 0; i < IMAGES; i++) {
        load_codes[i] = (int)strtol(argv[2 + 2 * i], NULL, 10);
        look_up_codes[i] = (int)strtol(argv[3 + 2 * i], NULL, 10);
    }
    fan_status status = fan__cuda_load_kernels(&p, &err);
    const void *e4m3fn = p.folds[FAN__FOLD_e4m3fn], *other = p.folds[FAN__FOLD_single];
    printf("| %d loads %d unloads | %s | %s\n", loads, unloads, status == FAN_OK ? "fine" : "failed", err.text);
    if (status != FAN_OK)
        return p.modules[0] || p.modules[1];
    return !p.modules[0] || strays || live != 1 + (p.image == FAN__IMAGE_PTX_NEWER) ||
           (p.modules[1] != NULL) != (live == 2) || other != (void *)p.modules[0] ||
           e4m3fn != (void *)p.modules[p.image == FAN__IMAGE_PTX_NEWER];
}
