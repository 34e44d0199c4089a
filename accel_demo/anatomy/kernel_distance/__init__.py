"""Several methods to compute the distance between all kernels of a layer."""
