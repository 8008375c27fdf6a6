// Weighted sums over pieces of the packed sequence, and their backward pass.
//
// A piece is a stretch of one sample's response on this rank. A block sums one tile: kTile tokens
// counted from the start of a piece, so the sums of a sample depend on nothing else in the pack. The
// last block to finish adds the tiles up in their order. One launch, no floating-point atomics.
#pragma once
#include "common.cuh"

namespace dynbatch {

// The segment table: int32 rows of `count` entries, as segment_table.py lays them out. Without
// table (rows == nullptr) the whole sequence is one piece.
struct Pieces {
    const int* rows;
    int count;        // pieces, samples times pieces per sample
    int num_samples;  // 0: no sums per sample
    int num_tokens;

    __device__ int x_offset(int piece) const { return rows ? rows[piece] : 0; }
    __device__ int mask_offset(int piece) const { return rows[count + piece]; }
    __device__ int length(int piece) const { return rows ? rows[2 * count + piece] : num_tokens; }
    __device__ int first_tile(int piece) const { return rows ? rows[3 * count + piece] : 0; }
    __device__ int end_tile(int piece) const {
        return first_tile(piece) + (length(piece) + kTile - 1) / kTile;
    }
    __device__ int num_tiles() const { return count ? end_tile(count - 1) : 0; }
    __device__ int of_tile(int tile) const {
        return rows ? last_at_most(rows + 3 * count, count, tile) : 0;
    }
    // Sample whose piece holds a position, or -1.
    __device__ int sample_at(int position) const {
        if (count == 0 || position < rows[0]) return -1;
        int piece = last_at_most(rows, count, position);
        return position < rows[piece] + rows[2 * count + piece] ? piece / (count / num_samples) : -1;
    }
};

// Where results go. Words: one double, or three 64-bit integers for exact sums.
template <typename Sum>
struct Results {
    typename Sum::Word* tiles;    // [gridDim.y, gridDim.x, K] scratch
    unsigned int* arrived;        // [gridDim.y] zero before, zero again after
    typename Sum::Word* total;    // [values]
    typename Sum::Word* samples;  // [values, num_samples]
};

// Adds up the tiles of this block's K values; run by the last block alone.
template <typename Sum, int K>
__device__ inline void add_tiles(const Pieces& pieces, const Results<Sum>& results, int num_values,
                                 typename Sum::Word* scratch) {
    const int first_value = blockIdx.y * K;
    const typename Sum::Word* tiles =
        results.tiles + static_cast<long long>(blockIdx.y) * gridDim.x * K * Sum::kWords;
    const int num_tiles = pieces.num_tiles();
    Sum sums[K];
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k].clear();
    for (int tile = threadIdx.x; tile < num_tiles; tile += kBlock) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            Sum part;
            part.read(tiles + (static_cast<long long>(tile) * K + k) * Sum::kWords);
            sums[k].merge(part);
        }
    }
    Sum total = sum_over_block<Sum, K>(sums, scratch);
    if (threadIdx.x < K && first_value + static_cast<int>(threadIdx.x) < num_values) {
        total.finish();
        total.write(results.total + (first_value + threadIdx.x) * Sum::kWords);
    }
    if (pieces.num_samples == 0) return;

    const int per_sample = pieces.count / pieces.num_samples;
    for (int pair = threadIdx.x; pair < pieces.num_samples * K; pair += kBlock) {
        const int sample = pair / K, k = pair % K;
        if (first_value + k >= num_values) continue;
        Sum sum;
        sum.clear();
        const int end = pieces.end_tile((sample + 1) * per_sample - 1);
        for (int tile = pieces.first_tile(sample * per_sample); tile < end; ++tile) {
            Sum part;
            part.read(tiles + (static_cast<long long>(tile) * K + k) * Sum::kWords);
            sum.merge(part);
        }
        sum.finish();
        sum.write(results.samples + (static_cast<long long>(first_value + k) * pieces.num_samples +
                                     sample) * Sum::kWords);
    }
}

