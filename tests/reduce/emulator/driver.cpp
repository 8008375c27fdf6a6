// A stand-in for libcuda.so.1 whose launches run in the emulator: tests the calls of loader.py.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>

extern "C" int emulate(const char* name, unsigned grid_x, unsigned grid_y, void** arguments,
                       unsigned seed, int order);

enum Result { kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kNotFound = 500, kNotSupported = 801 };

extern "C" {

int cuInit(unsigned) { return kSuccess; }

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return kSuccess;
}

// Contexts of threads, as the driver keeps them: none until one is set.
static thread_local void* current_context;

int cuCtxGetCurrent(void** context) {
    *context = current_context;
    return kSuccess;
}

int cuDeviceGet(int* device, int number) {
    *device = number;
    return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1);
    return kSuccess;
}

int cuCtxSetCurrent(void* context) {
    current_context = context;
    return kSuccess;
}

int cuModuleLoadData(void** module, const void* image) {
    *module = reinterpret_cast<void*>(1);
    return std::strncmp(static_cast<const char*>(image), "cubin", 5) ? kInvalidValue : kSuccess;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
    *function = strdup(name);
    return std::strcmp(name, "missing") ? kSuccess : kNotFound;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void*, void** arguments, void** extra) {
    const bool as_expected = grid_z == 1 && block_x == DYNBATCH_BLOCK && block_y == 1 &&
                             block_z == 1 && shared_bytes == 0 && extra == nullptr;
    if (!as_expected) return kInvalidValue;
    if (current_context == nullptr) return kInvalidContext;
    return emulate(static_cast<const char*>(function), grid_x, grid_y, arguments, 0, 0);
}

static int unsupported() { return kNotSupported; }

int cuGetProcAddress_v2(const char* symbol, void** function, int, std::uint64_t, int*) {
    static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = self ? dlsym(self, symbol) : nullptr;
    if (!*function) *function = reinterpret_cast<void*>(&unsupported);
    return kSuccess;
}

int cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
}
