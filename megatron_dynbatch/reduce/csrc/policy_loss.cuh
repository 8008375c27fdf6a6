// The fused policy loss: formulas and symbols of policy_reference.py, one token at a time.
#pragma once
#include "common.cuh"
#include "segments.cuh"

namespace dynbatch {

constexpr int kPolicyTerms = 11;

// Choices by their index in policy_reference.py.
enum Surrogate { kClip, kCispo, kReinforce };
enum KlEstimator { kNoKl, kK1, kK2, kK3, kLowVar };
enum Importance { kNoImportance, kTruncate, kMask };

struct PolicyFormula {
    int surrogate;
    float ratio_low, ratio_high, dual_clip;
    int kl;
    float kl_coef, entropy_coef;
    int importance;
    float low, high;
};

__device__ inline float clip(float x, float low, float high) { return fminf(fmaxf(x, low), high); }

// fminf and fmaxf drop NaN, which must show where a token counts.
__device__ inline float clamp_log_ratio(float x) { return x != x ? x : clip(x, -20.0f, 20.0f); }

struct PolicyTerms {
    const float *logp, *old, *advantages;
    const double* w;
    const float *ref, *rollout, *entropy;  // may be null
    float* slope;
    PolicyFormula formula;

    // Tokens of a warp are neighbours, not those of a thread: the body is too long to be unrolled
    // over several (half a minute to compile), and loads coalesce as well this way.
    __device__ void add_tile(int begin, int count, int, Float64Sum (&sums)[kPolicyTerms]) const {
#pragma unroll 1
        for (int i = 0; i < kPerThread; ++i) {
            const int j = i * kBlock + threadIdx.x;
            if (j < count) add(begin + j, sums);
        }
    }

    __device__ void add(int t, Float64Sum (&sums)[kPolicyTerms]) const {
        const double weight = w[t];
        if (weight == 0.0) {
            slope[t] = 0.0f;
            return;
        }
        const float now = logp[t], before = old[t], advantage = advantages[t];
        const float raw = now - before, log_ratio = clamp_log_ratio(raw);
        const float ratio = expf(log_ratio);
        const bool inside = fabsf(raw) <= 20.0f;
        const float clipped_ratio =
            ratio != ratio ? ratio : clip(ratio, formula.ratio_low, formula.ratio_high);
        float pg, dpg;
        bool clipped = false, dual_clipped = false;
        if (formula.surrogate == kReinforce) {
            dpg = -advantage;
            pg = dpg * now;
        } else if (formula.surrogate == kCispo) {
            dpg = -clipped_ratio * advantage;
            pg = dpg * now;
            clipped = clipped_ratio != ratio;
        } else {
            const float plain = -advantage * ratio, limit = -advantage * clipped_ratio;
            clipped = limit > plain;
            pg = clipped ? limit : plain;
            dpg = inside && !clipped ? plain : 0.0f;
            const float bound = -formula.dual_clip * advantage;
            dual_clipped = formula.dual_clip > 0.0f && advantage < 0.0f && pg > bound;
            if (dual_clipped) {
                pg = bound;
                dpg = 0.0f;
            }
        }

        float omega = 1.0f;
        bool bounded = false;
        if (formula.importance != kNoImportance && rollout) {
            const float rho = expf(clamp_log_ratio(before - rollout[t]));
            bounded = rho > formula.high || (formula.importance == kMask && rho < formula.low);
            omega = !bounded ? rho : formula.importance == kMask ? 0.0f : formula.high;
            pg *= omega;
            dpg *= omega;
        }

        float loss = pg, dloss = dpg, kl = 0.0f, token_entropy = 0.0f;
        if (formula.kl != kNoKl && ref) {
            const float delta = ref[t] - now;
            float dkl;
            if (formula.kl == kK1) {
                kl = -delta;
                dkl = 1.0f;
            } else if (formula.kl == kK2) {
                kl = 0.5f * delta * delta;
                dkl = -delta;
            } else {
                const float growth = expf(clamp_log_ratio(delta));
                kl = growth - delta - 1.0f;
                dkl = 1.0f - (fabsf(delta) <= 20.0f ? growth : 0.0f);
                if (formula.kl == kLowVar && fabsf(kl) > 10.0f) {
                    kl = kl > 0.0f ? 10.0f : -10.0f;
                    dkl = 0.0f;
                }
            }
            if (formula.kl_coef != 0.0f) {
                loss += formula.kl_coef * kl;
                dloss += formula.kl_coef * dkl;
            }
        }
        if (entropy) {
            token_entropy = entropy[t];
            if (formula.entropy_coef != 0.0f) loss -= formula.entropy_coef * token_entropy;
        }

        slope[t] = static_cast<float>(__dmul_rn(dloss, weight));
        const float terms[kPolicyTerms] = {loss,
                                           pg,
                                           clipped ? 1.0f : 0.0f,
                                           dual_clipped ? 1.0f : 0.0f,
                                           ratio - 1.0f - log_ratio,
                                           ratio,
                                           inside ? 0.0f : 1.0f,
                                           kl,
                                           token_entropy,
                                           omega,
                                           bounded ? 1.0f : 0.0f};
#pragma unroll
        for (int k = 0; k < kPolicyTerms; ++k) sums[k].add(__dmul_rn(weight, terms[k]));
    }
};

}  // namespace dynbatch
