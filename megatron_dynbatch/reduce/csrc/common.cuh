// What every kernel shares: sizes, element types, and reductions inside a block.
//
// Plain CUDA C++ without any torch header, so one source compiles with NVRTC, with nvcc, and (through
// a host header that defines these words) with g++ for the tests.
#pragma once

#ifndef DYNBATCH_HOST
#define SHARED_ARRAY(type, name, count) __shared__ type name[count]
// A pointer to GPU memory whose accesses the host emulator counts.
#define GLOBAL(type) type*
#endif

#ifndef DYNBATCH_BLOCK
#define DYNBATCH_BLOCK 256
#endif

namespace dynbatch {

constexpr int kBlock = DYNBATCH_BLOCK;  // threads of a block
constexpr int kWarp = 32;
constexpr int kWarps = kBlock / kWarp;
constexpr int kPerThread = 4;                  // neighbouring tokens that a thread takes
constexpr int kTile = kPerThread * kBlock;  // tokens that a block takes

// bfloat16 by its bits: NVRTC then needs no CUDA header.
struct bfloat16 {
    unsigned short bits;
};

template <typename To, typename From>
__device__ inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast between sizes");
    union {
        From from;
        To to;
    } both;
    both.from = from;
    return both.to;
}

#ifndef DYNBATCH_HOST
__device__ inline unsigned long long address_of(const void* pointer) {
    return reinterpret_cast<unsigned long long>(pointer);
}

// One access of 16 bytes; the address is a multiple of 16.
template <typename X>
__device__ inline uint4 load_16_bytes(const X* from) {
    return *reinterpret_cast<const uint4*>(from);
}

template <typename X>
__device__ inline void store_16_bytes(X* to, const uint4& words) {
    *reinterpret_cast<uint4*>(to) = words;
}
#endif

__device__ inline double to_double(double x) { return x; }
__device__ inline double to_double(float x) { return x; }
__device__ inline double to_double(unsigned char x) { return x; }
__device__ inline double to_double(bfloat16 x) {
    return bit_cast<float>(static_cast<unsigned int>(x.bits) << 16);
}

__device__ inline void store(double* to, double value) { *to = value; }
__device__ inline void store(float* to, double value) { *to = static_cast<float>(value); }
__device__ inline void store(bfloat16* to, double value) {
    unsigned int bits = bit_cast<unsigned int>(static_cast<float>(value));
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        to->bits = 0x7fc0;  // NaN: rounding could turn it into infinity
        return;
    }
    to->bits = static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Neighbouring elements, moved in words of at most 128 bits where memory is aligned to them.
template <typename T>
struct alignas(sizeof(T) < 4 ? kPerThread * sizeof(T) : 16) Several {
    T at[kPerThread];
};

template <typename T>
__device__ inline bool is_aligned(const T* address) {
    return reinterpret_cast<unsigned long long>(address) % alignof(Several<T>) == 0;
}

// The first `count` elements at an address (kPerThread: all); the others are left as they were.
template <typename T>
__device__ inline void load(const T* from, int count, Several<T>& several) {
    if (count >= kPerThread && is_aligned(from)) {
        several = *reinterpret_cast<const Several<T>*>(from);
        return;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (i < count) several.at[i] = from[i];
    }
}

template <typename T>
__device__ inline void store(T* to, int count, const Several<T>& several) {
    if (count >= kPerThread && is_aligned(to)) {
        *reinterpret_cast<Several<T>*>(to) = several;
        return;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (i < count) to[i] = several.at[i];
    }
}

// A sum in float64. The order of `add` and `merge` is fixed by the code, never by timing.
struct Float64Sum {
    static constexpr int kWords = 1;
    typedef double Word;
    double value;

    __device__ void clear() { value = 0.0; }
    __device__ void add(double term) { value = __dadd_rn(value, term); }
    __device__ void merge(const Float64Sum& other) { add(other.value); }
    __device__ Float64Sum from_lane(int distance) const {
        Float64Sum other;
        other.value = __shfl_down_sync(0xffffffffu, value, distance);
        return other;
    }
    __device__ void write(double* to) const { *to = value; }
    __device__ void read(const double* from) { value = *from; }
    __device__ void finish() {}
};

// A sum in two 64-bit limbs and flags: see exact.py, whose arithmetic this repeats bit by bit.
struct ExactSum {
    static constexpr int kWords = 3;
    typedef long long Word;
    long long high, low, flags;

    __device__ void clear() { high = low = flags = 0; }
    __device__ void add(double term) {
        if (!(fabs(term) < 2147483648.0)) {
            flags |= term != term ? 1ll : term > 0 ? 1ll << 21 : 1ll << 42;
            return;
        }
        double top = rint(__dmul_rn(term, 1024.0));
        // Exact: the difference of a double and its own leading digits.
        double rest = __dadd_rn(term, -__dmul_rn(top, 1.0 / 1024.0));
        high += static_cast<long long>(top);
        low += static_cast<long long>(rint(__dmul_rn(rest, 4503599627370496.0)));
    }
    __device__ void merge(const ExactSum& other) {
        high += other.high;
        low += other.low;
        flags |= other.flags;
    }
    __device__ ExactSum from_lane(int distance) const {
        ExactSum other;
        other.high = __shfl_down_sync(0xffffffffu, high, distance);
        other.low = __shfl_down_sync(0xffffffffu, low, distance);
        other.flags = __shfl_down_sync(0xffffffffu, flags, distance);
        return other;
    }
    __device__ void write(long long* to) const {
        to[0] = high;
        to[1] = low;
        to[2] = flags;
    }
    __device__ void read(const long long* from) {
        high = from[0];
        low = from[1];
        flags = from[2];
    }
    __device__ void finish() {
        long long carry = low >> 42;
        high += carry;
        low -= carry << 42;
    }
};

// Sums K values over the block in a fixed order; the result is valid in thread 0 .. K-1, one each.
// A block that calls this twice synchronises in between.
template <typename Sum, int K>
__device__ inline Sum sum_over_block(Sum (&sums)[K], typename Sum::Word* scratch) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
            Sum other = sums[k].from_lane(distance);
            sums[k].merge(other);
        }
        if (lane == 0) sums[k].write(scratch + (warp * K + k) * Sum::kWords);
    }
    __syncthreads();
    Sum result;
    result.clear();
    if (threadIdx.x < K) {
        for (int from = 0; from < kWarps; ++from) {
            Sum part;
            part.read(scratch + (from * K + threadIdx.x) * Sum::kWords);
            result.merge(part);
        }
    }
    return result;
}

// Index of the last of `count` ascending values that is at most `value`; values[0] is.
__device__ inline int last_at_most(const int* values, int count, int value) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (values[middle] <= value) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace dynbatch
