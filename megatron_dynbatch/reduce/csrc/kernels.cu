// Entry points: every specialisation under a name of its own, as kernels.py launches them.
#include "common.cuh"
#include "policy_loss.cuh"
#include "segments.cuh"
#include "vocabulary.cuh"

using namespace dynbatch;

#define SEGMENT_SUMS(NAME, X, SUM, K)                                                             \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        NAME(const X* x, const double* w, const int* rows, int count, int num_samples,            \
             int num_tokens, int num_values, SUM::Word* tiles, unsigned int* arrived,             \
             SUM::Word* total, SUM::Word* samples) {                                              \
        RowTerms<X, SUM, K> terms = {x, w, num_values, num_tokens};                               \
        Pieces pieces = {rows, count, num_samples, num_tokens};                                   \
        Results<SUM> results = {tiles, arrived, total, samples};                                  \
        reduce<SUM, K>(terms, pieces, results, num_values);                                       \
    }

#define SPREAD(NAME, X)                                                                           \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        NAME(const double* grad_total, const double* grad_samples, const double* w,               \
             const int* rows, int count, int num_samples, int num_tokens, int num_values, X* dx) { \
        Pieces pieces = {rows, count, num_samples, num_tokens};                                   \
        spread<X>(grad_total, grad_samples, w, pieces, dx, num_values);                           \
    }

#define WEIGH(NAME, M)                                                                            \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        NAME(const M* masks, const double* denoms, const int* rows, int count, int num_samples,   \
             int num_tokens, double* w) {                                                         \
        Pieces pieces = {rows, count, num_samples, num_tokens};                                   \
        weigh<M>(masks, denoms, pieces, w);                                                       \
    }

#define POLICY_LOSS(NAME, _)                                                                      \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        NAME(const float* logp, const float* old, const float* advantages, const double* w,       \
             const float* ref, const float* rollout, const float* entropy, int surrogate,         \
             double clip_low, double clip_high, double dual_clip, int kl, double kl_coef,         \
             double entropy_coef, int importance, double low, double high, const int* rows,       \
             int count, int num_samples, int num_tokens, float* slope, double* tiles,             \
             unsigned int* arrived, double* sums, double* samples) {                              \
        PolicyFormula formula = {surrogate,        float(1.0 - clip_low), float(1.0 + clip_high), \
                                 float(dual_clip), kl,                    float(kl_coef),         \
                                 float(entropy_coef), importance, float(low), float(high)};       \
        PolicyTerms terms = {logp, old, advantages, w, ref, rollout, entropy, slope, formula};    \
        Pieces pieces = {rows, count, num_samples, num_tokens};                                   \
        Results<Float64Sum> results = {tiles, arrived, sums, samples};                            \
        reduce<Float64Sum, kPolicyTerms>(terms, pieces, results, kPolicyTerms);                   \
    }

#define LOGPROB_STATISTICS(NAME, X)                                                               \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        NAME(GLOBAL(const X) logits, GLOBAL(const long long) targets,                             \
             GLOBAL(const unsigned char) keep, int width, int columns, double scale,              \
             GLOBAL(float) result) {                                                              \
        logprob_statistics<X>(logits, targets, keep, width, columns, float(scale), result);       \
    }

#define LOGPROB_COMBINE(NAME, _)                                                                  \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        NAME(GLOBAL(const float) parts, GLOBAL(const unsigned char) keep, int num_parts,          \
             int num_rows, double scale, GLOBAL(float) logp, GLOBAL(float) entropy,               \
             GLOBAL(float) saved) {                                                               \
        combine_parts(parts, keep, num_parts, num_rows, scale, logp, entropy, saved);             \
    }

#define LOGPROB_BACKWARD(NAME, X)                                                                 \
    extern "C" __global__ void __launch_bounds__(kBlock)                                          \
        NAME(GLOBAL(const X) logits, GLOBAL(const long long) targets,                             \
             GLOBAL(const unsigned char) keep, GLOBAL(const float) saved,                         \
             GLOBAL(const float) grad_logp, GLOBAL(const float) grad_entropy, int width,          \
             int columns, double scale, GLOBAL(X) grad) {                                         \
        logprob_backward<X>(logits, targets, keep, saved, grad_logp, grad_entropy, width, columns, \
                            float(scale), grad);                                                  \
    }

SEGMENT_SUMS(segment_sums_float32_1, float, Float64Sum, 1)
SEGMENT_SUMS(segment_sums_float32_8, float, Float64Sum, 8)
SEGMENT_SUMS(segment_sums_bfloat16_1, bfloat16, Float64Sum, 1)
SEGMENT_SUMS(segment_sums_bfloat16_8, bfloat16, Float64Sum, 8)
SEGMENT_SUMS(segment_sums_float64_1, double, Float64Sum, 1)
SEGMENT_SUMS(segment_sums_float64_8, double, Float64Sum, 8)
SEGMENT_SUMS(exact_sums_float32, float, ExactSum, 4)
SEGMENT_SUMS(exact_sums_bfloat16, bfloat16, ExactSum, 4)
SEGMENT_SUMS(exact_sums_float64, double, ExactSum, 4)
SPREAD(segment_sums_backward_float32, float)
SPREAD(segment_sums_backward_bfloat16, bfloat16)
SPREAD(segment_sums_backward_float64, double)
WEIGH(token_weights_float32, float)
WEIGH(token_weights_uint8, unsigned char)
POLICY_LOSS(policy_loss, float)
LOGPROB_STATISTICS(logprob_statistics_float32, float)
LOGPROB_STATISTICS(logprob_statistics_bfloat16, bfloat16)
LOGPROB_COMBINE(logprob_combine, float)
LOGPROB_BACKWARD(logprob_backward_float32, float)
LOGPROB_BACKWARD(logprob_backward_bfloat16, bfloat16)
