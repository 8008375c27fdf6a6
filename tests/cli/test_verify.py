"""`verify` on the real Megatron: it names every wrong loss and raises no false alarm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.cli import verify as command
from megatron_dynbatch.cli.main import build_parser
from megatron_dynbatch.cli.verify_arguments import cell_arguments, plan_cells, script_arguments
from megatron_dynbatch.cli.verify_cells import RankPool
from megatron_dynbatch.cli.verify_result import Verification, as_table
from megatron_dynbatch.cli.verify_rollouts import (
    made_up_batches,
    twice,
    with_masked_siblings,
    write_batches,
)
from megatron_dynbatch.rollouts import RolloutBatch, Sample
from tests.cli.loss_variants import VARIANTS
from tests.pool import ROOT

LOSSES = Path(__file__).parent / "losses_script.py"
STOCK = ROOT / "examples" / "pretrain_gpt_sft.py"

# Loss, reduction, kinds of cells, processes, words of the reason.
WRONG = [
    ("mean_of_means", "token", ["packing"], 1, "averaged per micro-batch"),
    ("denominators_of_the_micro_batch", "rollout", ["packing"], 1, "a count of one micro-batch"),
    ("context_parallel_local_counts", "sample", ["cp"], 2, "changes with context parallelism"),
    ("double_division", "rollout", ["twice"], 1, "once more than the plugin does"),
    ("clamped_empty_samples", "rollout", ["masked"], 1, "clamped into a denominator"),
]


@pytest.fixture(scope="module", autouse=True)
def import_path() -> Iterator[None]:
    """The scripts import the examples, as they would from the folder of the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(scope="module")
def pool(import_path: None) -> Iterator[RankPool]:
    """Processes that all runs but those of the command itself share."""
    ranks = RankPool(timeout=280, shared=True)
    yield ranks
    ranks.end()


def verify(
    pool: RankPool, *arguments: str, script: Path = LOSSES, **options: Any
) -> Verification:
    """`verify` with one layer, in the shared processes."""
    return command.verify(script, ["--num-layers", "1", *arguments], pool=pool, **options)


@pytest.mark.parametrize(("loss", "reduction", "kinds", "ranks", "reason"), WRONG)
def test_a_wrong_loss_is_named_with_its_reason(
    pool: RankPool, loss: str, reduction: str, kinds: list[str], ranks: int, reason: str
) -> None:
    arguments = ("--test-loss", loss, "--loss-reduction", reduction)
    result = verify(pool, *arguments, kinds=kinds, max_ranks=ranks)
    assert not result.invariant and not result.errors
    wrong = {v.name: max(v.deviations.values()) for v in result.verdicts if not v.invariant}
    assert wrong.keys() == {"gradient", "lm loss"}
    # Far above rounding, which is below 1e-6.
    assert min(wrong.values()) > 1e-2
    (line,) = result.reasons()
    assert reason in line and line in as_table(result)


def test_a_wrong_metric_beside_a_right_loss(pool: RankPool) -> None:
    result = verify(pool, "--test-loss", "wrong_metric_only", kinds=["packing"], max_ranks=1)
    assert [v.name for v in result.verdicts if not v.invariant] == ["nll"]
    assert "NOT invariant: nll" in as_table(result)


@pytest.mark.timeout(900)  # ten runs of eight losses, on up to four processes
def test_every_loss_of_the_package_is_invariant(pool: RankPool) -> None:
    result = verify(pool, "--test-loss", "every_loss")
    assert result.invariant, as_table(result)
    assert len(result.cells) == 10 and result.proves_it
    values = {v.name: v.value for v in result.verdicts}
    assert {name.split()[0] for name in values} >= {*VARIANTS, "lm", "value"}
    # The data lie on both sides of every bound, or invariance would say little.
    fractions = {n: v for n, v in values.items() if "fraction" in n and "dual" not in n}
    fractions["ppo dual_clip_fraction"] = values["ppo dual_clip_fraction"]
    del fractions["reinforce clip_fraction"]  # nothing is clipped there
    assert all(0 < v < 1 for v in fractions.values()), fractions


def test_the_example_of_an_own_loss_is_invariant(pool: RankPool) -> None:
    script = ROOT / "examples" / "custom_loss.py"
    result = verify(pool, script=script, kinds=["cp"], max_ranks=2)
    assert result.invariant, as_table(result)
    assert [v.name for v in result.verdicts] == [
        "gradient", "focal loss", "cross entropy", "easy tokens",
    ]  # fmt: skip


def test_a_run_that_fails_is_shown_and_the_others_are_compared(pool: RankPool) -> None:
    result = verify(pool, "--test-loss", "raises_under_cp", kinds=["cp"], max_ranks=2)
    assert list(result.errors) == ["CP2"] and not result.invariant
    assert "group of size 2, got none: pass cp_group=" in as_table(result)


def run(*arguments: str) -> int:
    args = build_parser(["verify"]).parse_args(["verify", *arguments])
    return int(args.run(args))


STOCK_MEAN = "loss = torch.sum(losses * loss_mask) / loss_mask.sum().clamp(min=1)"


def test_the_stock_sum_is_right(pool: RankPool) -> None:
    result = verify(pool, script=STOCK, kinds=["packing", "twice"], max_ranks=1)
    assert result.invariant, as_table(result)
    assert "\ninvariant: no quantity deviates by more than" in as_table(result)


def test_the_command_calls_the_stock_mean_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mean = mean_script(tmp_path)
    assert run("--only", "packing", str(mean), "--num-layers", "1") == 1
    shown = capsys.readouterr().out
    assert shown.startswith("run 1 of 3: one micro-batch\n")
    assert "NOT invariant: gradient, lm loss" in shown
    assert "averaged per micro-batch" in shown and "microbatch.mean(x)" in shown


