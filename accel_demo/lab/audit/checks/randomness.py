"""Do all ranks draw the same random numbers for different samples?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import NOTE, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank

PAGE = "34_kill_and_resume"
LEAST = 2  # equal draws of all ranks, and at least half of all draws
SENTENCES = {
    "forward": "Between reading a batch and its backward pass, all ranks draw the same random "
    "numbers from {generators}, although their samples differ. Dropout masks and noise, for "
    "example, should differ, too.",
    "data set": "In the data set, all ranks draw the same random numbers from {generators} for "
    "different samples, so their augmentation is equal.",
    "worker": "The loader workers of all ranks have equal seeds and draw the same random numbers "
    "from {generators} for different samples, so their augmentation is equal.",
}
CURE = (
    "To let them differ, call {calls} after the model was created. Samplers of your own then need "
    "a generator of their own, because all ranks must shuffle alike."
)
CURE_OF_ACCELERATE = (
    'To let them differ, call set_seed(seed, device_specific=True), without "torch" in rng_types. '
    "With use_seedable_sampler=True, also set data_seed, because all ranks must shuffle alike."
)
CURE_OF_WORKERS = (
    " If the DataLoader has a generator, seed that one with seed + rank instead, and replace "
    "shuffle=True with sampler=RandomSampler(dataset)."
)
SEEDS = {
    "torch": "torch.manual_seed(seed + rank)",
    "random": "random.seed(seed + rank)",
    "numpy.random": "numpy.random.seed(seed + rank)",
}


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_data_parallel()
    if not all(rank.of("draws") or rank.draws_of_workers for rank in evidence.ranks):
        raise NotChecked("not every rank has read batches, or has called the wrapped model")
    if _have_equal_samples(evidence.ranks):
        return  # reported by `samples`, if it is not meant
    for where, draws_of in {
        "forward": _in_forwards,
        "data set": _in_data_sets,
        "worker": _in_workers,
    }.items():
        equal = _equal_draws([draws_of(rank) for rank in evidence.ranks])
        if not any(equal):
            continue
        names = sorted({name for name, *_ in equal[0]}, key=list(SEEDS).index)
        if any(evidence.counts("accelerator")):
            cure = CURE_OF_ACCELERATE
        else:
            seeds = names if where != "worker" else ["torch"]  # the workers' seeds come from torch
            cure = CURE.format(calls=_listed([SEEDS[name] for name in seeds]))
        finding = Finding(
            NOTE,
            "randomness",
            SENTENCES[where].format(generators=_listed(names)),
            cure + (CURE_OF_WORKERS if where == "worker" else ""),
            PAGE,
        )
        for rank, draws in zip(evidence.ranks, equal, strict=True):
            for *_, line in draws:
                finding.add_place(line, rank.number)
        yield finding


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _have_equal_samples(ranks: list[Rank]) -> bool:
    """Return True if two ranks have trained on equal samples, or if the samples are unknown."""
    contents = set()
    for rank in ranks:
        batches = [each for passes in rank.training_passes.values() for each in sum(passes, [])]
        samples = [event.get("samples") for event in batches or rank.of("backward")]
        contents.add(str([each for each in samples if each]))
    return len(contents) < len(ranks)


def _equal_draws(draws: list[list[tuple]]) -> list[list[tuple]]:
    """Return the draws of each rank that all ranks have made, by generators that draw mostly so.

    A draw is (generator, state before, state after, line). Equal states mean equal numbers.
    """
    common = set.intersection(*({draw[:3] for draw in each} for each in draws))
    equal = [[draw for draw in each if draw[:3] in common] for each in draws]
    names = [name for name in SEEDS if all(map(_are_most, equal, draws, [name] * len(draws)))]
    return [[draw for draw in each if draw[0] in names] for each in equal]


def _are_most(equal: list[tuple], draws: list[tuple], name: str) -> bool:
    same, whole = (sum(draw[0] == name for draw in each) for each in (equal, draws))
    return same >= LEAST and 2 * same >= whole


def _in_forwards(rank: Rank) -> list[tuple]:
    events = [event for event in rank.of("draws") if event["where"] == "forward"]
    return [(*draw[:3], event["line"]) for event in events for draw in event["draws"]]


def _in_data_sets(rank: Rank) -> list[tuple]:
    """Return the draws for batches that are used for training."""
    lines = {(each["loader"], each["number"]): each["line"] for each in rank.begun_for_training}
    draws, waiting = [], []
    for event in rank.of("draws", "batch"):
        if event["kind"] == "batch":
            if (place := (event["loader"], event["number"])) in lines:
                draws += [(*draw, lines[place]) for each in waiting for draw in _per_sample(each)]
            waiting = []
        elif event["where"] == "data set":
            waiting.append(event)
    return draws


def _in_workers(rank: Rank) -> list[tuple]:
    lines = {each["seed_of_workers"]: each["line"] for each in rank.begun_for_training}
    events = [event for event in rank.draws_of_workers if event["seed"] in lines]
    return [(*draw, lines[event["seed"]]) for event in events for draw in _per_sample(event)]


def _per_sample(event: dict) -> list[tuple]:
    """Return the draws of at least one number per sample. Fewer may choose, say, a size for all."""
    return [tuple(draw[:3]) for draw in event["draws"] if draw[3] >= event["samples"]]
