"""Programs that use megatron_dynbatch; they run as they stand, on a CPU too."""
