"""Compare the optimizer steps of a script in one process with those in several."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from accel_demo.lab.observed.ranks import Rank, batches_of, contents
from accel_demo.wording import counted

# Relative differences that the order of additions explains in the first step. Each further step
# may multiply them, because training amplifies rounding errors.
ROUNDING, LOW_PRECISION, AMPLIFICATION, MOST_ROUNDING = 1e-4, 0.05, 4.0, 0.05
# A tensor whose gradients are smaller than this part of all gradients is compared with that part:
# its values are the small differences of large numbers.
LEAST_PART = 1e-3
# Part of what the weights have moved. Adam divides by small numbers, so a few weights differ more.
MOVED = 0.2
START = 1e-6  # relative difference of weights at the start
PREPARED_SCHEDULER = (
    "A scheduler that Accelerate has prepared advances once per process: make its steps as many "
    "times more, or pass step_scheduler_with_optimizer=False"
)


@dataclass(frozen=True)
class ComparedStep:
    """One optimizer step of both runs. `losses` are sums over its backward passes."""

    step: int
    same_samples: bool | None  # None if it is unknown
    losses: tuple[float, float]  # in one process, and the mean over several
    gradients: float  # the largest difference of a tensor, relative to its size
    weights: float  # relative to how far they have moved since the start


@dataclass(frozen=True)
class Batches:
    """The samples of one step on one rank: checksums of their contents, and their indices.

    There are no indices in a stream.
    """

    contents: Counter
    indices: Counter


@dataclass
class StepsOfRun:
    """The steps of one run: for each step, its events by rank."""

    ranks: list[Rank]
    gradients: list[list[dict]] = field(init=False)
    updates: list[list[dict]] = field(init=False)
    samples: list[list[Batches | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = [rank.of("gradients") for rank in self.ranks]
        self.updates = [rank.of("updated") for rank in self.ranks]
        self.samples = [samples_of(rank) for rank in self.ranks]

    @property
    def steps(self) -> int:
        return min(map(len, [*self.gradients, *self.updates]))

    @property
    def first_samples(self) -> int:
        """Number of samples that all ranks read for the first step, or 0 if it is unknown."""
        first = [samples[0] for samples in self.samples]
        return 0 if None in first else sum(each.contents.total() for each in first if each)


def compare_step(
    one: StepsOfRun, several: StepsOfRun, step: int
) -> tuple[ComparedStep, tuple[str, str] | None]:
    """Compare one step. Returns the row of the table, and what differs first: its kind and text.

    The kinds, in the order of one step: "start" (the first weights), "samples", "loss scale",
    "loss", "gradient scale", "a layer" (its gradients), "settings" (of an optimizer, such as the
    learning rate), "weights" (after the step), "ranks" (weights differ between them), "buffers".
    """
    [here], there = [each[step] for each in one.gradients], [g[step] for g in several.gradients]
    names = here["names"]
    precision = LOW_PRECISION if here["low_precision"] else ROUNDING
    limit = min(MOST_ROUNDING, precision * AMPLIFICATION**step)
    found: list[tuple[str, str]] = []

    if step == 0:
        found += _start(here, there[0], names)
    same = _same_samples(one, several, step)
    if same is False:
        found.append(("samples", _which_samples(one, several, step)))
    losses = sum(here["losses"]), fmean(sum(rank["losses"]) for rank in there)
    scale = ratio(losses)
    if not (abs(scale - 1) <= limit or all(map(math.isnan, losses))):
        found.append(_loss(scale, losses, len(there), several))
    differences = tensor_differences(here["gradients"], there[0]["gradients"])
    worst = max(differences, key=differences.__getitem__, default=0)
    gradients = differences.get(worst, 0.0)
    if gradients > limit:
        found.append(_gradients(here, there[0], names[worst], gradients, len(there)))
    for number, rank in list(enumerate(there))[1:]:
        places = "on rank 0", f"on rank {number}"
        found += _settings(there[0]["settings"], rank["settings"], places)
    hint = f". {PREPARED_SCHEDULER}" if several.ranks[0].of("accelerator") else ""
    places = "in one process", "in several"
    found += _settings(here["settings"], there[0]["settings"], places, hint)
    moved = _moved(one, several, step)
    if moved > MOVED:
        found.append(("weights", f"the weights after it differ by {moved:.0%} of their change"))
    found += _ranks([updates[step] for updates in several.updates], names)
    found += _buffers(one, several, step, limit)
    row = ComparedStep(step + 1, same, losses, gradients, moved)
    return row, found[0] if found else None


def ratio(pair: tuple[float, float]) -> float:
    first, second = pair
    return second / first if first else (1.0 if second == first else math.inf)


def _start(here: dict, there: dict, names: list[str]) -> list[tuple[str, str]]:
    if len(here["weights"]) != len(there["weights"]):
        return [("start", "the runs train different numbers of parameters")]
    differences = tensor_differences(here["weights"], there["weights"])
    worst = max(differences, key=differences.__getitem__, default=0)
    if differences.get(worst, 0.0) <= START:
        return []
    text = f"the runs do not start with the same weights: {names[worst]} differs. "
    return [("start", text + "Does the script set a seed of its own from something that changes?")]


def _same_samples(one: StepsOfRun, several: StepsOfRun, step: int) -> bool | None:
    here, there = one.samples[0][step], [samples[step] for samples in several.samples]
    if here is None or None in there:
        return None
    return here.contents == _all(each.contents for each in there if each)


def _all(counters: Iterable[Counter]) -> Counter:
    return sum(counters, Counter())


def _which_samples(one: StepsOfRun, several: StepsOfRun, step: int) -> str:
    known, ranks = one.samples[0][step], [samples[step] for samples in several.samples]
    indices = _all(each.indices for each in ranks if each)
    if known and indices and known.indices == indices:
        return (
            "the samples have the same numbers, but different contents: the data differ between "
            "the ranks, or they are augmented with random numbers that no seed determines"
        )
    here = known.contents if known else Counter()
    there = _all(each.contents for each in ranks if each)
    again = sum(times - here[each] for each, times in there.items() if 0 < here[each] < times)
    new = sum(times for each, times in there.items() if each not in here)
    parts = [f"{counted(new, 'sample')} only in several processes"] * bool(new)
    parts += [f"{counted(again, 'sample')} more often there"] * bool(again)
    missing = sum(times for each, times in here.items() if each not in there)
    parts += [f"{counted(missing, 'sample')} only in one process"] * bool(missing)
    return f"the samples differ: {', '.join(parts)} (accel-demo shards shows who reads which)"


def _loss(scale: float, losses: tuple, processes: int, several: StepsOfRun) -> tuple[str, str]:
    if (share := simple_share(scale, processes)) is not None:
        text = f"the loss is {share} as large in {processes} processes: a sum over the samples of "
        text += "a batch, not their mean, depends on the number of processes"
        return "loss scale", text
    text = f"the mean loss is {losses[1]:.6g} in {processes} processes, and {losses[0]:.6g} in one"
    return ("buffers" if batch_norms(several) else "loss"), text + because_of_batch_norm(several)


def batch_norms(run: StepsOfRun) -> bool:
    """Return True if a model normalizes the samples of each rank's batch by themselves."""
    return any(
        model["batch_norms"]
        for rank in run.ranks
        for event in rank.of("models")
        for model in event["models"]
    )


