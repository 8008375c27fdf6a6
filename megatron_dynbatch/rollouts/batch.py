"""A batch of rollouts: validated samples and their index."""

from collections.abc import Iterable, Iterator
from itertools import islice

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.limits import MAX_BATCH_ROWS
from megatron_dynbatch.rollouts.sample import Sample
from megatron_dynbatch.rollouts.validation import validate_samples


class RolloutBatch:
    """The samples of one batch, in row order, validated once.

    Attributes:
        samples: The S samples.
        index: Their lengths and ids, row for row.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        *,
        vocab_size: int | None = None,
        where: str = "samples",
    ) -> None:
        """Validates the samples.

        Args:
            samples: At least one sample.
            vocab_size: Token ids must be below it, if given.
            where: Named at the start of an error.

        Raises:
            RolloutDataError: See `validate_samples`; or there are more than `MAX_BATCH_ROWS`.
        """
        try:
            self.samples = tuple(islice(samples, MAX_BATCH_ROWS + 1))
        except TypeError as error:
            raise RolloutDataError(
                f"{where}: a {type(samples).__name__} was given; give a list of samples"
            ) from error
        if len(self.samples) > MAX_BATCH_ROWS:
            raise RolloutDataError(
                f"{where}: more than {MAX_BATCH_ROWS} samples; divide them into several batches"
            )
        validate_samples(self.samples, vocab_size=vocab_size, where=where)
        self.index = SampleIndex.from_samples(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> Sample:
        return self.samples[row]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)
