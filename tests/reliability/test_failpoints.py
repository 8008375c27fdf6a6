"""Every durable write has failpoints; a writer stopped at any of them leaves a whole directory."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dynbatch import failpoints
from megatron_dynbatch.failpoints import DONE_VARIABLE, ENTRY, VARIABLE, WRITES, Failpoint
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory
from megatron_dynbatch.rollouts.hidden import hidden_name
from tests.pool import ROOT
from tests.reliability.writer_kills import KEYS, NUM_BATCHES, PROGRESS, live, samples, stopped
from tests.rollouts.helpers import assert_same_samples

PACKAGE = ROOT / "megatron_dynbatch"
FILES = PACKAGE / "rollouts" / "files.py"

# What is no state of a run: pages and files that a command was asked for, a compiler's cache, the
# report and logs (a line more or less changes nothing), and the failpoints' own trace.
NO_STATE = (
    "cli/", "cpu/", "reduce/build.py", "report/step_report.py", "report/identity.py", "quiet.py",
    "failpoints.py",
)  # fmt: skip

WRITING_FUNCTIONS = {
    *(f"os.{name}" for name in (
        "rename", "replace", "renames", "remove", "unlink", "rmdir", "removedirs", "truncate",
        "ftruncate", "write", "pwrite", "writev", "mkdir", "makedirs", "link", "symlink", "mknod",
        "sendfile", "copy_file_range",
    )),
    *(f"shutil.{name}" for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree")),
}  # fmt: skip
WRITING_METHODS = {
    "unlink", "rename", "rmdir", "mkdir", "touch", "write_text", "write_bytes", "symlink_to",
    "hardlink_to",
}  # fmt: skip
WRITERS_OF_FILES = (
    "new_file", "write_text", "create_text", "replace_text", "make_folder", "move", "remove_file",
    "remove_folder", "append", "cut",
)  # fmt: skip


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def writes(call: ast.Call) -> bool:
    """Whether a call can change the file system by itself."""
    function = ast.unparse(call.func)
    if function in WRITING_FUNCTIONS:
        return True
    name = function.rpartition(".")[2]
    if isinstance(call.func, ast.Attribute) and name in WRITING_METHODS:
        return True
    if name == "replace":  # of a path, not of a string
        return len(call.args) == 1 and not call.keywords
    constants = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant)]
    if function == "os.open":
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT"))
    if name == "open":
        modes = [value for value in constants if isinstance(value, str)]
        return any(set(mode) & set("wax+") and len(mode) <= 3 for mode in modes)
    return False


def sources() -> dict[str, Path]:
    return {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_durable_write_goes_through_one_file() -> None:
    found = {
        f"{name}:{call.lineno} {ast.unparse(call)}"
        for name, path in sources().items()
        if path != FILES and not name.startswith(NO_STATE)
        for call in calls(path)
        if writes(call)
    }
    # The ledger's descriptor is opened where it is held; its bytes go through `files.append`.
    elsewhere = [line for line in found if not line.startswith("steps/ledger_file.py")]
    assert elsewhere == [] and all(" os.open(" in line for line in found)


def test_every_write_names_a_failpoint_and_every_failpoint_is_passed() -> None:
    named = set()
    for name, path in sources().items():
        if path == FILES or name.startswith(NO_STATE):
            continue
        for call in calls(path):
            if isinstance(call.func, ast.Name) and call.func.id in WRITERS_OF_FILES:
                what = next(a for a in call.args[1:] if getattr(a, "value", None) in WRITES)
                assert isinstance(what, ast.Constant), f"{name}:{call.lineno}"
                named.add(what.value)
                if call.func.id in ("create_text", "replace_text"):
                    named.add(f"{what.value}-move")
    assert named == set(WRITES)


NEVER_IN_THE_WAY = ("slot-removal", "deletion", "leftover")

# Of a directory there is one; everything else is written again and again.
ONCE = ("directory", "marker", "marker-move", "notes", "end")
WRITER = [name for name in WRITES if not name.startswith(("ledger", "tracker"))]
ALL = [f"{name}:{at}:1" for name in WRITER for at in WRITES[name]]
# After the content of one thing comes the next; only an entry can be seen by others then.
FIRST = [place for place in ALL if WRITES[place.partition(":")[0]] == ENTRY or "after" not in place]
LATER = [f"{name}:{at}:2" for name in WRITER if name not in ONCE for at in WRITES[name]]
FULL = [place for place in FIRST if "before" not in place]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: hundreds of writes wait for their disk otherwise."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


def assert_whole(path: Path) -> int:
    """Each batch is there as it was written, or is not there; returns how many are there."""
    reader = RolloutDirectory(path, open_timeout=0.0)
    assert reader.published("progress") in (None, *PROGRESS)
    states = []
    for batch in range(NUM_BATCHES + 1):
        try:
            states.append(reader.state(batch))
        except RolloutDataError as error:
            assert "was deleted" in str(error)
            states.append("deleted")
        if states[-1] == "present":
            assert reader.plan_json(batch) == f"plan {batch}"
            assert_same_samples(reader.read(batch, range(5)), samples(batch))
    if reader.num_batches_if_finished() is None:
        return states.index("absent") if "absent" in states else len(states)
    assert reader.num_batches_if_finished() == NUM_BATCHES
    return NUM_BATCHES


def check_writers(folder: Path, where: list[str], action: str) -> None:
    """A writer stopped at each of these places leaves a whole directory, and is done again."""
    where = [f"{place}:{action}" for place in where]
    for place in where:  # each writer has a predecessor that died
        (folder / place / hidden_name()).mkdir(parents=True)
        (folder / place / hidden_name()).write_text("a note")
    codes = stopped(f"{live.__module__}:live", folder, where)
    wanted = -signal.SIGKILL if action == "kill" else errno.ENOSPC
    for place, code in codes.items():
        path = folder / place
        is_met = action == "kill" or not place.startswith(NEVER_IN_THE_WAY)
        assert code == (wanted if is_met else 0), place
        assert_whole(path)
        live(path)  # the writer is started again, and says all once more
        assert not list(path.rglob(".tmp-*")), place
        names = [sorted(file.name for file in slot.iterdir()) for slot in path.glob("batch-*")]
        assert names.count(["DELETED", "key"]) == 2, place
        assert assert_whole(path) == NUM_BATCHES, place
        reader = RolloutDirectory(path)
        assert reader.published("progress") == PROGRESS[-1]
        assert [reader.write(samples(b), key=key) for b, key in enumerate(KEYS)] == [0, 1, 2]


@pytest.mark.parametrize(("where", "action"), [(FIRST, "kill"), (FULL, "enospc")])
def test_a_writer_stopped_anywhere(folder: Path, where: list[str], action: str) -> None:
    check_writers(folder, where, action)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("where", "action"), [(ALL + LATER, "kill"), (ALL + LATER, "enospc")])
def test_a_writer_stopped_later(folder: Path, where: list[str], action: str) -> None:
    check_writers(folder, where, action)


def test_the_variable_arms_one_place_once(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = [
        sys.executable,
        "-c",
        "import sys, pathlib; from tests.reliability.writer_kills import live; "
        "live(pathlib.Path(sys.argv[1]))",
        str(tmp_path / "r"),
    ]
    environment = {**os.environ, VARIABLE: "index:middle:2:kill:1", DONE_VARIABLE: str(done)}

    def run(rank: str) -> int:
        env = {**environment, "RANK": rank}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True).returncode

    assert run("1") == -signal.SIGKILL
    assert done.exists()
    assert assert_whole(tmp_path / "r") == 1
    assert run("1") == 0  # it has acted
    done.unlink()
    environment[VARIABLE] = "deletion:before:1:kill:1"
    assert run("0") == 0  # another rank


def test_an_armed_place_can_ask_the_process_to_end(folder: Path) -> None:
    codes = stopped(f"{live.__module__}:live", folder, ["batch:before:2:term"])
    assert codes == {"batch:before:2:term": -signal.SIGTERM}
    assert assert_whole(folder / "batch:before:2:term") == 1


def test_unarmed_places_do_nothing() -> None:
    assert failpoints.reached is failpoints.torn
    assert failpoints.reached("part", "before") is None


@pytest.mark.parametrize(
    "text", ["part", "parts:before:1:kill", "batch:middle:1:kill", "part:before:1:die", "a:b:c:d"]
)
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE):
        Failpoint.parse(text)


def test_a_torn_write_leaves_half(tmp_path: Path) -> None:
    failpoint = Failpoint.parse("ledger:middle:2:enospc")
    with open(tmp_path / "file", "wb") as file:
        for _ in range(2):
            start = file.tell()
            file.write(b"12345678")
            file.flush()
            if start:
                with pytest.raises(OSError, match="No space left"):
                    failpoint.torn("ledger", file.fileno(), start)
            else:
                failpoint.torn("ledger", file.fileno(), start)
    assert (tmp_path / "file").read_bytes() == b"123456781234"
