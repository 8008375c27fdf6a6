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

# Of the mutation gate: the first failing example is enough.
settings.register_profile("no-shrinking", phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The global generators stand alike at the beginning of every test, in whatever order."""
    random.seed(SEED)
    np.random.seed(SEED)
    # Tests of NumPy alone do not wait for torch.
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(SEED)
