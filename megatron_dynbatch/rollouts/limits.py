"""How much one sample or one batch may be: beyond it, sizes are taken for damage and not believed.

Memory is taken by what an index says, so what it says must have a bound.
"""

MAX_SAMPLE_TOKENS = 1 << 24
"""Tokens of a sample: 16 777 216."""

MAX_BATCH_ROWS = 1 << 19
"""Samples of a batch: 524 288."""

MAX_COLUMNS = 1 << 10
"""Optional columns of a batch: fields, arrays and blobs."""

MAX_LINE_BYTES = 1 << 28
"""Bytes of a line of JSON lines."""