// The whole reduction. Terms::add_tile adds this thread's share of the terms w*x of the tokens
// begin .. begin + count - 1, which must not depend on where in memory they lie.
template <typename Sum, int K, typename Terms>
__device__ inline void reduce(const Terms& terms, const Pieces& pieces, const Results<Sum>& results,
                              int num_values) {
    SHARED_ARRAY(typename Sum::Word, scratch, kWarps * K * Sum::kWords);
    SHARED_ARRAY(int, is_last, 1);
    const int tile = blockIdx.x;
    if (tile < pieces.num_tiles()) {
        const int piece = pieces.of_tile(tile);
        const int start = (tile - pieces.first_tile(piece)) * kTile;
        const int count = min(pieces.length(piece) - start, kTile);
        const int begin = pieces.x_offset(piece) + start;
        Sum sums[K];
#pragma unroll
        for (int k = 0; k < K; ++k) sums[k].clear();
        terms.add_tile(begin, count, blockIdx.y * K, sums);
        Sum sum = sum_over_block<Sum, K>(sums, scratch);
        if (threadIdx.x < K) {
            sum.write(results.tiles +
                      ((static_cast<long long>(blockIdx.y) * gridDim.x + tile) * K + threadIdx.x) *
                          Sum::kWords);
        }
    }
    __threadfence();  // this thread's tile sums are visible before its block counts as arrived
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last[0] = atomicAdd(results.arrived + blockIdx.y, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last[0]) return;
    __threadfence();
    add_tiles<Sum, K>(pieces, results, num_values, scratch);
    if (threadIdx.x == 0) results.arrived[blockIdx.y] = 0;
}

// Terms of x [num_values, num_tokens]; what x holds where the weight is 0 does not matter.
template <typename X, typename Sum, int K>
struct RowTerms {
    const X* x;
    const double* w;
    int num_values;
    long long num_tokens;

    __device__ void add_tile(int begin, int count, int first_value, Sum (&sums)[K]) const {
        const int first = threadIdx.x * kPerThread;
        if (first >= count) return;
        Several<double> weights = {};
        load(w + begin + first, count - first, weights);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (first_value + k >= num_values) break;
            Several<X> values;
            load(x + (first_value + k) * num_tokens + begin + first, count - first, values);
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) {
                const double weight = weights.at[i];
                if (weight != 0.0) sums[k].add(__dmul_rn(weight, to_double(values.at[i])));
            }
        }
    }
};

// dx[k, t] = (grad_total[k] + grad_samples[k, sample of t]) * w[t]; every element is written.
template <typename X>
__device__ inline void spread(const double* grad_total, const double* grad_samples, const double* w,
                              const Pieces& pieces, X* dx, int num_values) {
    const int t = (blockIdx.x * kBlock + threadIdx.x) * kPerThread;
    const int count = pieces.num_tokens - t;
    if (count <= 0) return;
    Several<double> weights = {};
    load(w + t, count, weights);
    int samples[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        samples[i] = grad_samples && weights.at[i] != 0.0 ? pieces.sample_at(t + i) : -1;
    }
    for (int k = 0; k < num_values; ++k) {
        Several<X> slopes;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
            double slope = grad_total[k];
            if (samples[i] >= 0) {
                const long long row = static_cast<long long>(k) * pieces.num_samples;
                slope = __dadd_rn(slope, grad_samples[row + samples[i]]);
            }
            // A weight of 0 gives 0 even where the incoming gradient is infinite.
            const double weight = weights.at[i];
            store(&slopes.at[i], weight == 0.0 ? 0.0 : __dmul_rn(slope, weight));
        }
        store(dx + static_cast<long long>(k) * pieces.num_tokens + t, count, slopes);
    }
}

// w[t] = mask / denominator of the response entry at t, 0 where there is none.
template <typename M>
__device__ inline double weight_at(const M* masks, const double* denoms, const Pieces& pieces, int t) {
    if (pieces.count == 0 || t < pieces.rows[0]) return 0.0;
    const int piece = last_at_most(pieces.rows, pieces.count, t);
    const int within = t - pieces.x_offset(piece);
    if (within >= pieces.length(piece)) return 0.0;
    const double mask = to_double(masks[pieces.mask_offset(piece) + within]);
    if (mask == 0.0) return 0.0;
    return __ddiv_rn(mask, denoms[piece / (pieces.count / pieces.num_samples)]);
}

template <typename M>
__device__ inline void weigh(const M* masks, const double* denoms, const Pieces& pieces, double* w) {
    const int t = (blockIdx.x * kBlock + threadIdx.x) * kPerThread;
    const int count = pieces.num_tokens - t;
    Several<double> weights;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (i < count) weights.at[i] = weight_at(masks, denoms, pieces, t + i);
    }
    if (count > 0) store(w + t, count, weights);
}

}  // namespace dynbatch
