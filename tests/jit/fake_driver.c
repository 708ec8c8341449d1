// A libcuda.so.1 that does nothing but keep what it was given: two devices, no GPU.
// Built and loaded by test_jit_fake_driver.py; cuda-bindings finds its functions by cuGetProcAddress.
#include <sched.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

typedef struct { uint32_t id, pad; uint32_t value[16]; } Attribute;
typedef struct { uint32_t grid[3], block[3], shared; void* stream; Attribute* attributes; uint32_t count; } Config;

// What the tests look at.
struct { uint32_t grid, block, shared, count; uint64_t stream, function, context; Attribute attributes[4]; unsigned char params[64]; } last;
int launches, loads, pushes, pops, next_result, parameter_bytes = 32, largest_shared, nonportable, shared_settings;
int separate, separate_sizes[16];  // a kernel of several parameters, as Triton makes them; 0: one struct
struct { uint64_t address, dims[2], stride, context; uint32_t type, rank, box[2], steps[2], interleave, swizzle, promotion, fill; } last_map;
int maps;
int mixed;  // launches whose parameter, four words that should be equal, was or became something else


static __thread uint64_t stack[16];
static __thread int depth;
static uint64_t current(void) { return depth ? stack[depth - 1] : 0; }

int cuInit(unsigned flags) { (void)flags; return SUCCESS; }
int cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
int cuDeviceGet(int* device, int index) { *device = index; return index < 2 ? SUCCESS : INVALID_DEVICE; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { (void)device; *value = attribute == 75 ? 9 : 0; return SUCCESS; }
int cuDevicePrimaryCtxRetain(uint64_t* context, int device) { *context = 0xC0 + device; return SUCCESS; }
int cuCtxPushCurrent(uint64_t context) { pushes++; stack[depth++] = context; return SUCCESS; }
int cuCtxPopCurrent(uint64_t* context) { pops++; if (context) *context = current(); depth--; return SUCCESS; }
int cuCtxSetCurrent(uint64_t context) { if (depth) depth--; stack[depth++] = context; return SUCCESS; }
int cuCtxGetCurrent(uint64_t* context) { *context = current(); return SUCCESS; }
int cuModuleLoadData(uint64_t* module, const void* image) {
    if (!current()) return INVALID_CONTEXT;
    if (memcmp(image, "\177ELF", 4)) return INVALID_VALUE;
    *module = 0xA0 + ++loads;
    return SUCCESS;
}
int cuModuleGetFunction(uint64_t* function, uint64_t module, const char* name) {
    if (!strstr(name, "fill") && !strstr(name, "meet") && !strstr(name, "scale")) return NOT_FOUND;
    *function = module * 16 + (strstr(name, "Li3E") ? 3 : 2);
    return SUCCESS;
}
int cuFuncGetAttribute(int* value, int attribute, uint64_t function) { (void)function; *value = 10 + attribute; return SUCCESS; }
int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
    (void)function;
    if (attribute == 8 && value > 232448) return INVALID_VALUE;
    if (attribute == 8) { largest_shared = value; shared_settings++; }
    if (attribute == 14) nonportable = value;
    return SUCCESS;
}
int cuFuncGetParamInfo(uint64_t function, size_t index, size_t* offset, size_t* size) {
    (void)function;
    if (index >= (size_t)(separate ? separate : 1)) return INVALID_VALUE;
    *offset = 0; *size = separate ? separate_sizes[index] : parameter_bytes;
    for (size_t i = 0; separate && i <= index; i++)  // each at a multiple of its own size
        *offset = (*offset + separate_sizes[i] - 1) / separate_sizes[i] * separate_sizes[i] + (i < index ? separate_sizes[i] : 0);
    return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, uint64_t function, int threads, size_t shared) {
    (void)function; *blocks = 2048 / threads - (shared > 0); return current() ? SUCCESS : INVALID_CONTEXT;
}
int cuOccupancyMaxActiveClusters(int* clusters, uint64_t function, const Config* config) {
    (void)function;
    *clusters = config->count == 1 && config->attributes[0].id == 4 ? 100 + config->attributes[0].value[0] : 0;
    return SUCCESS;
}
int cuGetErrorString(int code, const char** text) { (void)code; *text = "as the fake driver says"; return SUCCESS; }
int cuLaunchKernelEx(const Config* config, uint64_t function, void** params, void** extra) {
    if (next_result) { int result = next_result; next_result = 0; return result; }
    if (!current()) return INVALID_CONTEXT;
    if (extra || config->grid[1] != 1 || config->grid[2] != 1 || config->block[1] != 1 || config->block[2] != 1) return INVALID_VALUE;
    volatile const uint64_t* words[4];
    for (int i = 0; i < 4; i++) words[i] = separate ? params[i] : (uint64_t*)params[0] + i;
    const uint64_t first = *words[0];
    sched_yield();
    if (*words[0] != first || (separate ? (uint32_t)*words[1] != (uint32_t)first : *words[1] != first || *words[2] != first || *words[3] != first)) __sync_fetch_and_add(&mixed, 1);
    memset(&last, 0, sizeof last);
    last.grid = config->grid[0]; last.block = config->block[0]; last.shared = config->shared; last.count = config->count;
    last.stream = (uint64_t)config->stream; last.function = function; last.context = current();
    memcpy(last.attributes, config->attributes, config->count * sizeof(Attribute));
    unsigned char* to = last.params;
    for (int i = 0; i < (separate ? separate : 1); i++) {  // one after another, without padding
        const int size = separate ? separate_sizes[i] : parameter_bytes;
        memcpy(to, params[i], size);
        to += size;
    }
    __sync_fetch_and_add(&launches, 1);
    return SUCCESS;
}
int cuTensorMapEncodeTiled(unsigned char* map, int type, uint32_t rank, uint64_t address, const uint64_t* dims, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
    if (next_result) { int result = next_result; next_result = 0; return result; }
    if (!current()) return INVALID_CONTEXT;
    if ((uintptr_t)map % 64 || address % 16 || strides[0] % 16 || rank != 2) return INVALID_VALUE;
    last_map.address = address; last_map.stride = strides[0]; last_map.context = current(); last_map.type = type; last_map.rank = rank;
    for (int i = 0; i < 2; i++) { last_map.dims[i] = dims[i]; last_map.box[i] = box[i]; last_map.steps[i] = steps[i]; }
    last_map.interleave = interleave; last_map.swizzle = swizzle; last_map.promotion = promotion; last_map.fill = fill;
    maps++;
    for (int i = 0; i < 128; i++) map[i] = i + maps;
    return SUCCESS;
}

static int absent(void) { return NOT_FOUND; }
int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status);

#define ENTRY(name) {#name, (void*)name}
static const struct { const char* name; void* function; } TABLE[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuCtxPushCurrent), ENTRY(cuCtxPopCurrent), ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetCurrent), ENTRY(cuModuleLoadData),
    ENTRY(cuModuleGetFunction), ENTRY(cuFuncGetAttribute), ENTRY(cuFuncSetAttribute), ENTRY(cuFuncGetParamInfo),
    ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor), ENTRY(cuOccupancyMaxActiveClusters), ENTRY(cuGetErrorString),
    ENTRY(cuLaunchKernelEx), {"cuGetProcAddress", (void*)cuGetProcAddress_v2},
};

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
    (void)version; (void)flags;
    *function = (void*)absent;
    for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
        if (!strcmp(name, TABLE[i].name)) *function = TABLE[i].function;
    if (status) *status = 0;
    return SUCCESS;
}
int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
