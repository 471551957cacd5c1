/* Which images a driver gets: argv: of the embedded machine code (FATBIN_BYTES 0: none) and of the
 * image that was compiled ("-": none), the codes of its load and of its look-ups. Prints what was
 * loaded, the numbers of loads and unloads, the status, and whether another image is wanted. */
#include "device/cuda/part.h"
#include "device/kernels/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const unsigned char fan_kernels_fatbin[] = {0x50, 0xED, 0x55, 0xBA}, fan_kernels_source[] = {0};
const size_t fan_kernels_source_bytes = 0;
const char fan_kernels_made[] = "sm_90 and PTX for compute_90, by nvcc 99.1";

#ifndef FATBIN_BYTES
#define FATBIN_BYTES sizeof fan_kernels_fatbin
#endif

const size_t fan_kernels_fatbin_bytes = FATBIN_BYTES;

enum {
    EMBEDDED,
    COMPILED,
    IMAGES
};

static char compiled[] = "ptx", modules[IMAGES];
static const char *const names[] = {"machine code", "compiled"};
static int load_codes[IMAGES], look_up_codes[IMAGES], loads, unloads, live;

static fan_cu_result load(fan_cu_module *out, const void *image)
{
    int i = image == (const void *)compiled ? COMPILED : EMBEDDED;
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
    (void)name;
    *out = (fan_cu_function)(void *)m;
    return look_up_codes[(char *)(void *)m - modules];
}

static fan_cu_result resident(int *out, fan_cu_function f, int threads, size_t shared)
{
    (void)f, (void)shared;
    *out = 2048 / threads;
    return 0;
}

static fan_cu_result text_of(fan_cu_result code, const char **text)
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
                          .GetErrorName = text_of,
                          .GetErrorString = text_of}};
    fan_cuda_part p = {.cuda = &c};
    if (argc != 1 + 2 * IMAGES)
        return 2;
    for (int i = 0; i < IMAGES; i++) {
        load_codes[i] = (int)strtol(argv[1 + 2 * i], NULL, 10);
        look_up_codes[i] = (int)strtol(argv[2 + 2 * i], NULL, 10);
    }
    p.image.code = argv[3][0] == '-' ? NULL : compiled;
    fan_status status = fan__cuda_load_kernels(&p, &err);
    const char *outcome = status == FAN_OK ? "fine" : "failed";
    const char *image = p.image.wanted ? "wanted" : "not wanted";
    printf("| %d loads %d unloads | %s | %s | %s\n", loads, unloads, outcome, image, err.text);
    if (status != FAN_OK)
        return p.module != NULL;
    return !p.module || live != 1 || p.folds[0] != (void *)p.module;
}
