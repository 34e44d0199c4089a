"""The distance between all kernels of a layer, by several methods."""
