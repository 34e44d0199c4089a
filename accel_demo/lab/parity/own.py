"""Run the reader's script in one process and in several, and find what differs first."""

import copy
import math
import shlex
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from accel_demo.errors import UserError, say
from accel_demo.lab.observed import launches
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observation import observe, say_if_killed
from accel_demo.lab.observed.places import NotChecked, last_lines
from accel_demo.lab.observed.ranks import Rank, batches_of, contents
from accel_demo.observer.limits import BATCHES, EPOCHS, STEPS
from accel_demo.observer.parity import FACTOR
from accel_demo.show import table
from accel_demo.wording import counted

ALL_EPOCHS = str(10**6)  # record all samples, and end the run after the steps, not after epochs
# Relative differences that the order of additions explains in the first step. Each further step
# may multiply them, because training amplifies rounding errors.
ROUNDING, LOW_PRECISION, AMPLIFICATION, MOST_ROUNDING = 1e-4, 1e-2, 4.0, 0.05
# A tensor whose gradients are smaller than this part of all gradients is compared with that part:
# its values are the small differences of large numbers.
LEAST_PART = 1e-3
# Part of what the weights have moved. Adam divides by small numbers, so a few weights differ more.
MOVED = 0.2
START = 1e-6  # relative difference of weights at the start
FLAGS = {"torchrun": "--nproc-per-node", "accelerate": "--num_processes"}
KINDS = {  # what can differ first, in the order of one step
    "start": "the weights at the start",
    "samples": "the samples",
    "loss scale": "the scale of the loss",
    "loss": "the loss",
    "gradient scale": "the scale of the gradients",
    "a layer": "the gradients of a layer",
    "settings": "the learning rate, or another setting of the optimizer",
    "weights": "the weights after a step",
    "buffers": "a buffer, such as BatchNorm's running statistics",
}


@dataclass(frozen=True)
class ComparedStep:
    """One optimizer step of both runs. `losses` are sums over its backward passes."""

    step: int
    same_samples: bool | None  # None if it is unknown
    losses: tuple[float, float]  # in one process, and the mean over several
    gradients: float  # the largest difference of a tensor, relative to its size
    weights: float  # relative to how far they have moved since the start


@dataclass(frozen=True)
class OwnParityResult:
    """What differs between a script in one process and in several.

    A batch has `factor` times as many samples in one process as in each of the `processes`.
    """

    processes: int
    factor: float
    command_line: list[str]
    single_command_line: list[str]
    steps: list[ComparedStep]
    first_step: int | None  # the first one with a difference, from 1
    kind: str | None  # a key of KINDS
    text: str


