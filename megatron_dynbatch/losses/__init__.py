"""Losses as functions of model output and micro-batch, and what is handed to Megatron."""
