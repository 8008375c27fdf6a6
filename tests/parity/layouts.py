"""The parallel layouts of the suite."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.rollouts import CAPACITY


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; `vpp` model chunks per pipeline rank, `ep` divides dp·cp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def name(self) -> str:
        """Like TP2xPP2."""
        dp = 1 if self.ep == self.dp else self.dp
        sizes = {"EP": self.ep, "TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp}
        sizes["DP"] = dp
        name = "x".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1) or "DP1"
        return name + ("+SP" if self.sequence_parallel else "")

    def flags(self) -> dict[str, object]:
        """Megatron's options; the token cap leaves a micro-batch as large as without CP."""
        flags: dict[str, object] = {"max-tokens-per-gpu": CAPACITY // self.cp}
        if self.tp > 1:
            flags["tensor-model-parallel-size"] = self.tp
        if self.sequence_parallel:
            flags["sequence-parallel"] = True
        if self.pp > 1:
            flags["pipeline-model-parallel-size"] = self.pp
        if self.vpp > 1:
            flags["num-virtual-stages-per-pipeline-rank"] = self.vpp
        if self.cp > 1:
            flags["context-parallel-size"] = self.cp
        if self.ep > 1:
            flags["expert-model-parallel-size"] = self.ep
        return flags


# Those of up to two processes, and one of each kind with four.
FAST = (Layout(dp=2), Layout(pp=2), Layout(pp=2, vpp=2), Layout(cp=2), Layout(tp=2))
# Marked slow.
SLOW = (
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2, cp=2),
    Layout(tp=2, cp=2, sequence_parallel=True),
)
# The rest of what four processes can hold; `make parity` runs these too.
REST = (
    Layout(dp=4),
    Layout(pp=4),
    Layout(cp=4),
    Layout(tp=4),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, sequence_parallel=True),
    Layout(tp=2, cp=2),
    Layout(tp=2, dp=2),
    Layout(pp=2, dp=2),
    Layout(cp=2, dp=2),
    Layout(pp=2, vpp=2, dp=2),
    Layout(pp=2, vpp=2, cp=2),
    Layout(tp=2, pp=2, vpp=2),
)
