"""Grade exercise 13: observe the script in two processes, and make the checks of the audit.

torchrun starts this program on every rank. The observer of `accel-demo audit` records what the
script does there, and hooks record how it trains, because a script without the faulty lines would
be no repair.
"""

import os
import runpy
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grading
from grading import Wrong, is_in_answer, limit, list_ranks, torch

from accel_demo.observer import agent
from accel_demo.observer.events import FOLDER
from accel_demo.wording import counted

PROCESSES, STEPS, BACKWARDS = 2, 18, 2  # BACKWARDS is per step
LEARNING_RATE = 0.2
PARAMETERS = 784 * 32 + 32 + 32 * 10 + 10
EVENTS = "events"  # folder for the observer, beside the script's files
FILE = "runs/exercise_13/network.pt"
LEAST_ACCURACY = 0.5  # a right answer reaches about 0.65
PATIENCE = 60  # seconds for the script; a right answer takes about two
TOLERANCE = 1e-6
SEEN = "What the audit cannot see"  # heading of page 13


def judge_all(answer: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        torchrun = f"torchrun --standalone --nproc-per-node {PROCESSES}"
        flags = f"--folder {shlex.quote(folder)}"
        Path(folder, EVENTS).mkdir()
        outcome = grading.run_answer(__file__, answer, torchrun, flags)
        grading.check(outcome, (PROCESSES,))
        judge_findings(Path(folder, EVENTS), answer)
    names = [f"{PROCESSES}-{rank}" for rank in range(PROCESSES)]
    by_rank = [outcome.reports[name]["seen"][0] for name in names]
    for training in by_rank:
        judge_training(**training)
    judge_weights(by_rank[0])
    return (
        f"the audit finds no errors and no warnings. Two connected processes take {STEPS} steps "
        f"each, and {by_rank[0]['accuracy']:.0%} of the test images are correct"
    )


def judge_findings(events: Path, answer: Path) -> None:
    """Make the checks of the audit. Raise `Wrong` if they find anything above a note."""
    from accel_demo.lab.audit.command import run_checks
    from accel_demo.lab.audit.result import NOTE
    from accel_demo.lab.observed.evidence import Evidence
    from accel_demo.lab.observed.ranks import read_launches

    ranks, *_ = read_launches(events) or [[]]
    if len(ranks) < PROCESSES:
        raise Wrong("the script does not train in two processes")
    findings, _ = run_checks(Evidence(ranks, exit_code=0))
    findings = [finding for finding in findings if finding.verdict != NOTE]
    if findings:
        first, more = findings[0], len(findings) - 1
        lines = [place.line for place in first.places if Path(place.file) == answer]
        where = f" (line {lines[0]} of your file)" if lines else ""
        others = f" The audit reports {counted(more, 'more finding')}." if more else ""
        sentence = first.sentence.replace(f"{events.parent}{os.sep}", "")
        raise Wrong(f"the audit reports this {first.verdict}: {sentence}{where}{others}")


def judge_training(
    rates: list[float],
    backwards: list[int],
    has_zero_biases: bool,
    has_leftovers: bool,
    trained: int,
    accuracy: float | None,
) -> None:
    """Raise `Wrong` if the script does not do what it is meant to do. See `Training`."""
    if len(rates) != STEPS:
        raise Wrong(
            f"the audit finds nothing, but there are {counted(len(rates), 'optimizer step')} per "
            f"process instead of {STEPS}",
            SEEN,
        )
    if set(backwards) != {BACKWARDS}:
        raise Wrong(
            f"the audit finds nothing, but a step uses the gradients of {backwards[0]} instead of "
            f"{BACKWARDS} batches",
            SEEN,
        )
    expected = [LEARNING_RATE * (1 - step / STEPS) for step in range(STEPS)]
    for step, pair in enumerate(zip(rates, expected, strict=True), 1):
        if abs(pair[0] - pair[1]) > TOLERANCE:
            raise Wrong(
                f"the audit finds nothing, but the learning rate of step {step} is {pair[0]:.4g} "
                f"instead of {pair[1]:.4g}: it has to fall once after each optimizer step. (A "
                "prepared scheduler advances once per process.)",
                SEEN,
            )
    if not has_zero_biases:
        raise Wrong(
            "the audit finds nothing, but training does not start from the weights that "
            "`initialize` sets",
            SEEN,
        )
    if has_leftovers:
        raise Wrong(
            "the audit finds nothing, but the gradients of the step before are still there: call "
            "zero_grad() after each step",
            SEEN,
        )
    if trained != PARAMETERS:
        raise Wrong(
            f"the audit finds nothing, but {trained:,} parameters are trained instead of all "
            f"{PARAMETERS:,}",
            SEEN,
        )


def judge_weights(training: dict) -> None:
    accuracy = training["accuracy"]
    if accuracy is None:
        raise Wrong(f"{FILE} does not contain the weights of the network with 10 classes", SEEN)
    if accuracy < LEAST_ACCURACY:
        raise Wrong(
            f"the audit finds nothing, but with the weights in {FILE}, only {accuracy:.0%} of the "
            "test images are correct",
            SEEN,
        )


class Training:
    """What one rank does.

    `rates` and `backwards` have the learning rate and the number of backward passes of each step,
    and `trained` is the number of parameters with a gradient in the last step. `has_zero_biases` is
    True if the biases were 0 before the first step, as `initialize` sets them, and `has_leftovers`
    if there were gradients before the first backward pass of a later step.
    """

    def __init__(self):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.rates, self.backwards = [], []
        self.has_zero_biases, self.has_leftovers, self.trained = True, False, 0
        self.passes, self.parameters = 0, []
        register_optimizer_step_pre_hook(self.before_step)
        self.backward = torch.autograd.backward
        torch.autograd.backward = self.before_backward

    def before_backward(self, *arguments, **options):
        if self.passes == 0:
            gradients = [each.grad for each in self.parameters if each.grad is not None]
            self.has_leftovers |= any(bool(gradient.any()) for gradient in gradients)
        self.passes += 1
        return self.backward(*arguments, **options)

    def before_step(self, optimizer, *_) -> None:
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]
        with_gradient = [each for each in self.parameters if each.grad is not None]
        self.trained = sum(each.numel() for each in with_gradient)
        if not self.rates:
            biases = [each for each in with_gradient if each.dim() == 1]
            self.has_zero_biases = not any(bool(bias.any()) for bias in biases)
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        self.backwards.append(self.passes)
        self.passes = 0

    def observation(self) -> dict:
        names = "rates backwards has_zero_biases has_leftovers trained".split()
        return {name: getattr(self, name) for name in names} | {"accuracy": accuracy_of(Path(FILE))}


