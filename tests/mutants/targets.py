"""Which files are mutated, which fast tests must notice, and which mutants no test can."""

from __future__ import annotations

PARITY = "tests/parity/"
EXACT = PARITY + "test_layouts.py::test_float64_gradients_equal_those_of_the_independent_loop"
POLICY = PARITY + "test_paths.py::test_every_metric_of_a_policy_loss[DP2]"
DENSE = [f"{EXACT}[DP2]", f"{EXACT}[CP2]"]
EXPERTS = [PARITY + "test_experts.py::test_equals_the_independent_loop[z-loss, EP2]"]

type Stages = list[list[str]]
"""Arguments of pytest, one list after the other until a test fails. Slow tests never run."""

TARGETS: dict[str, Stages] = {
    "layout/zigzag.py": [["tests/layout/test_zigzag.py"], ["tests/layout"]],
    "layout/stock.py": [["tests/layout"]],
    "layout/packed_sequence.py": [["tests/layout"], [POLICY, *DENSE]],
    "layout/micro_batch.py": [["tests/layout"], [POLICY, *DENSE]],
    "losses/scaling.py": [["tests/losses/test_step_cases.py", "tests/hooks/test_loss.py"]],
    "hooks/scheduler.py": [["tests/hooks/test_session.py"]],
    "hooks/microbatches.py": [
        ["tests/hooks/test_session.py"],
        [PARITY + "test_boundaries.py"],
    ],
    "hooks/loss.py": [["tests/hooks/test_loss.py"], [POLICY, *DENSE]],
    "hooks/aux_loss.py": [["tests/hooks/test_aux_loss.py"], EXPERTS],
    "steps/announce.py": [["tests/steps/test_feed.py", "tests/steps/test_async.py"]],
    "steps/cursor.py": [
        ["tests/steps/test_cursor.py", "tests/steps/test_feed.py", "tests/hooks/test_session.py"]
    ],
    "plan/denominators.py": [["tests/plan/test_denominators.py", "tests/plan/test_cases.py"]],
}

EQUIVALENT: dict[str, str] = {
    "plan/denominators.py _unit_sums: 1 → 2": (
        "one more sum that stays 0: callers read sums[units[rows]] or those of present units"
    ),
    "plan/denominators.py _unit_sums: 0 → 1": (
        "reached without samples only; callers then read no entry of it"
    ),
}
"""Key → why no output can differ."""
