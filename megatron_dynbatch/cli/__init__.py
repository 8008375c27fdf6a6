"""The ``megatron-dynbatch`` command."""
