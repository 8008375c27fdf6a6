"""A micro-batch as tensors: THD packing, padding, and the context-parallel zigzag layout."""
