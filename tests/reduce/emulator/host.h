// The words of CUDA C++ that the kernels use, for g++: one fibre or one OS thread per CUDA thread.
//
// Two schedulers share this header. Fibres (default): all threads of a block on one OS thread, in an
// order that a seed chooses or that starves one warp; shared memory starts as NaN. Threads
// (EMULATE_WITH_THREADS): one OS thread per CUDA thread and two blocks at once, for the sanitizers.
#pragma once
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <type_traits>

#define DYNBATCH_HOST
#define __global__
#define __device__
#define __launch_bounds__(threads)

struct EmulatedIndex {
    unsigned int x, y, z;
};

struct EmulatedThread;
extern thread_local EmulatedThread* emulated_thread;

struct EmulatedThread {
    EmulatedIndex thread, block, grid;
    int number;
    void* owner;
};

#define threadIdx (emulated_thread->thread)
#define blockIdx (emulated_thread->block)
#define gridDim (emulated_thread->grid)

void emulate_block_barrier();
void emulate_warp_barrier();
void* emulate_shared(int site, std::size_t bytes);
char* emulate_lane(int lane);  // 8 bytes of each lane of this warp

#define __syncthreads() emulate_block_barrier()
#define SHARED_ARRAY(type, name, count) \
    type* name = static_cast<type*>(emulate_shared(__COUNTER__, sizeof(type) * (count)))

template <typename T>
T __shfl_down_sync(unsigned int, T value, int distance) {
    const int lane = threadIdx.x % 32;
    std::memcpy(emulate_lane(lane), &value, sizeof(T));
    emulate_warp_barrier();
    T result = value;
    if (lane + distance < 32) std::memcpy(&result, emulate_lane(lane + distance), sizeof(T));
    emulate_warp_barrier();
    return result;
}

// Bytes that kernels read and wrote through GLOBAL pointers, and accesses of 16 bytes that a GPU
// would refuse because of their address.
struct EmulatedTraffic {
    std::atomic<long long> read{0}, written{0}, misaligned{0};
};
inline EmulatedTraffic emulated_traffic;

template <typename T>
struct CountedPointer {
    T* raw;

    struct Place {
        T* at;
        operator T() const {
            emulated_traffic.read += sizeof(T);
            return *at;
        }
        void operator=(const T& value) const {
            emulated_traffic.written += sizeof(T);
            *const_cast<std::remove_const_t<T>*>(at) = value;
        }
    };

    Place operator[](long long i) const { return {raw + i}; }
    CountedPointer operator+(long long n) const { return {raw + n}; }
    explicit operator bool() const { return raw != nullptr; }
    operator CountedPointer<const T>() const { return {raw}; }
};

#define GLOBAL(type) CountedPointer<type>

struct uint4 {
    unsigned int x, y, z, w;
};

template <typename T>
unsigned long long address_of(CountedPointer<T> pointer) {
    return reinterpret_cast<unsigned long long>(pointer.raw);
}

template <typename T>
uint4 load_16_bytes(CountedPointer<const T> from) {
    uint4 words;
    emulated_traffic.read += sizeof words;
    emulated_traffic.misaligned += address_of(from) % 16 != 0;
    std::memcpy(&words, from.raw, sizeof words);
    return words;
}

template <typename T>
void store_16_bytes(CountedPointer<T> to, const uint4& words) {
    emulated_traffic.written += sizeof words;
    emulated_traffic.misaligned += address_of(to) % 16 != 0;
    std::memcpy(to.raw, &words, sizeof words);
}

inline unsigned int atomicAdd(unsigned int* address, unsigned int value) {
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

// The atomics above order memory already; ThreadSanitizer cannot follow a fence.
inline void __threadfence() {}

inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
using std::exp;
using std::fabs;
using std::rint;
