"""Rollout files are data: they run no code, name no path outside, and choose no import."""

from __future__ import annotations

import ast
import io
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megatron_dynbatch.handshake import publish_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.plan.cost import CostModel
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, RolloutQueue, Sample
from tests.pool import ROOT
from tests.rollouts.forging import INDEX, PART, forge, replaced

SAMPLE = Sample([1, 2, 3], 2, token_arrays={"experts": [1, 2, 3]}, blobs={"image": b"png"})
SOURCES = [*sorted((ROOT / "megatron_dynbatch").rglob("*.py"))]


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """(function as written, call, place) of every call in the package."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node, f"{path.name}:{node.lineno}"


def option(call: ast.Call, name: str) -> Any:
    values = [ast.literal_eval(k.value) for k in call.keywords if k.arg == name]
    return values[0] if values else None


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    for function, call, place in calls():
        assert function not in ("eval", "exec", "__import__", "yaml.load"), place
        if function == "np.load":
            assert option(call, "allow_pickle") is False, place
        if function == "torch.load":
            assert option(call, "weights_only") is True, place
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            assert not {"pickle", "marshal", "shelve", "dill"} & set(imported), path


def test_no_name_reaches_a_shell_and_sockets_are_on_loopback() -> None:
    for function, call, place in calls():
        assert function not in ("os.system", "os.popen"), place
        if function.startswith("subprocess."):
            assert option(call, "shell") is None, place
        # Ray and torch.distributed are joined where the user started them, never started here.
        assert not function.startswith(("socketserver.", "http.server.")), place
        if function.endswith(".bind") and isinstance(call.args[0], ast.Tuple):
            assert ast.literal_eval(call.args[0])[0] == "127.0.0.1", place
        if function == "ray.init":
            assert any(k.arg == "address" for k in call.keywords), place
        assert function not in ("ray.start", "dist.TCPStore", "init_process_group"), place


class Opened:
    """What a pickle would do."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_in_the_place_of_an_array_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "was-run"
    array = np.array([Opened(str(trap))] * 3, dtype=object)
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    for content in (buffer.getvalue(), pickle.dumps(Opened(str(trap)))):
        directory = RolloutDirectory(tmp_path / str(len(content)))
        directory.write([SAMPLE])
        batch, name = directory.path / "batch-00000000", "token_arrays/experts"
        forge(batch, PART, replaced(name, pa.array([content], pa.binary())))
        sizes = pa.array([len(content)], pa.int32())
        forge(batch, INDEX, replaced(f"cells/{name}", sizes))
        with pytest.raises(RolloutDataError, match="row 0, an array is not stored as .npy"):
            directory.read(0, [0])
    assert not trap.exists()


@pytest.mark.parametrize("part", [-1, 99_999, -(2**31)])
def test_an_index_names_no_file_outside_its_batch(tmp_path: Path, part: int) -> None:
    directory = RolloutDirectory(tmp_path / "rollouts", open_timeout=0.0)
    directory.write([SAMPLE])
    change = replaced("part", pa.array([part], pa.int32()))
    forge(directory.path / "batch-00000000", INDEX, change)
    with pytest.raises(RolloutDataError, match="rollouts/batch-00000000/part-"):
        directory.read(0, [0])


def test_names_of_arrays_and_notes_are_no_paths(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "rollouts")
    directory.write([SAMPLE], key="../../key")
    batch, name = directory.path / "batch-00000000", "blobs/../../x"
    forge(batch, PART, replaced("blobs/image", pa.array([b"x"], pa.binary()), name))
    sizes = pa.array([1], pa.int32())
    forge(batch, INDEX, replaced("cells/blobs/image", sizes, f"cells/{name}"))
    with pytest.raises(RolloutDataError, match="the name must be a Python identifier"):
        directory.read(0, [0])
    for name in ("../note", "/etc/note", "a/b", ""):
        with pytest.raises(RolloutDataError, match="note name"):
            directory.publish(name, "text")
        with pytest.raises(RolloutDataError, match="note name"):
            directory.published(name)
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts"}


@pytest.mark.parametrize("field", ["step_splitter", "cost"])
def test_import_paths_in_a_note_are_not_followed(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's published layout is data for the rollout side, unless it says otherwise."""
    name = f"note_module_{field}"
    (tmp_path / f"{name}.py").write_text(
        "def split(index, options):\n    return [list(range(index.num_rollouts))]\n"
        "def cost(lengths):\n    return lengths\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    chosen = f"{name}:{'split' if field == 'step_splitter' else 'cost'}"
    value: Any = chosen if field == "step_splitter" else CostModel(function=chosen)
    options = PlanOptions(max_tokens_per_gpu=8, **{field: value})
    queue = RolloutQueue("rollouts")
    publish_layout(queue, ParallelLayout(), options)
    write_planned(queue, [SAMPLE])
    assert name not in sys.modules
    assert queue.plan_json(0) is None  # the trainer plans it
    write_planned(queue, [SAMPLE], trusted=[chosen])
    assert name in sys.modules
    assert queue.plan_json(1) is not None
