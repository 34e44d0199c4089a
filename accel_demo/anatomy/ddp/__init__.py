"""DistributedDataParallel by hand, compared with the library bit for bit."""
