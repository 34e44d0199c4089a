"""The collectives of torch.distributed, written with send and receive alone."""
