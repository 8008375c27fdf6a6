"""Options of every policy loss that `verify` is run on."""

from typing import Any

# Bounds lie where the made-up log-probs and advantages fall on both sides.
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": 1.2, "entropy_coef": 0.0, "ratio_extremes": True},
    "grpo": {"entropy_coef": 0.1},
    "dr_grpo": {"kl": "k1", "kl_coef": 0.1},
    "dapo": {"importance": "truncate", "importance_bounds": (0.0, 1.2)},
    "cispo": {"importance": "mask", "importance_bounds": (0.7, 1.3), "clip_high": 0.3},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05, "off_policy_threshold": 0.05},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.2, "kl": "low_var", "kl_coef": 0.1},
    "reinforce": {"kl": "k2", "old_log_probs": "current", "temperature": 0.8},
}
