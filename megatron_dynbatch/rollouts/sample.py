"""One training sequence: prompt and response tokens, and what is known about each response token.

Invariants (asserted by the tests): the constructor fixes types and shapes' rank, so that a `Sample`
always holds NumPy arrays of the documented dtypes; whether the values make sense together is
`validate_samples`'s business, which can name the row.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.limits import MAX_SAMPLE_TOKENS
from megatron_dynbatch.wording import short

PER_TOKEN_FIELDS = (
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "values",
    "returns",
)
"""Optional float32 fields with one entry per response token."""

OPTIONAL_FIELDS = ("reward", "advantage", *PER_TOKEN_FIELDS)
"""Every field of its own that a sample may lack, ids apart."""

EXTRA_KINDS = ("token_arrays", "response_arrays", "blobs")
"""Fields that hold what only the user's code reads, by name."""

MAX_NAME_LENGTH = 100
"""Characters of a name of an array or blob."""


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Sample:
    """One training sequence of T tokens, the last R of which are the response.

    Fields with one entry per response token are in response coordinates: entry j belongs to token
    T−R+j and to its prediction, made at position T−R+j−1. NaN and infinities may stand where the
    loss mask is 0. Arrays are not to be modified.

    Attributes:
        tokens: int64 [T], prompt then response.
        loss_mask: uint8 [R], 1 where the token is trained on. Entry 0 must be 0 if R = T, because
            the first token of a sample without a prompt has no predictor.
        rollout_id: The rollout that emitted this sample, unique within a batch; samples that share
            it are siblings. None (or −1 when given): the sample is a rollout of its own.
        group_id: The prompt group of the rollout; None (or −1): the rollout is its own group.
        policy_version: How many batches the weights that sampled the rollout had been trained on;
            0: the initial weights. None (or −1): unknown.
        reward: Reward of the rollout.
        advantage: One float for the whole response, or float32 [R].
        log_probs: float32 [R], natural log-probabilities under the policy before the update (old
            policy), from the trainer.
        ref_log_probs: float32 [R], under the reference policy; −inf where it forbids the token.
        rollout_log_probs: float32 [R], as the sampler reported them.
        teacher_log_probs: float32 [R], under a teacher, for distillation.
        values: float32 [R], value estimates.
        returns: float32 [R], value targets.
        token_arrays: Name → array [T, …] of any numeric dtype: routed experts [T, layers, topk].
        response_arrays: Name → array [R, …] of any numeric dtype.
        blobs: Name → bytes: an encoded image, for example.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]
    rollout_id: int | None
    group_id: int | None
    policy_version: int | None
    reward: float | None
    advantage: float | NDArray[np.float32] | None
    log_probs: NDArray[np.float32] | None
    ref_log_probs: NDArray[np.float32] | None
    rollout_log_probs: NDArray[np.float32] | None
    teacher_log_probs: NDArray[np.float32] | None
    values: NDArray[np.float32] | None
    returns: NDArray[np.float32] | None
    token_arrays: Mapping[str, NDArray[Any]]
    response_arrays: Mapping[str, NDArray[Any]]
    blobs: Mapping[str, bytes]

    def __init__(
        self,
        tokens: ArrayLike,
        response_length: SupportsIndex | None = None,
        loss_mask: ArrayLike | None = None,
        *,
        rollout_id: SupportsIndex | None = None,
        group_id: SupportsIndex | None = None,
        policy_version: SupportsIndex | None = None,
        reward: SupportsFloat | None = None,
        advantage: ArrayLike | None = None,
        log_probs: ArrayLike | None = None,
        ref_log_probs: ArrayLike | None = None,
        rollout_log_probs: ArrayLike | None = None,
        teacher_log_probs: ArrayLike | None = None,
        values: ArrayLike | None = None,
        returns: ArrayLike | None = None,
        token_arrays: Mapping[str, ArrayLike] | None = None,
        response_arrays: Mapping[str, ArrayLike] | None = None,
        blobs: Mapping[str, bytes] | None = None,
    ) -> None:
        """Makes a sample from lists, arrays or CPU tensors.

        Args:
            tokens: Token ids [T].
            response_length: R. Without `loss_mask`, all R response tokens are trained on.
            loss_mask: 0/1 [R]; give this, `response_length`, or both if they agree.
            rollout_id: See the attributes; so for the other arguments.

        Raises:
            RolloutDataError: A field has the wrong type or number of dimensions, or neither
                `response_length` nor `loss_mask` is given, or they disagree, or the sample is
                longer than `MAX_SAMPLE_TOKENS`.
        """
        mask = _loss_mask(response_length, loss_mask)
        per_token = (
            log_probs, ref_log_probs, rollout_log_probs, teacher_log_probs, values, returns,
        )  # fmt: skip
        fields: dict[str, object] = {
            "tokens": _tokens(tokens),
            "loss_mask": mask,
            "rollout_id": _identifier("rollout_id", rollout_id),
            "group_id": _identifier("group_id", group_id),
            "policy_version": _identifier("policy_version", policy_version),
            "reward": None if reward is None else _scalar("reward", reward),
            "advantage": _scalar_or_per_token("advantage", advantage),
            **{
                name: None if value is None else _per_token(name, value)
                for name, value in zip(PER_TOKEN_FIELDS, per_token, strict=True)
            },
            "token_arrays": _arrays("token_arrays", token_arrays),
            "response_arrays": _arrays("response_arrays", response_arrays),
            "blobs": _blobs(blobs),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # the way around `frozen` while constructing

    @property
    def total_length(self) -> int:
        """T, prompt and response tokens."""
        return len(self.tokens)

    @property
    def response_length(self) -> int:
        """R, response tokens, trained on or not."""
        return len(self.loss_mask)

    @property
    def mask_sum(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))


def _as_array(name: str, value: object, wanted: str) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise RolloutDataError(f"{name}: {error}; give {wanted}") from error


def _array(name: str, value: object, kinds: str, wanted: str) -> NDArray[Any]:
    array = _as_array(name, value, wanted)
    if array.size > MAX_SAMPLE_TOKENS:
        raise RolloutDataError(
            f"{name} has {array.size} entries; a sample has at most {MAX_SAMPLE_TOKENS} tokens"
        )
    if array.size == 0 and array.ndim == 1:
        return array
    if array.dtype.kind not in kinds:
        raise RolloutDataError(f"{name} holds {_kind_of(array)}; give {wanted}")
    if array.ndim != 1:
        raise RolloutDataError(f"{name} has {array.ndim} dimensions, not 1; give {wanted}")
    return array


def _kind_of(array: NDArray[Any]) -> str:
    if array.dtype.kind == "O":
        return "values that are not all (64-bit) numbers"
    return f"{array.dtype} values"


def _tokens(value: object) -> NDArray[np.int64]:
    return _array("tokens", value, "iu", "integer token ids [T]").astype(np.int64)


def _loss_mask(response_length: SupportsIndex | None, value: ArrayLike | None) -> NDArray[np.uint8]:
    length = None if response_length is None else _integer("response_length", response_length)
    if value is None:
        if length is None:
            raise RolloutDataError("give response_length or loss_mask: neither is there")
        if length < 0:
            raise RolloutDataError(
                f"response_length is {length}; give the number of response tokens"
            )
        if length > MAX_SAMPLE_TOKENS:  # before a mask of that length takes memory
            raise RolloutDataError(
                f"response_length is {length}; a sample has at most {MAX_SAMPLE_TOKENS} tokens"
            )
        return np.ones(length, np.uint8)
    array = _array("loss_mask", value, "biuf", "0 or 1 per response token [R]")
    with np.errstate(invalid="ignore"):
        mask = array.astype(np.uint8)
    wrong = np.flatnonzero(mask != array)
    if wrong.size:
        raise RolloutDataError(f"loss_mask[{wrong[0]}] is {array[wrong[0]]}; it must be 0 or 1")
    if length is not None and length != len(mask):
        raise RolloutDataError(
            f"response_length is {length} but loss_mask has {len(mask)} entries; "
            "give one of them, or one entry per response token"
        )
    return mask


def _per_token(name: str, value: object) -> NDArray[np.float32]:
    array = _array(name, value, "biuf", "one number per response token [R]")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which validation reports
        return array.astype(np.float32)


def _scalar(name: str, value: object) -> float:
    array = _as_array(name, value, "one number")
    if array.ndim != 0 or array.dtype.kind not in "biuf":
        raise RolloutDataError(f"{name} is {short(value)}; give one number")
    return float(array)


def _scalar_or_per_token(name: str, value: object) -> float | NDArray[np.float32] | None:
    if value is None:
        return None
    is_scalar = isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0
    return _scalar(name, value) if is_scalar else _per_token(name, value)


def _arrays(kind: str, values: Mapping[str, ArrayLike] | None) -> dict[str, NDArray[Any]]:
    _check_names(kind, values)
    wanted = "numbers with one entry per token"
    given = (values or {}).items()
    arrays = {name: _as_array(f"{kind}[{name!r}]", value, wanted) for name, value in given}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise RolloutDataError(
                f"{kind}[{name!r}] has {array.ndim} dimensions and dtype {array.dtype}; "
                f"give {wanted}"
            )
    return arrays


def _check_names(kind: str, values: Mapping[str, object] | None) -> None:
    if values is not None and not isinstance(values, Mapping):
        raise RolloutDataError(f"{kind} is {short(values)}; give a mapping of names")
    for name in values or {}:
        # Names become names of columns.
        is_name = isinstance(name, str) and name.isidentifier() and len(name) <= MAX_NAME_LENGTH
        if not is_name or name in Sample.__slots__:
            raise RolloutDataError(
                f"{kind}[{short(name)}]: the name must be a Python identifier of at most "
                f"{MAX_NAME_LENGTH} characters and no field of Sample"
            )


def _blobs(values: Mapping[str, bytes] | None) -> dict[str, bytes]:
    _check_names("blobs", values)
    for name, value in (values or {}).items():
        if not isinstance(value, bytes):
            raise RolloutDataError(f"blobs[{name!r}] is a {type(value).__name__}; give bytes")
    return dict(values or {})


def _integer(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise RolloutDataError(f"{name} is {short(value)}; give an integer") from error
    if not -(2**63) <= number < 2**63:
        raise RolloutDataError(f"{name} is {short(number)}; it must fit in 64 bits")
    return number


def _identifier(name: str, value: SupportsIndex | None) -> int | None:
    number = -1 if value is None else _integer(name, value)
    return None if number == -1 else number
