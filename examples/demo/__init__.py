"""The demo: real Megatron training with steps of different sizes, on two CPU processes."""
