"""Which files are mutated, which fast tests must notice, and which mutants no test can."""

from __future__ import annotations

type Stages = list[list[str]]
"""Arguments of pytest, one list after the other until a test fails. Slow tests never run."""

SESSION = ["tests/hooks/test_session.py"]
BOUNDARY = ["tests/hooks/test_step_boundary.py"]
SCHEDULE = ["tests/hooks/test_schedule.py"]
PACKS = ["tests/layout/test_packed_sequence.py", "tests/layout/test_micro_batch.py"]
SEGMENTS = ["tests/reduce/test_segment_sums.py", "tests/reduce/test_sample_mean.py"]

# Tests within one process come first: those that start ranks cost ten times as much.
TARGETS: dict[str, Stages] = {
    "hooks/loss.py": [["tests/hooks/test_loss.py"], SCHEDULE],
    "hooks/aux_loss.py": [["tests/hooks/test_aux_loss.py"], SCHEDULE],
    "hooks/calculator.py": [SESSION, BOUNDARY],
    "hooks/step_boundary.py": [SESSION, BOUNDARY, SCHEDULE],
    "steps/announce.py": [["tests/steps/test_announce.py"], ["tests/steps/test_feed.py"]],
    "steps/cursor.py": [["tests/steps/test_cursor.py"], ["tests/steps/test_feed.py"]],
    "losses/scaling.py": [["tests/losses/test_step_cases.py"]],
    "layout/packed_sequence.py": [["tests/layout/test_packed_sequence.py"]],
    "layout/micro_batch.py": [["tests/layout/test_micro_batch.py"]],
    "geometry/zigzag.py": [["tests/geometry/test_zigzag.py"], SEGMENTS],
    "geometry/spans.py": [["tests/geometry/test_pack_layout.py"]],
    "geometry/padding.py": [["tests/geometry/test_parallel_layout.py"], PACKS],
    "geometry/pack_layout.py": [["tests/geometry/test_pack_layout.py"], PACKS],
    "geometry/response_pieces.py": [["tests/geometry/test_pack_layout.py"], SEGMENTS],
    "layout/stock.py": [["tests/layout/test_packed_sequence.py"]],
    "plan/denominators.py": [["tests/plan/test_denominators.py", "tests/plan/test_cases.py"]],
}

EQUIVALENT: dict[str, str] = {
    "plan/denominators.py _unit_sums: 1 → 2": (
        "one more sum that stays 0: callers read sums[units[rows]] or those of present units"
    ),
    "plan/denominators.py _unit_sums: 0 → 1": (
        "reached without samples only; callers then read no entry of it"
    ),
    "layout/packed_sequence.py pack_samples: True → False": (
        "strict=: `num_unpredicted` has one entry for each sample of `batch`"
    ),
    "layout/packed_sequence.py _column: True → False": (
        "strict=: `batch` and `values` are made with one entry for each of `rows`"
    ),
    "layout/packed_sequence.py _column: True → False (2)": (
        "strict=: values, numbers and lengths have one entry for each sample"
    ),
    "layout/micro_batch.py MicroBatch.sums: True → False": (
        "strict=: one row is made for each value"
    ),
    "layout/micro_batch.py MicroBatch.sums: True → False (2)": (
        "strict=: weighted_sums answers one sum for each row, and there is one for each value"
    ),
    "layout/micro_batch.py slice_packed.tensor: True → False": (
        "non_blocking=: whether the host waits; the stream has the copy before all that reads it"
    ),
    "hooks/calculator.py StepCalculator.update: False → True": (
        "the default of a parameter that nothing reads: the method has no body"
    ),
    "steps/cursor.py Cursor.after_batch: 0 → 1 (2)": (
        "the default of max() is taken without stamps only, and then there is none to keep"
    ),
}
"""Key → why no output can differ."""
