"""What every test starts from: one thread, fixed seeds, and property tests that can be repeated."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

# Before torch or NumPy are loaded; ranks and subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

SEED = 1234

# Whether an example takes long says nothing on a busy machine.
settings.register_profile("tests", deadline=None)
# Of the mutation gate: the same examples each time, and the first that fails is enough.
settings.register_profile(
    "mutants", settings.get_profile("tests"), phases=[Phase.explicit, Phase.generate],
    derandomize=True, database=None,
)  # fmt: skip
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The global generators stand alike at the beginning of every test, in whatever order."""
    random.seed(SEED)
    np.random.seed(SEED)
    # Tests of NumPy alone do not wait for torch.
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(SEED)
