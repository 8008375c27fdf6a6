"""What has no parity row is refused by name, admitted by name, and warned of once."""

from __future__ import annotations

import argparse
import re
import warnings

import pytest
import torch

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks import admission, version
from megatron_dynbatch.hooks.admission import UNPROVEN, refused, warn_of_packing
from megatron_dynbatch.hooks.proven import PROVEN
from megatron_dynbatch.hooks.refusals import PAIRS, REFUSALS
from megatron_dynbatch.hooks.traits import BY_NAME, TRAITS
from tests.docs.traits import PAGE, possible_pairs, with_table
from tests.hooks.helpers import training_options
from tests.parity.page import heading
from tests.pool import ROOT, run_ranks
from tests.reliability.catalogue import shown


def with_flags(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**{"admit_unproven": None, **values})


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has warned of nothing yet; Megatron stays out of the tests' own."""
    monkeypatch.setattr(admission, "_warned", set())
    monkeypatch.setattr(version, "core_version", lambda: (0, 19))


@pytest.mark.parametrize(
    "name, values",
    [
        ("dropout", {"attention_dropout": 0.1, "hidden_dropout": 0.0}),
        ("dropout", {"attention_dropout": 0.0, "hidden_dropout": 0.1}),
        ("input-jitter", {"moe_input_jitter_eps": 1e-2}),
        ("random-routing", {"moe_router_force_load_balancing": True}),
        ("qk-clip", {"qk_clip": True}),
        ("dsa", {"experimental_attention_variant": "dsa"}),
        ("gated-delta-net", {"experimental_attention_variant": "gated_delta_net"}),
        ("hybrid-layers", {"hybrid_layer_pattern": "M*M*"}),
        ("heterogeneous-layers", {"heterogeneous_layers_config_path": "layers.json"}),
        ("other-positions", {"position_embedding_type": "mrope"}),
        ("other-optimizer", {"optimizer": "muon"}),
        ("global-aux-loss", {
            "num_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.0, 0.1],
        }),
    ],
)  # fmt: skip
def test_each_is_refused_admitted_and_warned_of_once(
    name: str, values: dict[str, object]
) -> None:
    (reason,) = refused(with_flags(**values))
    assert reason.endswith(f", or admit it with --admit-unproven {name}")
    admitted = with_flags(**values, admit_unproven=[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert refused(admitted) == []
        assert refused(admitted) == []
    assert len(caught) == 1  # once in a process, whatever flags have it
    assert str(caught[0].message).startswith("admitted without a parity test: --")
    others = [trait.name for trait in UNPROVEN if trait.name != name]
    assert refused(with_flags(**values, admit_unproven=others)) == [reason]


CANNOT: dict[str, dict[str, object]] = {
    "full-iteration-graphs": {"cuda_graph_scope": ["full_iteration"]},
    "graphs-of-stages": {
        "pipeline_model_parallel_size": 2, "cuda_graph_impl": "transformer_engine"
    },
    "rl-loop": {"perform_rl_step": True},
    "packing-scheduler": {"sequence_packing_scheduler": "default"},
    "hybrid-context-parallel": {"hybrid_context_parallel": True},
    "batch-ramp": {"rampup_batch_size": [1, 1, 1]},
    "batch-schedule": {"step_batch_size_schedule": "1:2"},
    "mtp-depths": {"mtp_num_layers": 2},
    "routes-padding": {"num_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
    "expert-capacity": {"num_experts": 4, "moe_expert_capacity_factor": 0.0},
    "balance-of-nothing": {
        "num_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
        "moe_balance": "same-step",
    },
    "overlapped-experts": {"overlap_moe_expert_parallel_comm": True},
    "weight-shards": {"expert_gtp_weight_remat_size": 2},
    "megatron-fsdp": {"use_custom_fsdp": True},
    "torch-fsdp": {"use_torch_fsdp2": True},
    "phase-transitions": {"phase_transition_iterations": "5"},
    "checkpoint-iteration": {"override_ckpt_iteration": 0},
    "evaluation-size": {"rollouts_per_step": "batch", "eval_iters": 1},
    "local-latent-attention": {
        "multi_latent_attention": True, "transformer_impl": "local",
        "tensor_model_parallel_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_work_is_not_admitted(name: str) -> None:
    (sentence,) = refused(with_flags(**CANNOT[name]))
    assert sentence == f"{BY_NAME[name].flag}: {BY_NAME[name].reason}"
    with pytest.raises(OptionError, match=f"--admit-unproven {name}: no such trait"):
        refused(with_flags(**CANNOT[name], admit_unproven=[name]))


def test_an_attention_without_packs_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dynbatch.hooks.refusals.on_cpu", lambda: False)
    (sentence,) = refused(with_flags(transformer_impl="local"))
    assert sentence == f"{BY_NAME['local-on-gpu'].flag}: {BY_NAME['local-on-gpu'].reason}"


def test_each_that_cannot_work_is_tested() -> None:
    assert {trait.name for trait in REFUSALS} == {*CANNOT, "local-on-gpu"}


@pytest.mark.parametrize(
    "values",
    [
        {"hybrid_layer_pattern": ""}, {"cuda_graph_impl": "transformer_engine"},
        {"moe_router_load_balancing_type": "sinkhorn", "moe_balance": "micro-batch"},
        {"num_experts": 4, "moe_router_load_balancing_type": "aux_loss",
         "moe_aux_loss_coeff": 0.1, "moe_balance": "same-step"},
        {"moe_balance": "same-step", "moe_router_load_balancing_type": "none"},
        {"num_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
         "moe_aux_loss_coeff": [0.1, 0.0]},
        {"eval_iters": 1, "rollouts_per_step": "batch", "eval_global_batch_size": 4},
        {"eval_iters": 1, "rollouts_per_step": 4}, {"mtp_num_layers": 1},
        {"transformer_impl": "local", "tensor_model_parallel_size": 2},
    ],
)  # fmt: skip
def test_what_is_nearly_refused_trains(values: dict[str, object]) -> None:
    assert refused(with_flags(**values)) == []


def test_the_indexer_loss_is_told_apart_from_dsa() -> None:
    values = {"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1}
    assert [reason.partition(":")[0] for reason in refused(with_flags(**values))] == [
        "--experimental-attention-variant dsa", "--dsa-indexer-loss-coeff",
    ]  # fmt: skip


def test_nothing_is_refused_without_them() -> None:
    assert refused(with_flags(attention_dropout=0.0, hidden_dropout=0.0)) == []


LONE = {"sliding-window": {"window_size": (6, 0)}, "sgd": {"optimizer": "sgd"}}


def test_a_pair_without_a_training_is_refused_and_admitted_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {**LONE["sliding-window"], **LONE["sgd"]}
    assert refused(with_flags(**flags)) == []
    apart = {name: traits - {"sgd"} for name, traits in PROVEN.items()}
    apart["1"] |= {"sgd", "self-attention", "data-parallel"}
    apart["1"] -= {"sliding-window"}
    monkeypatch.setattr(admission, "PROVEN", apart)
    sentence = (
        "--window-size with --optimizer sgd: no parity test has both; leave one of them out, or "
        "admit it with --admit-unproven sliding-window+sgd"
    )
    assert refused(with_flags(**flags)) == [sentence]
    assert refused(with_flags(**flags, admit_unproven=["sliding-window", "dsa"])) == [sentence]
    for name in ("sliding-window+sgd", "sgd+sliding-window"):
        assert refused(with_flags(**flags, admit_unproven=[name])) == []
    # A trait that is refused itself is not told of in pairs.
    assert len(refused(with_flags(**flags, attention_dropout=0.1))) == 2


@pytest.mark.parametrize(
    "values, words",
    [
        ({"mtp_num_layers": 1, "calculate_per_token_loss": True},
         "--calculate-per-token-loss: Megatron scales the MTP loss by a number of tokens"),
        ({"num_experts": 4, "moe_router_load_balancing_type": "aux_loss",
          "moe_aux_loss_coeff": 0.1, "moe_balance": "same-step", "overlap_param_gather": True},
         "--overlap-param-gather: parameters are gathered by the first forward pass"),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_work_is_not_admitted(values: dict[str, object], words: str) -> None:
    (sentence,) = refused(with_flags(**values))
    assert words in sentence and "--admit-unproven" not in sentence


def test_pairs_that_only_gpus_run_train_with_a_warning() -> None:
    values = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert refused(with_flags(**values)) == []
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("--multi-latent-attention with --tensor-model-parallel-size: ")
    assert "only GPUs run it" in message and "verify --model" in message


def test_only_these_pairs_of_proven_traits_have_no_training() -> None:
    # Megatron refuses these itself: MTP's positions, YaRN around MLA, which has its own, and SGD in
    # the distributed optimizer.
    of_megatron = {
        frozenset(names.split("+"))
        for names in ("yarn+mtp", "learned+mtp", "latent-attention+yarn",
                      "distributed-optimizer+sgd", "overlap-param-gather+sgd")
    }  # fmt: skip
    without = {
        frozenset((first.name, second.name))
        for first, second in possible_pairs()
        if not any({first.name, second.name} <= traits for traits in PROVEN.values())
    }
    assert without == of_megatron | {pair.names for pair in PAIRS}


def test_a_name_that_admits_nothing_is_told() -> None:
    for name in ("speed", "experts", "mtp+per-token-loss", "sgd+sgd", "sgd+speed", "sgd+dropout",
                 "rope+sgd+mtp", "batch-keys"):  # fmt: skip
        with pytest.raises(OptionError) as raised:
            refused(with_flags(admit_unproven=[name, "dropout"]))
        assert str(raised.value).startswith(f"--admit-unproven {name}: no such trait; there are ")


@pytest.mark.parametrize(
    "here, values, admits",
    [
        ((0, 18), {"num_experts": 4}, False), ((0, 18), {"mtp_num_layers": 1}, False),
        ((0, 15), {"position_embedding_type": "rope"}, True), ((0, 19), {"num_experts": 4}, None),
        ((0, 20), {"num_experts": 4}, None), ((1, 0), {"mtp_num_layers": 1}, None),
    ],
)  # fmt: skip
def test_a_row_stands_from_a_version_on(
    here: tuple[int, int],
    values: dict[str, object],
    admits: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(version, "core_version", lambda: here)
    (name,) = values
    told = [
        line
        for line in refused(with_flags(**values))
        if line.startswith(f"--{name.replace('_', '-')}")
    ]
    if admits is None:
        assert told == []
        return
    (sentence,) = told
    since = "0.16" if admits else "0.19"
    assert f"stands for megatron-core {since} and newer, this is 0." in sentence
    assert sentence.endswith("--admit-unproven rope") == admits
    shown("…: its row in docs/parity.md", sentence)


def test_the_load_balancing_loss_of_micro_batches_names_the_alternatives() -> None:
    routed = {"num_experts": 4, "moe_router_load_balancing_type": "aux_loss"}
    for values in (
        {"moe_balance": "previous-step", "moe_aux_loss_coeff": 0.1, **routed},
        {"moe_balance": "micro-batch", "moe_aux_loss_coeff": 0.0, **routed},
        {"moe_balance": "micro-batch", "moe_aux_loss_coeff": 0.1},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_packing(with_flags(**values))
    with pytest.warns(UserWarning, match="--moe-balance previous-step or same-step makes it"):
        warn_of_packing(
            with_flags(moe_balance="micro-batch", moe_aux_loss_coeff=[0.1, 0.0], **{
                **routed, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]
            })
        )  # fmt: skip


def test_each_trait_names_a_row_of_the_parity_page_or_a_reason() -> None:
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    for trait in TRAITS:
        if trait.row is None:
            assert trait.reason, trait.name
            assert not trait.admissible or re.fullmatch(".+; .+", trait.reason), trait.name
            continue
        table, row = trait.row
        assert f"\n| {row} |" in section(page, heading(table)), trait.name
    assert len({trait.name for trait in TRAITS}) == len(TRAITS)


def section(page: str, title: str) -> str:
    start = page.index(title)
    end = page.find("\n## ", start + 3)
    return page[start : len(page) if end < 0 else end]


def test_each_training_of_pairs_stands_on_the_parity_page() -> None:
    text = section((ROOT / "docs" / "parity.md").read_text(encoding="utf-8"), heading("pairs"))
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]*) \|", text, re.MULTILINE))
    assert rows == {name: ", ".join(sorted(traits)) for name, traits in PROVEN.items()}


def test_the_page_of_compatibility_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m tests.docs.traits"


class OtherModel(torch.nn.Module):
    """Not a GPTModel."""


def check_models() -> str:
    from megatron_dynbatch.hooks.admission import check_model

    chunks = [torch.nn.Sequential(OtherModel())[0]]
    check_model(chunks, {"model-class"})
    with pytest.raises(OptionError) as raised:
        check_model(chunks, set())
    return str(raised.value)


def test_another_model_class_is_refused() -> None:
    (message,) = run_ranks(1, check_models, process_group=False)
    shown("the model is a", message)
    assert message == (
        "the model is a OtherModel: parity tests have GPTModel only; build one, or admit yours "
        "with --admit-unproven model-class"
    )


def use_scaled_terms(admit: list[str] | None) -> dict[str, str]:
    """Use each loss term that Megatron's schedule scales, inside a step and outside."""
    from types import SimpleNamespace

    from megatron_dynbatch.hooks import loss_terms, session

    loss_terms.guard_scaled_terms()
    loss_terms.guard_scaled_terms()
    told = {}
    for name, term in loss_terms.scaled_terms().items():
        output = torch.ones(2, requires_grad=True)
        for step in (None, object()):
            session._session = SimpleNamespace(  # type: ignore[assignment]
                step=step, options=training_options(admit_unproven=admit)
            )
            try:
                term.apply(output, torch.ones(()))
                told[name] = "used"
            except OptionError as error:
                assert step is not None
                told[name] = str(error)
    return told


def test_a_loss_term_that_no_hook_weights_is_refused_where_it_is_used() -> None:
    (told,) = run_ranks(1, use_scaled_terms, None, process_group=False)
    shown("the model has a loss term", told["DSAIndexerLossAutoScaler"])
    assert told.pop("DSAIndexerLossAutoScaler").startswith(
        "the model has a loss term that is not weighted by tokens (DSAIndexerLossAutoScaler)"
    )
    # A term that a new Megatron adds is not in this list, and refused.
    assert told == {"MoEAuxLossAutoScaler": "used", "MTPLossAutoScaler": "used"}
    (told,) = run_ranks(1, use_scaled_terms, ["dsa-indexer-loss"], process_group=False)
    assert told["DSAIndexerLossAutoScaler"] == "used"
