"""A model answer to exercise 05."""


def all_gather(chunks, wire):
    """Fill all `chunks` with complete sums in place. They are 1-d, and their lengths may differ."""
    right = (wire.rank + 1) % wire.world_size
    left = (wire.rank - 1) % wire.world_size
    for step in range(wire.world_size - 1):
        outgoing = (wire.rank - step) % wire.world_size
        incoming = (outgoing - 1) % wire.world_size
        wire.exchange(chunks[outgoing], right, chunks[incoming], left)
