"""Do all ranks read the same samples?"""

import math
from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, WARNING, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank
from accel_demo.lab.observed.streams import differing_streams, equal_workers

PAGE = "30_who_saw_which_sample"
PAGE_OF_STREAMS = "36_streams"
LEAST = 4  # samples; fewer may be equal by chance
LEAST_DISTINCT = 0.9  # of the samples
MOST_SHARED = 0.5  # of the samples of a pass. Padding repeats a few samples.


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    ranks = [rank for rank in evidence.ranks if rank.training_passes]
    of_streams = list(_check_streams(evidence.ranks))
    yield from of_streams
    if len(ranks) < 2:
        if not of_streams:  # they explain equal inputs
            yield from _check_inputs(evidence)
        return
    if not any(any(_contents(passes[0])) for passes in ranks[0].training_passes.values()):
        raise NotChecked("the batches contain no tensors")
    for loader in ranks[0].training_passes:
        others = [rank for rank in ranks[1:] if loader in rank.training_passes]
        same = [rank for rank in others if _share(ranks[0], rank, loader) > MOST_SHARED]
        whole = [
            rank
            for rank in others
            if _read_all(evidence, ranks[0], loader)
            and _read_all(evidence, rank, loader)
            and _have_equal_data(ranks[0], rank, loader)
        ]
        if not same and not whole:
            continue
        about = ranks[0].pass_of(loader)
        is_stream = about["samples"] is None or about["sampler"] == "_InfiniteConstantSampler"
        cure = (
            "Let each rank yield its own part of the stream: every world_size-th sample, starting "
            "with its rank (and likewise for each loader worker)."
            if is_stream
            else "Pass the loader to accelerator.prepare, or give it a DistributedSampler."
        )
        finding = Finding(
            ERROR,
            "samples",
            f"The ranks read the same samples: rank {ranks[0].number} also read "
            f"{_share(ranks[0], same[0], loader):.0%} of what rank {same[0].number} read."
            if same
            else f"Each rank reads all {about['samples']} samples, in an order of its own.",
            cure,
            PAGE_OF_STREAMS if is_stream else PAGE,
        )
        for rank in [ranks[0], *(same or whole)]:
            finding.add_place(rank.pass_of(loader)["line"], rank.number)
        yield finding


def _check_streams(ranks: list[Rank]) -> Iterator[Finding]:
    """Find streams that loader workers repeat, and streams that are divided twice."""
    for loader, rank in equal_workers(ranks).items():
        yield Finding(
            ERROR,
            "samples",
            f"The loader workers of rank {rank.number} read the same samples in the same order.",
            "Let each worker yield its own part of the stream: see get_worker_info.",
            PAGE_OF_STREAMS,
        ).add_place(rank.pass_of(loader)["line"], rank.number)
    for loader, (first, second) in differing_streams(ranks).items():
        finding = Finding(
            WARNING,
            "samples",
            f"Accelerate divides this stream between the ranks, but rank {second.number} yields "
            f"other samples than rank {first.number}: most of what it leaves out is never read.",
            "Let the stream yield the same samples on all ranks, or don't prepare its loader.",
            PAGE_OF_STREAMS,
        )
        for rank in (first, second):
            finding.add_place(rank.pass_of(loader)["line"], rank.number)
        yield finding


def _read_all(evidence: Evidence, rank: Rank, loader: int) -> bool:
    """Return True if a pass of this rank reads all samples of its dataset, not only its share."""
    about = rank.pass_of(loader)
    samples, batches, size = about["samples"], about["length"], about["batch_size"]
    if None in (samples, batches, size):
        return False
    batches_of_share = math.ceil(samples / (size * evidence.world))
    return batches * size > samples - size and batches > batches_of_share


def _have_equal_data(first: Rank, second: Rank, loader: int) -> bool:
    identities = [rank.pass_of(loader)["identity"] for rank in (first, second)]
    return identities[0] == identities[1] is not None


def _share(first: Rank, second: Rank, loader: int) -> float:
    """Return how much of what `second` read in its first pass, `first` also read."""
    own, other = (_contents(rank.training_passes[loader][0]) for rank in (first, second))
    share = _overlap(own[0], other[0]) if own and other else 0.0
    return max(share, _share_of_indices(first, second, loader))


def _overlap(own: list[int], other: list[int]) -> float:
    """Return which part of the samples `other` is in `own`, too.

    If the data repeats itself, equal samples prove nothing, unless they come in the same order.
    """
    if len(other) < LEAST or len(set(other)) == 1:
        return 0.0
    if min(len(set(each)) / len(each) for each in (own, other)) < LEAST_DISTINCT:
        return sum(map(int.__eq__, own, other)) / len(other)
    theirs = set(own)
    return sum(sample in theirs for sample in other) / len(other)


