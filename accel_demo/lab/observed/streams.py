"""Compare what the streams of different ranks and loader workers yield."""

from accel_demo.lab.observed.ranks import Rank, contents

LEAST = 4  # elements; fewer may be equal or different by chance
MOST_EQUAL = 0.5  # of the elements of two streams; more are the same stream
LEAST_DISTINCT = 0.9  # of the elements; fewer are equal by chance


def equal_workers(ranks: list[Rank]) -> dict[int, Rank]:
    """Map streams for training to the first rank whose loader workers read the same, in order.

    Two workers that draw the same samples in different orders may do so on purpose.
    """
    found: dict[int, Rank] = {}
    for rank in ranks:
        for loader, passes in rank.training_passes.items():
            read: dict[int, list[int]] = {}
            for batch in passes[0]:
                if batch.get("worker") is not None and not batch.get("indices"):
                    read.setdefault(batch["worker"], []).extend(contents(batch))
            own, *others = read.values() or [[]]
            if any(_are_equal(own, other) for other in others):
                found.setdefault(loader, rank)
    return found


def differing_streams(ranks: list[Rank]) -> dict[int, tuple[Rank, Rank]]:
    """Map loaders to two ranks whose streams differ, though Accelerate expects equal ones.

    A stream whose elements depend on random numbers, such as those of an augmentation, is left out:
    its elements differ although it is the same stream.
    """
    found = {}
    for loader, shard in _shards(ranks[0]).items():
        for other in ranks[1:]:
            own, their = _elements(ranks[0], shard), _elements(other, _shards(other).get(loader))
            pairs = [(own[worker], their[worker]) for worker in own.keys() & their.keys()]
            if pairs and all(_differ(*pair) for pair in pairs):
                found[loader] = ranks[0], other
                break
    return found


def _shards(rank: Rank) -> dict[int, int]:
    """Map loaders to the numbers of the `IterableDatasetShard` that they read."""
    begun = [each for each in rank.of("pass") if each.get("shard") is not None]
    return {each["loader"]: each["shard"] for each in begun}


def _elements(rank: Rank, shard: int | None) -> dict[int, list[int]]:
    """Return what each worker's stream has yielded first, without random streams."""
    elements: dict[int, list[int]] = {}
    for event in [*rank.of("stream"), *rank.streams_of_workers]:
        is_known = not event["is_random"] and None not in event["elements"]
        if shard is not None and event["shard"] == shard and is_known:
            elements.setdefault(event["worker"], event["elements"])
    return elements


def _are_equal(own: list[int], other: list[int]) -> bool:
    length = min(len(own), len(other))
    if length < LEAST or len(set(own[:length])) < LEAST_DISTINCT * length:
        return False
    return own[:length] == other[:length]


def _differ(own: list[int], other: list[int]) -> bool:
    """Return True if the beginnings of two streams, of equal length, have little in common."""
    length = min(len(own), len(other))
    common = set(own[:length]) & set(other[:length])
    return length >= LEAST and len(common) <= MOST_EQUAL * len(set(other[:length]))
