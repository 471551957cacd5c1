/* Which image a driver gets, and what is tried when it refuses it: argv: the code of the first load, of its look-ups,
 * of the second load. Prints what was loaded, how many functions were found in it, and the status. */
#include "device/cuda/context.h"
#include "device/cuda/launch.h"
#include "device/kernels/image.h"

#include <stdio.h>
#include <stdlib.h>

const unsigned char fan_kernels_fatbin[] = {0x50, 0xED, 0x55, 0xBA};
const size_t fan_kernels_fatbin_bytes = sizeof fan_kernels_fatbin;
const char fan_kernels_made[] = "sm_90 and PTX for compute_90, by nvcc 99.1", fan_kernels_ptx[] = "ptx";

static int codes[3], loads, unloads, functions;

static fan_cu_result load(fan_cu_module *out, const void *image)
{
    int code = codes[loads++ ? 2 : 0];
    printf("%s ", image == (const void *)fan_kernels_ptx ? "ptx" : "machine code");
    *out = code ? NULL : (fan_cu_module)(void *)&loads;
    return code;
}

static fan_cu_result unload(fan_cu_module m)
{
    (void)m;
    unloads++;
    return 0;
}

static fan_cu_result function(fan_cu_function *out, fan_cu_module m, const char *name)
{
    (void)m, (void)name;
    functions++;
    *out = (fan_cu_function)(void *)&functions;
    return loads == 1 ? codes[1] : 0;
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
    for (int i = 1; i < argc && i < 4; i++)
        codes[i - 1] = (int)strtol(argv[i], NULL, 10);
    fan_status status = fan__cuda_load_kernels(&p, &err);
    printf("| %d loads %d unloads | %s | %s\n", loads, unloads, status == FAN_OK ? "fine" : "failed", err.text);
    return (p.module != NULL) == (status == FAN_OK) ? 0 : 1;
}
