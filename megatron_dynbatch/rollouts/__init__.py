"""The data contract between whoever makes rollouts and training, and its storage.

Needs NumPy and pyarrow only. In a loop of reinforcement learning:

    directory = RolloutDirectory("runs/rollouts")
    directory.write([Sample(tokens, response_length=5, rollout_id=0, advantage=1.0), ...])
    directory.finish()
"""

from megatron_dynbatch.rollouts.batch import RolloutBatch
from megatron_dynbatch.rollouts.collector import RolloutCollector
from megatron_dynbatch.rollouts.directory import RolloutDirectory
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.jsonl import read_jsonl
from megatron_dynbatch.rollouts.queue import RolloutQueue
from megatron_dynbatch.rollouts.sample import OPTIONAL_FIELDS, PER_TOKEN_FIELDS, Sample
from megatron_dynbatch.rollouts.source import BatchState, RolloutSource, RolloutTransport
from megatron_dynbatch.rollouts.transports import open_transport
from megatron_dynbatch.rollouts.validation import validate_samples

__all__ = [
    "OPTIONAL_FIELDS",
    "PER_TOKEN_FIELDS",
    "BatchState",
    "RolloutBatch",
    "RolloutCollector",
    "RolloutDataError",
    "RolloutDirectory",
    "RolloutQueue",
    "RolloutSource",
    "RolloutTransport",
    "Sample",
    "SampleIndex",
    "open_transport",
    "read_jsonl",
    "validate_samples",
]
