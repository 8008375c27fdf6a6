// Log-probability and entropy over this rank's part of the vocabulary; formulas: logprob/reference.py.
//
// One block handles one row of logits and reads it once, 16 bytes at a time; a row that does not
// count is not read at all. GLOBAL(type) is a plain pointer on a GPU; on the host it counts the bytes.
#pragma once
#include "common.cuh"

namespace dynbatch {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kFloor = -200.0f;  // 2^kFloor is 0, and so is 0 * kFloor
constexpr float kLowest = -3.402823466e38f;
constexpr int kAtOnce = 16;  // logits that a thread has in flight

__device__ inline float minus_infinity() { return bit_cast<float>(0xff800000u); }

template <typename X>
__device__ inline float to_float(X x) {
    return static_cast<float>(to_double(x));
}

// 2^x with two ulp; what would be denormal is 0.
__device__ inline float power_of_two(float x) {
#ifdef DYNBATCH_HOST
    return x < -126.0f ? 0.0f : exp2f(x);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// How 4 bytes hold numbers.
template <typename X>
struct Word;

template <>
struct Word<float> {
    static constexpr int kCount = 1;
    __device__ static void unpack(unsigned int word, float* to) { to[0] = bit_cast<float>(word); }
    __device__ static unsigned int pack(const float* from) {
        return bit_cast<unsigned int>(from[0]);
    }
};

template <>
struct Word<bfloat16> {
    static constexpr int kCount = 2;
    __device__ static void unpack(unsigned int word, float* to) {
        to[0] = bit_cast<float>(word << 16);
        to[1] = bit_cast<float>(word & 0xffff0000u);
    }
    __device__ static unsigned int pack(const float* from) {
#ifdef DYNBATCH_HOST
        bfloat16 low, high;
        store(&low, from[0]);
        store(&high, from[1]);
        return low.bits | static_cast<unsigned int>(high.bits) << 16;
#else
        unsigned int word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(from[1]), "f"(from[0]));
        return word;
#endif
    }
};

template <typename X>
__device__ inline void unpack(const uint4& words, float* to) {
    constexpr int kCount = Word<X>::kCount;
    Word<X>::unpack(words.x, to);
    Word<X>::unpack(words.y, to + kCount);
    Word<X>::unpack(words.z, to + 2 * kCount);
    Word<X>::unpack(words.w, to + 3 * kCount);
}

template <typename X>
__device__ inline uint4 pack(const float* from) {
    constexpr int kCount = Word<X>::kCount;
    uint4 words;
    words.x = Word<X>::pack(from);
    words.y = Word<X>::pack(from + kCount);
    words.z = Word<X>::pack(from + 2 * kCount);
    words.w = Word<X>::pack(from + 3 * kCount);
    return words;
}

// Where in a row 16-byte accesses are possible: [head, head + vectors * kVector); a row starts
// anywhere, because V/tp need not be a multiple of anything.
template <typename X>
struct Row {
    static constexpr int kVector = 16 / sizeof(X);
    int columns, head, vectors;

    __device__ Row(GLOBAL(const X) start, int columns) : columns(columns) {
        const int past = static_cast<int>(address_of(start) % 16 / sizeof(X));
        head = min(columns, past == 0 ? 0 : kVector - past);
        vectors = (columns - head) / kVector;
    }
    // The column that this thread handles alone, or -1: those before and after the vectors.
    __device__ int single() const {
        const int i = threadIdx.x;
        if (i < head) return i;
        const int after = i + vectors * kVector;
        return after < columns ? after : -1;
    }
};

// M, total = Σ exp y and Σ exp(y)·log2 exp(y) of some logits, with M their largest.
struct OnlineSoftmax {
    static constexpr int kWords = 4;
    typedef float Word;
    float largest, total, mean, scale;  // scale: log2(e) / temperature

