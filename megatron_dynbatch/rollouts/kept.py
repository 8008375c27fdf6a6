"""Which batches of a transport retention has left."""

from megatron_dynbatch.rollouts.errors import BatchDeleted
from megatron_dynbatch.rollouts.source import RolloutSource


def is_deleted(source: RolloutSource, batch_id: int) -> bool:
    """Whether a batch was there and retention deleted it."""
    try:
        source.state(batch_id)
    except BatchDeleted:
        return True
    return False


def first_kept(source: RolloutSource) -> int:
    """The first batch that was not deleted, there or still to come."""
    batch_id = 0
    while is_deleted(source, batch_id):
        batch_id += 1
    return batch_id