def accuracy_of(file: Path) -> float | None:
    """Return the share of 500 test images that the saved weights classify correctly.

    Returns None if the file does not have the expected weights.
    """
    from accel_demo.data import packaged_set

    images, labels = packaged_set("test")[:500]
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
        body, head = (
            (state[f"{name}.weight"], state[f"{name}.bias"]) for name in ("body.1", "head")
        )
        hidden = torch.nn.functional.linear(images.flatten(1), *body).relu()
        logits = torch.nn.functional.linear(hidden, *head)
    except Exception:
        return None
    if logits.shape != (500, 10):
        return None
    return (logits.argmax(dim=1) == labels).float().mean().item()


def observe(answer: Path) -> Iterator[dict]:
    training = Training()
    sys.argv, sys.path[0] = [str(answer)], str(answer.parent)
    runpy.run_path(str(answer), {grading.ANSWER: True}, "__main__")
    yield training.observation()


def run_rank(answer: Path, reports: Path, folder: Path) -> int:
    """Run the script on this rank, and write a report. Return the exit code."""
    rank, report, patience = os.environ["RANK"], {}, limit("ACCEL_DEMO_PATIENCE", PATIENCE)
    main_thread = threading.get_ident()

    def give_up() -> None:
        frame = sys._current_frames()[main_thread]
        while frame and not is_in_answer(frame):
            frame = frame.f_back
        where = f" and is at line {frame.f_lineno} of your file" if frame else ""
        report["mistake"] = (
            f"{list_ranks([int(rank)])} has not finished after {patience:g} s{where}. The audit "
            "reports which ranks wait, and in which collective"
        )
        report["is_late"] = True
        grading.write_report(reports, f"{PROCESSES}-{rank}", report)
        os._exit(1)

    watch = threading.Timer(patience, give_up)
    watch.daemon = True
    watch.start()
    os.chdir(folder)
    os.environ[FOLDER] = str(folder / EVENTS)
    agent.start()
    grading.fill_in(report, observe, answer)
    watch.cancel()
    grading.write_report(reports, f"{PROCESSES}-{rank}", report)
    if report["mistake"]:
        os._exit(1)  # Python's own exit may wait for the other ranks
    return 0


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="folder for the events and the script's files")
    options = grading.read(parser)
    if options.report:
        sys.exit(run_rank(options.answer, options.report, options.folder))
    sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))
