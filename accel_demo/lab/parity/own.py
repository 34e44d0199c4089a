"""Run the reader's script in one process and in several, and find what differs first."""

import copy
import shlex
from dataclasses import dataclass

from accel_demo.errors import UserError, say
from accel_demo.lab.observed import launches
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observation import check_complete, observe
from accel_demo.lab.observed.places import last_lines
from accel_demo.lab.observed.ranks import Rank, batches_of, contents
from accel_demo.lab.output import MeasuredFinding
from accel_demo.lab.parity.steps import ComparedStep, StepsOfRun, compare_step
from accel_demo.observer.limits import BATCHES, EPOCHS, STEPS
from accel_demo.observer.parity import FACTOR, ORDER
from accel_demo.show import table
from accel_demo.terminal import fill
from accel_demo.wording import counted

ALL_EPOCHS = str(10**6)  # record all samples, and end the run after the steps, not after epochs
NO_DIFFERENCE = "no difference that the order of additions does not explain"


@dataclass(frozen=True)
class OwnParityResult:
    """What differs between a script in one process and in several.

    A batch has `factor` times as many samples in one process as in each of the `processes`.
    """

    processes: int
    factor: float
    command_line: list[str]
    exit_code: int | None  # of the run in several processes
    single_command_line: list[str]
    steps: list[ComparedStep]
    first_step: int | None  # the first one with a difference, from 1
    findings: list[MeasuredFinding]  # this difference: see `compare_step`

    @property
    def kind(self) -> str | None:
        return self.findings[0].kind if self.findings else None

    @property
    def text(self) -> str:
        return self.findings[0].text if self.findings else NO_DIFFERENCE


def compare_script(options) -> OwnParityResult:
    """Run the reader's command in several processes and in one, and compare the runs."""
    single = launches.single_command(options.command, options.processes, "parity")
    if options.batch_flag:
        with_batch_flag(single, options.batch_flag, 1.0)  # or an error, before anything starts
    say("in several processes:")
    limits = {BATCHES: "0", STEPS: str(options.steps), EPOCHS: ALL_EPOCHS}
    many = observe(options, "parity", limits | {FACTOR: "1"}).evidence
    several = run_of(many, "several processes")
    if len(several.ranks) < 2 or not many.is_distributed:
        raise UserError(
            f"the command has not connected several processes: {shlex.join(options.command)}"
        )
    order = next((each["seed"] for each in several.ranks[0].of("order")), None)
    limits |= {} if order is None else {ORDER: str(order)}
    factor = factor_of(several.ranks)
    one, command = run_single(options, single, factor, limits)
    if (ratio := several.first_samples / (one.first_samples or 1)) not in (0, 1):
        say("the script makes larger batches, or more of them, by itself: once more without that")
        factor *= ratio
        one, command = run_single(options, single, factor, limits)
    if 0 < one.first_samples != several.first_samples > 0:
        raise UserError(
            f"parity cannot make the global batches equal: a step of one process reads "
            f"{one.first_samples} samples, and one of several {several.first_samples}. "
            "If the script has a flag for its batch size, name it with --batch-flag."
        )
    return compare(one, several, factor, options.command, command, many.exit_code)


def run_single(
    options, single: list[str], factor: float, limits: dict[str, str]
) -> tuple[StepsOfRun, list[str]]:
    """Run the script in one process, with batches of `factor` times the size.

    Returns the run and its command. Raises `UserError` if nothing can be made larger.
    """
    here = copy.copy(options)
    here.command, here.processes = single, None
    if options.batch_flag:
        here.command = with_batch_flag(single, options.batch_flag, factor)
    say("in one process:")
    variable = "1" if options.batch_flag else f"{factor:g}"
    run = run_of(observe(here, "parity", limits | {FACTOR: variable}).evidence, "one process")
    if len(run.ranks) > 1:
        raise UserError(f"the command has started several processes: {shlex.join(here.command)}")
    if variable != "1" and not run.ranks[0].of("scaled"):
        raise UserError(
            "the script has no DataLoader whose batch size parity can change: name the flag of "
            "its batch size with --batch-flag"
        )
    return run, here.command


def run_of(evidence: Evidence, processes: str) -> StepsOfRun:
    """Return the steps of a run. Raises `UserError` if it has made none."""
    check_complete(evidence)
    run = StepsOfRun(evidence.ranks)
    if not run.ranks or not run.steps:
        last = "".join(last_lines(evidence.log)[-1:])
        raise UserError(
            f"the script has made no optimizer step in {processes}, and has ended with exit code "
            f"{evidence.exit_code}: {last}"
        )
    return run


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


def compare(
    one: StepsOfRun,
    several: StepsOfRun,
    factor: float,
    command: list[str],
    single: list[str],
    exit_code: int | None = None,
) -> OwnParityResult:
    """Compare the runs step by step, and name the first difference."""
    compared: list[ComparedStep] = []
    first: tuple[int, str, str] | None = None
    for step in range(min(one.steps, several.steps)):
        row, found = compare_step(one, several, step)
        compared.append(row)
        if found and first is None:
            first = step + 1, *found
    return OwnParityResult(
        processes=len(several.ranks),
        factor=factor,
        command_line=command,
        exit_code=exit_code,
        single_command_line=single,
        steps=compared,
        first_step=first[0] if first else None,
        findings=[MeasuredFinding(first[1], None, f"step {first[0]}: {first[2]}")] if first else [],
    )


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
            f"**{fill(result.text, 96)}**",
        ]
    )
