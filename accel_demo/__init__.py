"""Distributed data-parallel training with Accelerate, taken apart piece by piece."""
