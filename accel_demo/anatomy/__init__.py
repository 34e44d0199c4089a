"""Parts of PyTorch and Accelerate rebuilt by hand, each compared with the original."""
