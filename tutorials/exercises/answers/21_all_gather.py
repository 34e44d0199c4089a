"""A model answer to exercise 21."""


def all_gather(chunks, wire):
    """Write the complete sums into `chunks`, which are 1-d tensors. Their lengths may differ."""
    right = (wire.rank + 1) % wire.world_size
    left = (wire.rank - 1) % wire.world_size
    for step in range(wire.world_size - 1):
        outgoing = (wire.rank - step) % wire.world_size
        incoming = (outgoing - 1) % wire.world_size
        wire.exchange(chunks[outgoing], right, chunks[incoming], left)