def because_of_batch_norm(run: StepsOfRun) -> str:
    if not batch_norms(run):
        return ""
    return ": BatchNorm uses the mean and variance of each rank's samples (see SyncBatchNorm)"


def simple_share(scale: float, processes: int) -> str | None:
    """Return "1/2" or "2 times" if a ratio is that of the number of processes, otherwise None."""
    if abs(scale * processes - 1) < 0.01:
        return f"1/{processes}"
    if abs(scale / processes - 1) < 0.01:
        return f"{processes} times"
    return None


def tensor_differences(first: list, second: list) -> dict[int, float]:
    """Return the largest difference between the values of each pair of tensors.

    It is relative to the root mean square of a tensor, or to a part of that of all tensors.
    """
    known = [each for each in first if each]
    size = sum(each[1] for each in known)
    whole = math.sqrt(sum(each[0] ** 2 for each in known) / size) if size else 0.0
    found = {}
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if not one or not other:
            found[number] = 0.0 if one == other else math.inf
            continue
        scale = max(one[0] / math.sqrt(one[1]), LEAST_PART * whole)
        if one[1] != other[1]:  # the tensors have different sizes
            found[number] = math.inf
            continue
        most = max(abs(a - b) for a, b in zip(one[2], other[2], strict=True))
        found[number] = most / scale if scale else (0.0 if not most else math.inf)
    return found