def test_no_script_and_no_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file 'nothing.py' to run"):
        run("nothing.py")
    with pytest.raises(ValueError, match="holds no rollout batch"):
        run("--rollouts", str(tmp_path), str(STOCK))


def test_arguments_that_verify_decides_are_taken_away() -> None:
    given = ["--num-layers", "3", "--seq-length", "4096", "--save=x", "--bf16", "--load", "ck",
             "--context-parallel-size", "8", "--lr", "1e-4", "--data-path", "1", "a", "2", "b",
             "--swiglu"]  # fmt: skip
    assert script_arguments(given) == ["--num-layers", "3", "--lr", "1e-4", "--swiglu"]


def test_cells_split_the_same_rollouts_differently() -> None:
    batches = made_up_batches(2, 5, seed=0)
    cells = plan_cells(batches)
    assert not cells[0].kinds
    assert {kind for c in cells for kind in c.kinds} == {"packing", "dp", "cp", "masked", "twice"}
    tokens = max(sum(s.total_length for s in batch) for batch in batches)
    longest = max(s.total_length for batch in batches for s in batch)
    assert cells[0].max_tokens_per_gpu >= 2 * tokens
    assert min(c.max_tokens_per_gpu * c.cp for c in cells) == longest
    argv = cell_arguments(cells[0], Path("x"), batches)
    assert argv[argv.index("--train-samples") + 1] == "11"


def test_caps_fit_the_layout() -> None:
    batches = [[Sample([1] * 5, response_length=3), Sample([1] * 3, response_length=2)]]
    sharded = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    caps = {c.name: c.max_tokens_per_gpu for c in plan_cells(batches, sharded)}
    # Samples are laid out as multiples of 2·CP = 4, micro-batches of 2·CP·TP = 8 (CP2) and 4.
    assert caps["many micro-batches"] == 8 and caps["few micro-batches"] == 8
    assert caps["CP2, many"] == 8 // 2 and caps["one micro-batch"] == 16


def rollouts_of(path: Path, *batches: list[Sample]) -> str:
    """A rollout directory with these batches."""
    write_batches(path / "rollouts", batches)
    return str(path / "rollouts")


def short(*lengths: int, **ids: int) -> list[Sample]:
    return [Sample([*range(1, n + 1)], response_length=n - 2, **ids) for n in lengths]


def mean_script(path: Path) -> Path:
    """The stock script with a mean over the tokens of the micro-batch."""
    text = STOCK.read_text()
    assert text.count("loss = torch.sum(losses * loss_mask)") == 1
    script = path / "mean.py"
    script.write_text(text.replace("loss = torch.sum(losses * loss_mask)", STOCK_MEAN))
    return script


@pytest.mark.parametrize("ids", [{}, {"rollout_id": 0}])
def test_a_mean_is_found_with_short_rollouts(
    pool: RankPool, tmp_path: Path, ids: dict[str, int]
) -> None:
    batches = [short(4, 4, 4, **ids), short(6, 5, **ids)]
    result = verify(pool, script=mean_script(tmp_path), batches=batches, kinds=["packing"])
    assert not result.invariant and not result.untested
    wrong = {v.name: v.deviations["many micro-batches"] for v in result.verdicts}
    assert wrong["gradient"] > 0.4
    assert "averaged per micro-batch" in as_table(result)


def test_rollouts_that_cannot_be_split_test_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rollouts_of(tmp_path, short(5), short(7))
    arguments = ["--rollouts", path, "--only", "packing"]
    assert run(*arguments, str(mean_script(tmp_path)), "--num-layers", "1") == 1
    shown = capsys.readouterr().out
    assert "\nNOT tested: the split into micro-batches: every run has the micro-batches" in shown
    assert "\ninvariant as far as tested: no quantity deviates" in shown
    row = next(line for line in shown.splitlines() if line.startswith("gradient"))
    assert row.split()[2:] == ["-", "-"]


def test_siblings_that_stay_together_are_not_a_test(pool: RankPool) -> None:
    batch = [*short(12, rollout_id=0), *short(4, 4, rollout_id=1)]
    result = verify(pool, script=STOCK, batches=[batch], kinds=["packing"])
    assert result.invariant and not result.proves_it
    assert list(result.untested) == ["siblings"]
    assert "NOT tested: samples of one rollout in different micro-batches" in as_table(result)


def test_layouts_without_processes_are_not_tested(pool: RankPool) -> None:
    result = verify(pool, script=STOCK, kinds=["cp", "twice"], max_ranks=1)
    assert result.untested == {"cp": "it takes 2 processes; raise --max-ranks"}


def test_a_fault_of_data_parallelism_is_not_blamed_on_the_others(pool: RankPool) -> None:
    result = verify(pool, "--test-loss", "wrong_under_dp", kinds=["packing", "dp", "cp"])
    wrong = {c for v in result.verdicts for c, d in v.deviations.items() if d > v.tolerance}
    assert wrong == {"DP2", "DP2, many", "DP2 x CP2, many"}
    (line,) = result.reasons()
    assert line.startswith("it changes with data parallelism")


def test_changed_rollouts_are_valid_and_what_they_say() -> None:
    (batch,) = made_up_batches(1, 5, seed=1)
    masked, doubled = with_masked_siblings(batch), twice(batch)
    for samples, rollouts in ((batch, 5), (masked, 5), (doubled, 10)):
        assert RolloutBatch(samples).index.num_rollouts == rollouts
    extra = [s for s in masked if s.mask_sum == 0]
    assert len(extra) == len(masked) - len(batch) == 3
    assert sum(s.mask_sum for s in doubled) == 2 * sum(s.mask_sum for s in batch)
