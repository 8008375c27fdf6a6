"""What has no parity row is refused by name, admitted by name, and warned of once."""

from __future__ import annotations

import argparse
import re
import warnings

import pytest
import torch

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks.traits import TRAITS, UNPROVEN, unproven
from tests.docs.traits import PAGE, with_table
from tests.parity.page import TABLES
from tests.pool import ROOT, run_ranks
from tests.reliability.catalogue import shown


def with_flags(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**{"admit_unproven": None, **values})


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
        }),
    ],
)
def test_each_is_refused_admitted_and_warned_of_once(
    name: str, values: dict[str, object]
) -> None:
    (reason,) = unproven(with_flags(**values))
    assert reason.endswith(f", or admit it with --admit-unproven {name}")
    admitted = with_flags(**values, admit_unproven=[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert unproven(admitted) == []
        assert unproven(admitted) == []
    assert len(caught) <= 1  # once in a process, whatever flags have it
    others = [trait.name for trait in UNPROVEN if trait.name != name]
    assert unproven(with_flags(**values, admit_unproven=others)) == [reason]


def test_the_indexer_loss_is_told_apart_from_dsa() -> None:
    values = {"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1}
    assert [reason.partition(":")[0] for reason in unproven(with_flags(**values))] == [
        "--experimental-attention-variant dsa", "--dsa-indexer-loss-coeff",
    ]  # fmt: skip


def test_nothing_is_refused_without_them() -> None:
    assert unproven(with_flags(attention_dropout=0.0, hidden_dropout=0.0)) == []


def test_each_trait_names_a_row_of_the_parity_page_or_a_reason() -> None:
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    for trait in TRAITS:
        if trait.row is None:
            assert re.fullmatch(r"--[^:]+: .+; .+", trait.reason), trait.name
            continue
        table, row = trait.row
        start = page.index(TABLES[table])
        end = page.find("\n## ", start + 3)
        assert f"\n| {row} |" in page[start : len(page) if end < 0 else end], trait.name
    assert len({trait.name for trait in TRAITS}) == len(TRAITS)


def test_the_page_of_compatibility_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m tests.docs.traits"


class OtherModel(torch.nn.Module):
    """Not a GPTModel."""


def check_models() -> str:
    from megatron_dynbatch.hooks.traits import check_model

    chunks = [torch.nn.Sequential(OtherModel())[0]]
    check_model(with_flags(admit_unproven=["model-class"]), chunks)
    with pytest.raises(OptionError) as raised:
        check_model(with_flags(), chunks)
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

    from megatron_dynbatch.hooks import session, traits

    traits.guard_scaled_terms()
    traits.guard_scaled_terms()
    told = {}
    for name, term in traits.scaled_terms().items():
        output = torch.ones(2, requires_grad=True)
        for step in (None, object()):
            session._session = SimpleNamespace(  # type: ignore[assignment]
                step=step, args=with_flags(admit_unproven=admit)
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