    __device__ void clear() {
        largest = kLowest;  // finite, so that a row of -inf gives no NaN
        total = mean = 0.0f;
    }
    // Measures from `top` instead of from the largest so far.
    __device__ void rebase(float top) {
        const float shift = fmaxf((largest - top) * scale, kFloor);
        const float factor = power_of_two(shift);
        mean = (mean + total * shift) * factor;
        total *= factor;
        largest = top;
    }
    template <int N>
    __device__ void add(const float (&x)[N]) {
        float top = largest;
#pragma unroll
        for (int i = 0; i < N; ++i) top = fmaxf(top, x[i]);
        if (top > largest) rebase(top);
        // Sums of their own first: a chain of additions as long as the row would lose digits.
        float part = 0.0f, product = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float y = (x[i] - largest) * scale;
            const float weight = power_of_two(y);
            part += weight;
            product += weight * fmaxf(y, kFloor);
        }
        total += part;
        mean += product;
    }
    __device__ void merge(OnlineSoftmax other) {
        scale = other.scale;
        const float top = fmaxf(largest, other.largest);
        rebase(top);
        other.rebase(top);
        total += other.total;
        mean += other.mean;
    }
    __device__ OnlineSoftmax from_lane(int distance) const {
        OnlineSoftmax other;
        other.largest = __shfl_down_sync(0xffffffffu, largest, distance);
        other.total = __shfl_down_sync(0xffffffffu, total, distance);
        other.mean = __shfl_down_sync(0xffffffffu, mean, distance);
        other.scale = scale;
        return other;
    }
    __device__ void write(float* to) const {
        to[0] = largest;
        to[1] = total;
        to[2] = mean;
        to[3] = scale;
    }
    __device__ void read(const float* from) {
        largest = from[0];
        total = from[1];
        mean = from[2];
        scale = from[3];
    }
};

// Statistics of one row: M, Σ exp y, Σ exp(y)·y, logit of the target (-inf: it is elsewhere).
template <typename X>
__device__ inline void logprob_statistics(GLOBAL(const X) logits, GLOBAL(const long long) targets,
                                          GLOBAL(const unsigned char) keep, int width, int columns,
                                          float scale, GLOBAL(float) result) {
    SHARED_ARRAY(float, scratch, kWarps * OnlineSoftmax::kWords);
    const long long row = blockIdx.x;
    GLOBAL(float) out = result + row * 4;
    if (keep && !keep[row]) {
        if (threadIdx.x < 4) out[threadIdx.x] = 0.0f;
        return;
    }
    GLOBAL(const X) x = logits + row * width;
    const Row<X> at(x, columns);
    OnlineSoftmax sums[1];
    sums[0].clear();
    sums[0].scale = scale * kLog2E;
    constexpr int kVector = Row<X>::kVector, kGroup = kAtOnce / kVector;
    GLOBAL(const X) body = x + at.head;
    int i = threadIdx.x;
    for (; i + (kGroup - 1) * kBlock < at.vectors; i += kGroup * kBlock) {
        uint4 words[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            words[j] = load_16_bytes(body + static_cast<long long>(i + j * kBlock) * kVector);
        }
        float values[kAtOnce];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) unpack<X>(words[j], values + j * kVector);
        sums[0].add(values);
    }
    for (; i < at.vectors; i += kBlock) {
        float values[kVector];
        unpack<X>(load_16_bytes(body + static_cast<long long>(i) * kVector), values);
        sums[0].add(values);
    }
    const int single = at.single();
    if (single >= 0) {
        const X alone = x[single];
        const float value[1] = {to_float(alone)};
        sums[0].add(value);
    }
    const OnlineSoftmax sum = sum_over_block<OnlineSoftmax, 1>(sums, scratch);
    if (threadIdx.x != 0) return;
    const long long target = targets[row];
    float at_target = minus_infinity();
    if (target >= 0 && target < columns) {
        const X value = x[target];
        at_target = to_float(value);
    }
    out[0] = sum.largest;
    out[1] = sum.total;
    out[2] = sum.mean / kLog2E;
    out[3] = at_target;
}

// Results of one row a thread, from the statistics of all parts [num_parts, num_rows, 4].
__device__ inline void combine_parts(GLOBAL(const float) parts, GLOBAL(const unsigned char) keep,
                                     int num_parts, int num_rows, double scale, GLOBAL(float) logp,
                                     GLOBAL(float) entropy, GLOBAL(float) saved) {
    const int row = blockIdx.x * kBlock + threadIdx.x;
    if (row >= num_rows) return;
    double largest = 0.0, total = 0.0, mean = 0.0, target_logp = 0.0, row_entropy = 0.0;
    if (!keep || keep[row]) {
        float top = kLowest, at_target = minus_infinity();
        for (int part = 0; part < num_parts; ++part) {
            GLOBAL(const float) own = parts + (static_cast<long long>(part) * num_rows + row) * 4;
            top = fmaxf(top, own[0]);
            at_target = fmaxf(at_target, own[3]);
        }
        largest = top;
        for (int part = 0; part < num_parts; ++part) {
            GLOBAL(const float) own = parts + (static_cast<long long>(part) * num_rows + row) * 4;
            const double own_total = own[1];
            const double shift = fmax((own[0] - largest) * scale, -1e4);
            const double factor = exp(shift);
            mean += (own[2] + own_total * shift) * factor;
            total += own_total * factor;
        }
        const double log_total = log(total);
        target_logp = (at_target - largest) * scale - log_total;
        row_entropy = log_total - mean / total;
    }
    logp[row] = static_cast<float>(target_logp);
    entropy[row] = static_cast<float>(row_entropy);
    saved[row * 3ll] = static_cast<float>(largest);
    saved[row * 3ll + 1] = static_cast<float>(total);
    saved[row * 3ll + 2] = static_cast<float>(row_entropy);
}

