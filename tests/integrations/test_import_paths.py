"""Names are still found where they were first, and nothing else of the package needs them."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest

from tests.pool import ROOT

PACKAGE = ROOT / "megatron_dynbatch"
FIRST_PLACES = {
    "plan.build_dp_schedule": "integrations.schedule",
    "plan.compute_dynamic_global_batch_size": "integrations.batch_size",
    "plan.first_fit_pack": "integrations.first_fit",
    "hooks.DataIterator": "integrations.data_iterator",
    "hooks.get_data_iterator": "integrations.data_iterator",
    "report.gather_and_reduce_log_dict": "integrations.metrics",
    "report.gather_log_data": "integrations.metrics",
    "report.reduce_train_step_metrics": "integrations.metrics",
    "report.rollout_log_metric_contribution": "integrations.metrics",
}


@pytest.mark.parametrize("place", FIRST_PLACES)
def test_the_first_place_of_a_name_is_still_one(place: str) -> None:
    package, _, name = place.partition(".")
    first = import_module(f"megatron_dynbatch.{package}")
    home = import_module(f"megatron_dynbatch.{FIRST_PLACES[place]}")
    assert getattr(first, name) is getattr(home, name)
    assert name in first.__all__


def test_the_first_place_of_the_handshake_is_still_one() -> None:
    home = import_module("megatron_dynbatch.handshake")
    first = import_module("megatron_dynbatch.plan.handshake")
    assert all(getattr(first, name) is getattr(home, name) for name in home.__all__)


@pytest.mark.parametrize("package", ["", ".plan", ".hooks", ".report"])
def test_a_name_that_is_nowhere_is_said_to_be(package: str) -> None:
    module = import_module(f"megatron_dynbatch{package}")
    with pytest.raises(AttributeError, match=f"'megatron_dynbatch{package}' has no .* 'no_name'"):
        module.no_name  # noqa: B018


def test_only_the_first_places_import_them() -> None:
    importers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("megatron_dynbatch.integrations")
    }
    assert importers == {"plan/__init__.py", "hooks/__init__.py", "report/__init__.py"}
