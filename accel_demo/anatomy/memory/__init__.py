"""Bytes that a training step holds on each device, counted on live tensors."""