// dx_v = scale·((v == target)·g − p_v·(g + h·(log p_v + entropy))) as weight·(slope·y + constant).
struct RowGradient {
    float largest, scale, slope, constant, at_target;
    int target;

    template <int N>
    __device__ void apply(float (&x)[N], int first) const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float y = (x[i] - largest) * scale;
            x[i] = power_of_two(y) * (slope * fmaxf(y, kFloor) + constant);
        }
        if (target >= first && target < first + N) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (target == first + i) x[i] += at_target;
            }
        }
    }
};

// Zeros in `count` columns.
template <typename X>
__device__ inline void write_zeros(GLOBAL(X) grad, int count) {
    const Row<X> at(grad, count);
    const float zeros[Row<X>::kVector] = {};
#pragma unroll 1
    for (int i = threadIdx.x; i < at.vectors; i += kBlock) {
        store_16_bytes(grad + at.head + static_cast<long long>(i) * Row<X>::kVector, pack<X>(zeros));
    }
    X zero;
    store(&zero, 0.0);
    const int single = at.single();
    if (single >= 0) grad[single] = zero;
}

// Gradient of one row; grad may be the logits themselves: a thread reads a place before it writes it.
template <typename X>
__device__ inline void logprob_backward(GLOBAL(const X) logits, GLOBAL(const long long) targets,
                                        GLOBAL(const unsigned char) keep, GLOBAL(const float) saved,
                                        GLOBAL(const float) grad_logp,
                                        GLOBAL(const float) grad_entropy, int width, int columns,
                                        float scale, GLOBAL(X) grad) {
    const long long row = blockIdx.x;
    GLOBAL(X) out = grad + row * width;
    if (keep && !keep[row]) {
        write_zeros<X>(out, width);
        return;
    }
    const float total = saved[row * 3 + 1], entropy = saved[row * 3 + 2];
    const float of_logp = grad_logp ? static_cast<float>(grad_logp[row]) : 0.0f;
    const float of_entropy = grad_entropy ? static_cast<float>(grad_entropy[row]) : 0.0f;
    const float factor = -scale / total;
    const long long target = targets[row];
    RowGradient gradient;
    gradient.largest = saved[row * 3];
    gradient.scale = scale * kLog2E;
    gradient.slope = factor * of_entropy / kLog2E;
    gradient.constant = factor * (of_logp + of_entropy * (entropy - logf(total)));
    gradient.at_target = scale * of_logp;
    gradient.target = target >= 0 && target < columns ? static_cast<int>(target) : -1;

    GLOBAL(const X) x = logits + row * width;
    const Row<X> at(x, columns);
    constexpr int kVector = Row<X>::kVector, kGroup = kAtOnce / kVector;
    int i = threadIdx.x;
    for (; i < at.vectors; i += kGroup * kBlock) {
        uint4 words[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            const int vector = i + j * kBlock;
            if (vector < at.vectors) {
                words[j] = load_16_bytes(x + at.head + static_cast<long long>(vector) * kVector);
            }
        }
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
            const int vector = i + j * kBlock;
            if (vector >= at.vectors) continue;
            const int first = at.head + vector * kVector;
            float values[kVector];
            unpack<X>(words[j], values);
            gradient.apply(values, first);
            store_16_bytes(out + first, pack<X>(values));
        }
    }
    const int single = at.single();
    if (single >= 0) {
        const X alone = x[single];
        float value[1] = {to_float(alone)};
        gradient.apply(value, single);
        X rounded;
        store(&rounded, value[0]);
        out[single] = rounded;
    }
    if (columns < width) write_zeros<X>(out + columns, width - columns);
}

}  // namespace dynbatch
