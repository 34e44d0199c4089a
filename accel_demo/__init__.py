"""Distributed data-parallel training, written once with Accelerate and taken apart."""