@dataclass
class StepsOfRun:
    """The steps of one run: for each step, its events by rank."""

    ranks: list[Rank]
    gradients: list[list[dict]] = field(init=False)
    updates: list[list[dict]] = field(init=False)
    samples: list[list[Counter | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = [rank.of("gradients") for rank in self.ranks]
        self.updates = [rank.of("updated") for rank in self.ranks]
        self.samples = [samples_of(rank) for rank in self.ranks]

    @property
    def steps(self) -> int:
        return min(map(len, [*self.gradients, *self.updates]))


def compare_script(options) -> OwnParityResult:
    """Run the reader's command twice, and compare the runs."""
    limits = {BATCHES: "0", STEPS: str(options.steps), EPOCHS: ALL_EPOCHS}
    single = single_command(options.command, options.processes)
    if options.batch_flag:
        with_batch_flag(single, options.batch_flag, 1.0)  # or an error, before anything starts
    say("in several processes:")
    many = observe(options, "parity", limits | {FACTOR: "1"}).evidence
    several = run_of(many, "several processes")
    if len(several.ranks) < 2 or not many.is_distributed:
        raise UserError(
            f"the command has not connected several processes: {shlex.join(options.command)}"
        )
    factor = factor_of(several.ranks)
    here = copy.copy(options)
    here.command, here.processes = single, None
    if options.batch_flag:
        here.command = with_batch_flag(single, options.batch_flag, factor)
    say("in one process:")
    variable = "1" if options.batch_flag else f"{factor:g}"
    one = run_of(observe(here, "parity", limits | {FACTOR: variable}).evidence, "one process")
    if len(one.ranks) > 1:
        raise UserError(f"the command has started several processes: {shlex.join(here.command)}")
    return compare(one, several, factor, options.command, here.command)


def run_of(evidence: Evidence, processes: str) -> StepsOfRun:
    """Return the steps of a run. Raises `UserError` if it has made none."""
    say_if_killed(evidence)
    try:
        evidence.require_all_events()
    except NotChecked as reason:
        raise UserError(str(reason)) from None
    run = StepsOfRun(evidence.ranks)
    if not run.ranks or not run.steps:
        last = "".join(last_lines(evidence.log)[-1:])
        raise UserError(
            f"the script has made no optimizer step in {processes}, and has ended with exit code "
            f"{evidence.exit_code}: {last}"
        )
    return run


def single_command(command: list[str], processes: int | None) -> list[str]:
    """Return the command with one process. Raises `UserError` if it starts its own processes."""
    script = next((n for n, word in enumerate(command) if word.endswith(".py")), None)
    if command[0].endswith(".py"):
        return launches.command_for(command, 1)
    flag = next((flag for name, flag in FLAGS.items() if name in command[0]), None)
    if launches.is_python(command[0]):
        if processes is not None:
            return launches.command_for(command, 1)
        is_accelerate = "accelerate.commands.launch" in command
        flag = FLAGS["accelerate" if is_accelerate else "torchrun"]
        if not launches.is_launcher(command):
            raise UserError(
                "the script starts its processes itself, so parity cannot run it in one. "
                "Use --processes if it does not."
            )
    if flag is None or script is None:
        raise UserError(
            "parity needs a script, or a command that starts one with torchrun or accelerate "
            f"launch, got {shlex.join(command)}"
        )
    return [*command[:script], flag, "1", *command[script:]]  # the last flag counts


def with_batch_flag(command: list[str], flag: str, factor: float) -> list[str]:
    """Return the command with `factor` times the batch size. Raises `UserError` if it has none."""
    words = list(command)
    for number, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name != flag:
            continue
        try:
            if separator:
                words[number] = f"{flag}={round(int(value) * factor)}"
            else:
                words[number + 1] = str(round(int(words[number + 1]) * factor))
        except (ValueError, IndexError):
            break
        return words
    raise UserError(f"the command has no {flag} with a number, which --batch-flag names")


def factor_of(ranks: list[Rank]) -> float:
    """Return how many times more samples all ranks read in a step than a batch of the loader has.

    This is the number of ranks, or 1 if the script divides each batch between them.
    """
    begun = next((each for each in ranks[0].begun_for_training if each["batch_size"]), None)
    if begun is None:
        return float(len(ranks))
    sizes = []
    for rank in ranks:
        batches = batches_of(rank, begun["loader"])
        sizes += [len(contents(batch)) for batch in batches[:1]]
    whole = sum(sizes) / begun["batch_size"]
    return 1.0 if 0 < whole <= 1 else float(len(ranks))


def samples_of(rank: Rank) -> list[Counter | None]:
    """Return the contents of the samples of each step, or None if they are unknown."""
    loaders = list(rank.training_passes)
    found: list[Counter | None] = []
    batches = batches_of(rank, loaders[0]) if len(loaders) == 1 else []
    used = 0
    for event in rank.of("gradients"):
        number = len(event["losses"])
        own = batches[used : used + number]
        used += number
        if len(own) < number or not number:
            found.append(None)
            continue
        found.append(Counter(each for batch in own for each in contents(batch)))
    return found


def compare(
    one: StepsOfRun, several: StepsOfRun, factor: float, command: list[str], single: list[str]
) -> OwnParityResult:
    """Compare the runs step by step, and name the first difference."""
    compared: list[ComparedStep] = []
    first: tuple[int, str, str] | None = None
    for step in range(min(one.steps, several.steps)):
        row, found = compare_step(one, several, step)
        compared.append(row)
        if found and first is None:
            first = step + 1, *found
    text = "no difference that the order of additions does not explain"
    return OwnParityResult(
        processes=len(several.ranks),
        factor=factor,
        command_line=command,
        single_command_line=single,
        steps=compared,
        first_step=first[0] if first else None,
        kind=first[1] if first else None,
        text=f"step {first[0]}: {first[2]}" if first else text,
    )


def compare_step(
    one: StepsOfRun, several: StepsOfRun, step: int
) -> tuple[ComparedStep, tuple[str, str] | None]:
    """Compare one step. Returns the row of the table, and what differs first: its kind and text."""
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
    found += _settings(here["settings"], there[0]["settings"])
    moved = _moved(one, several, step)
    if moved > MOVED:
        found.append(("weights", f"the weights after it differ by {moved:.0%} of their change"))
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
    return here == sum((each for each in there if each), Counter())


def _which_samples(one: StepsOfRun, several: StepsOfRun, step: int) -> str:
    here = one.samples[0][step] or Counter()
    there: Counter = sum((samples[step] or Counter() for samples in several.samples), Counter())
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


def _settings(here: list[dict], there: list[dict]) -> list[tuple[str, str]]:
    for one, other in zip(here, there, strict=False):
        for name, value in one.items():
            if isinstance(value, float) and not math.isclose(value, other[name], rel_tol=1e-6):
                text = f"{name} of the optimizer is {value:.6g} in one process, and "
                return [("settings", f"{text}{other[name]:.6g} in several")]
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


def as_text(result: OwnParityResult) -> str:
    """Return the result as text for the terminal."""
    samples = {True: "same", False: "different", None: "unknown"}
    rows = [
        [
            row.step,
            samples[row.same_samples],
            f"{row.losses[0]:.6g}",
            f"{row.losses[1]:.6g}",
            f"{row.gradients:.1e}",
            f"{row.weights:.1e}",
        ]
        for row in result.steps
    ]
    head = ["step", "samples", "loss, 1 process", f"loss, {result.processes} processes"]
    head += ["gradients differ by", "weights differ by"]
    more = f", batches of {result.factor:g} times the size" if result.factor != 1 else ""
    return "\n\n".join(
        [
            f"{counted(result.processes, 'connected process')}: {shlex.join(result.command_line)}",
            f"1 process{more}: {shlex.join(result.single_command_line)}",
            "Both runs begin with the same seed and shuffle in the same order. Dropout is off.",
            table(head, rows),
            f"**{textwrap.fill(result.text, 96)}**",
        ]
    )