def _gradients(here: dict, there: dict, name: str, most: float, processes: int) -> tuple[str, str]:
    scales = [
        ratio((one[0], other[0]))
        for one, other in zip(here["gradients"], there["gradients"], strict=False)
        if one and other and one[0] > 0
    ]
    shares = {simple_share(scale, processes) for scale in scales}
    if len(shares) == 1 and (share := shares.pop()) is not None:
        return "gradient scale", f"all gradients are {share} as large in {processes} processes"
    if math.isinf(most):
        return "a layer", f"{name} has a gradient in only one of the runs"
    return "a layer", f"the gradients of {name} differ most, by {most:.1%} of their size"


def _settings(
    here: list[dict], there: list[dict], places: tuple[str, str], hint: str = ""
) -> list[tuple[str, str]]:
    """Compare the settings of an optimizer's groups, in two places. `hint` is about the lr."""
    for one, other in zip(here, there, strict=False):
        for name, value in one.items():
            if isinstance(value, float) and not math.isclose(
                value, other.get(name, value), rel_tol=1e-6
            ):
                text = f"{name} of the optimizer is {value:.6g} {places[0]}, and "
                text += f"{other[name]:.6g} {places[1]}{hint if name == 'lr' else ''}"
                return [("settings", text)]
    return []


def _ranks(updates: list[dict], names: list[str]) -> list[tuple[str, str]]:
    """Compare the weights of the ranks with each other, if they train the same parameters."""
    for number, update in enumerate(updates):
        if len(update["weights"]) != len(names):
            continue
        differences = tensor_differences(updates[0]["weights"], update["weights"])
        worst = max(differences, key=differences.__getitem__, default=0)
        if START < differences.get(worst, 0.0) < math.inf:
            text = f"after it, {names[worst]} differs between rank 0 and rank {number}"
            return [("ranks", text)]
    return []


def _moved(one: StepsOfRun, several: StepsOfRun, step: int) -> float:
    """Return how much the weights differ, as a part of how far they have moved since the start."""
    now, other = one.updates[0][step], several.updates[0][step]
    first = next(each for each in one.gradients[0] if each["optimizer"] == now["optimizer"])
    moved = differing = 0.0
    tensors = zip(first["weights"], now["weights"], other["weights"], strict=False)
    for begun, here, there in tensors:
        if begun and here and there and here[1] == there[1]:
            moved += sum((a - b) ** 2 for a, b in zip(begun[2], here[2], strict=True))
            differing += sum((a - b) ** 2 for a, b in zip(here[2], there[2], strict=True))
    return math.sqrt(differing / moved) if moved else 0.0


def _buffers(
    one: StepsOfRun, several: StepsOfRun, step: int, limit: float
) -> list[tuple[str, str]]:
    here, there = one.updates[0][step], several.updates[0][step]
    differences = tensor_differences(here["buffers"], there["buffers"])
    worst = max(differences, key=differences.__getitem__, default=0)
    if differences.get(worst, 0.0) <= limit:
        return []
    name = here["buffer_names"][worst]
    return [("buffers", f"the buffer {name} differs{because_of_batch_norm(several)}")]


def samples_of(rank: Rank) -> list[Batches | None]:
    """Return the samples of each step, or None if they are unknown."""
    loaders = list(rank.training_passes)
    found: list[Batches | None] = []
    batches = batches_of(rank, loaders[0]) if len(loaders) == 1 else []
    used = 0
    for event in rank.of("gradients"):
        number = len(event["losses"])
        own = batches[used : used + number]
        used += number
        if len(own) < number or not number:
            found.append(None)
            continue
        indices = Counter(each for batch in own for each in batch.get("indices") or [])
        found.append(Batches(Counter(each for batch in own for each in contents(batch)), indices))
    return found