def _contents(batches: list[dict]) -> list[list[int]]:
    """Return the checksums of all samples, a list per tensor of the batch; the largest first."""
    leaves: list[list[int]] = []
    for batch in batches:
        for number, sums in enumerate(batch.get("samples", [])):
            if number == len(leaves):
                leaves.append([])
            leaves[number] += sums
    return sorted(leaves, key=lambda sums: -len(set(sums)))


def _share_of_indices(first: Rank, second: Rank, loader: int) -> float:
    """Return how many of the indices that `second` read in its first pass `first` also read.

    In a draw with replacement, only those in the same places count.
    """
    own, other = (rank.training_passes[loader][0] for rank in (first, second))
    common = equal_samples(own, other, _have_equal_data(first, second, loader))
    orders = [indices_of(own), indices_of(other)]
    if not common:
        return 0.0
    if second.pass_of(loader)["replacement"]:
        pairs = zip(*orders, strict=False)
        return sum(one == two and one in common for one, two in pairs) / len(orders[1])
    return len(common) / len(set(orders[1]))


def indices_of(batches: list[dict]) -> list[int]:
    """Return the indices of the samples in their order, as far as they are recorded."""
    return [index for batch in batches for index in batch.get("indices") or []]


def equal_samples(own: list[dict], other: list[dict], have_equal_data: bool) -> set[int]:
    """Return the indices in the batches of two ranks, if the equal ones also have equal labels.

    Random augmentation changes the images, but not the labels. Equal indices alone prove nothing:
    each rank may have a dataset of its own. Nor do few different labels, unless the datasets are
    known to be equal.
    """
    labels = []
    for batches in (own, other):
        known: dict[int, list[int]] = {}
        for batch in batches:
            columns = batch.get("samples", [])
            for place, index in enumerate(batch.get("indices") or []):
                known[index] = [sums[place] for sums in columns if len(sums) > place]
        labels.append(known)
    common = labels[0].keys() & labels[1].keys()
    if len(common) < LEAST:
        return set()
    columns = min(len(labels[0][index]) for index in common)
    for column in range(columns):
        pairs = [(labels[0][index][column], labels[1][index][column]) for index in common]
        distinct = len({pair[0] for pair in pairs})
        is_evident = distinct > 1 if have_equal_data else distinct > LEAST_DISTINCT * len(pairs)
        if is_evident and all(one == two for one, two in pairs):
            return common
    return set()


def _check_inputs(evidence: Evidence) -> Iterator[Finding]:
    """Without a loader, compare what the wrapped models received, or the gradients of each rank."""
    inputs, losses, gradients = {}, {}, {}
    for rank in evidence.ranks:
        backwards = rank.of("backward")
        known = [(tuple(map(tuple, each["samples"])), each["loss"]) for each in backwards]
        enough = [each for each in known if each[0] and len(each[0][0]) >= LEAST]
        inputs[rank.number] = [samples for samples, _ in enough]
        losses[rank.number] = [loss for _, loss in enough]
        gradients[rank.number] = [each["gradients"] for each in backwards if each["gradients"]]
    evident = inputs if all(inputs.values()) else gradients
    first, *others = evident
    if not others or min(map(len, evident.values())) < LEAST:
        raise NotChecked("no step has used gradients from the batches of a data loader")
    same = [rank for rank in others if evident[rank] == evident[first]]
    if same and evident is inputs:  # each rank may compute the loss of its own nodes of a graph
        same = [rank for rank in same if not _differ(losses[rank], losses[first])]
        if not same:
            raise NotChecked("the models received equal inputs, but their losses differ")
    if same:
        finding = Finding(
            ERROR,
            "samples",
            "All ranks train on the same samples: "
            + (
                "their models received equal inputs, and their losses are equal."
                if evident is inputs
                else "their gradients are equal before they are averaged."
            ),
            "Let each rank draw or read its own samples, for example by a seed that depends on the "
            "rank.",
            PAGE,
        )
        for rank in evidence.ranks:
            if rank.number in (first, *same):
                finding.add_place(rank.of("backward")[0]["line"], rank.number)
        yield finding


def _differ(own: list[int | None], other: list[int | None]) -> bool:
    """Return True if losses differ. Those of later backward passes are unknown."""
    return any(None not in pair and len(set(pair)) > 1 for pair in zip(own, other, strict=True))
