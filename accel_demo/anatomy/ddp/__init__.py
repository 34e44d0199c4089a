"""DistributedDataParallel rebuilt by hand, and compared with PyTorch's bit for bit."""
