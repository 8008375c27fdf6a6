"""A model that cannot be given labels and return logits is told so; the numbers are in parity."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks.mtp_inputs import inject_mtp_inputs, logits_of
from tests.hooks.helpers import training_options
from tests.pool import run_ranks
from tests.reliability.catalogue import shown


class OwnModel(torch.nn.Module):
    """Takes labels, but returns losses then."""

    def forward(self, tokens: Any, labels: Any = None) -> None:
        """Never called."""


def inject() -> str:
    run: Any = SimpleNamespace(options=training_options(mtp_num_layers=1))
    with pytest.raises(OptionError) as raised:
        inject_mtp_inputs(run, OwnModel())
    run.options = training_options()
    inject_mtp_inputs(run, OwnModel())
    return str(raised.value)


def test_a_model_that_takes_no_mask_and_no_output_processor() -> None:
    (message,) = run_ranks(1, inject, process_group=False)
    shown("--mtp-num-layers with", message)
    assert message == (
        "--mtp-num-layers with OwnModel: its forward takes no loss_mask and no output_processor, "
        "so the term cannot be given its labels; use GPTModel"
    )


def test_logits_are_scaled_and_transposed() -> None:
    hidden = torch.arange(6.0).view(3, 1, 2)
    logits = logits_of(
        hidden_states=hidden,
        output_layer=lambda h, weight, runtime_gather_output: (h @ weight, None),
        output_weight=torch.tensor([[1.0, 0.0], [1.0, 2.0]]),
        runtime_gather_output=None,
        scale_logits=lambda x: 10 * x,
        labels=None,
    )
    assert logits.tolist() == [[[10.0, 20.0], [50.0, 60.0], [90.0, 100.0]]]
