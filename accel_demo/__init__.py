"""Distributed data-parallel training with Accelerate, taken apart piece by piece."""

__version__ = "0.1.0"
