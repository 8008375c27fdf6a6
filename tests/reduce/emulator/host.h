// The words of CUDA C++ that the kernels use, for g++: one fibre or one OS thread per CUDA thread.
//
// Two schedulers share this header. Fibres (default): all threads of a block on one OS thread, in an
// order that a seed chooses or that starves one warp; shared memory starts as NaN. Threads
// (EMULATE_WITH_THREADS): one OS thread per CUDA thread and two blocks at once, for the sanitizers.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstring>

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
