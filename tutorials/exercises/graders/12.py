"""Grade exercise 12: train with the port in one process and in two, kill it, resume, and compare.

torchrun starts this program on every rank, and it runs the learner's script there. In one of the
runs, the observer of `accel-demo audit` records what the script does. The reference is our answer
in one process, which trains as the script does before it is ported.
"""

import json
import os
import runpy
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grading
from grading import Wrong, is_in_answer, limit, list_ranks, prefixed, torch, wait_for

from accel_demo.errors import UserError
from accel_demo.lab.course.exercises import all_exercises
from accel_demo.observer import agent
from accel_demo.observer.events import FOLDER
from accel_demo.wording import counted

EPOCHS, KILL_AFTER = 3, 2  # KILL_AFTER is the number of lines in log.jsonl
FULL = f"--epochs {EPOCHS}"
STOPPING = "--epochs 5 --patience 1 --learning-rate 0"  # the second epoch brings no gain
STEPS = EPOCHS * 15
TIME_LIMIT = 240  # seconds for one launch; a right answer takes about ten
PATIENCE = 120  # seconds for the script itself, after the imports
TOLERANCE = 1e-3  # largest difference of a weight; rounding makes it about 1e-5
OF_SCORES = 2e-3  # of a macro F1 or a loss; one of 999 predictions may flip by rounding
FLIPS = 3  # ids in wrong.txt that may differ
# Headings of page 12
FILES, STOP = "One process writes", "All processes stop together"
OF_SAMPLES, LOGGED = "Each score belongs to one sample", "Log once, with global values"


def judge_all(answer: Path) -> str:
    ours = all_exercises()["12"].answer
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(2) as pool:
        folders = {name: Path(parent, name) for name in "ours two one killed stop".split()}
        for folder in folders.values():
            folder.mkdir()
        # Two launches at a time: there may be only two cores.
        reference = pool.submit(launch, ours, folders["ours"], 1, FULL)
        two = pool.submit(launch, answer, folders["two"], 2, FULL, events=Path(parent, "events"))
        judge_two(two.result(), folders["two"], Path(parent, "events"), answer)
        judge_ours(reference.result(), folders["ours"])
        with prefixed("on two processes, "):
            judge_files(folders["two"], folders["ours"])
        killed = pool.submit(launch, answer, folders["killed"], 2, FULL, is_killed=True)
        one = pool.submit(launch, answer, folders["one"], 1, FULL)
        killed.result()
        resumed = pool.submit(launch, answer, folders["killed"], 2, f"{FULL} --resume")
        with prefixed("on one process, "):
            check_end(one.result(), 1)
            judge_files(folders["one"], folders["ours"])
        stopped = pool.submit(launch, answer, folders["stop"], 2, STOPPING)
        with prefixed(f"killed after {KILL_AFTER} epochs and started again with --resume, "):
            check_end(resumed.result(), 2)
            judge_files(folders["killed"], folders["ours"])
        with prefixed(f"with {STOPPING}, "):
            judge_stop(stopped.result(), folders["stop"])
        restarted = launch(answer, folders["stop"], 2, f"{STOPPING} --resume")
        with prefixed(f"with {STOPPING}, started again with --resume after it has stopped, "):
            judge_stop(restarted, folders["stop"])
    return (
        "the audit finds no errors and no warnings, and the files are those of one process: on "
        "one process, on two, and after a kill. Two processes stop together, and stay stopped "
        "after --resume"
    )


def launch(
    answer: Path,
    folder: Path,
    processes: int,
    flags: str,
    events: Path | None = None,
    is_killed: bool = False,
) -> grading.Outcome:
    torchrun = f"torchrun --standalone --nproc-per-node {processes}"
    own = f"--folder {shlex.quote(str(folder))} --flags {shlex.quote(flags)}"
    if events:
        events.mkdir()
        own += f" --events {shlex.quote(str(events))}"
    own += " --kill" * is_killed
    return grading.run_answer(__file__, answer, torchrun, own, TIME_LIMIT)


def judge_ours(outcome: grading.Outcome, folder: Path) -> None:
    """Raise `UserError` if our answer has not written the files to compare with."""
    try:
        check_end(outcome, 1)
        judge_files(folder, folder)
    except Wrong as mistake:
        reason = str(mistake).partition("\n")[0].replace("your file", "the file")
        raise UserError(
            "our answer, which yours is compared with, has failed (if you have changed "
            f"answers/12_port.py, reinstall accel-demo): {reason}"
        ) from None


def judge_stop(outcome: grading.Outcome, folder: Path) -> None:
    """Judge a run that has to stop after two epochs, or a resumed run that had stopped then."""
    check_end(outcome, 2)
    if len(lines := log_of(folder)) != 2:
        raise Wrong(f"log.jsonl has {counted(len(lines), 'line')} instead of 2", STOP)


def check_end(outcome: grading.Outcome, processes: int) -> None:
    """Raise `Wrong` unless all processes have run to the end."""
    try:
        grading.check(outcome, (processes,))
    except Wrong as mistake:
        if "Connection closed by peer" not in str(mistake):  # gloo, if another process has ended
            raise
        raise Wrong(
            "one process ended while the other one still waited for it. Do both leave the loop "
            "after the same epoch?",
            STOP,
        ) from None


def judge_two(outcome: grading.Outcome, folder: Path, events: Path, answer: Path) -> None:
    """Judge the run in two processes that was observed."""
    if outcome.exit_code == 0:
        judge_training([outcome.reports[f"2-{rank}"]["seen"][0] for rank in (0, 1)])
    judge_findings(events, answer, folder)
    with prefixed("on two processes, "):
        check_end(outcome, 2)


def judge_training(ranks: list[dict]) -> None:
    """Compare what two ranks have seen: see `Training`."""
    connected = {rank["connected"] for rank in ranks}
    if connected != {2}:
        raise Wrong("the two processes are not connected: each one trains alone")
    steps = ranks[0]["steps"]
    if steps != STEPS:
        size = (
            "the batch size is per process"
            if steps < STEPS
            else "does each rank read all samples, or is every micro-batch a step?"
        )
        raise Wrong(
            f"on two processes, there are {counted(steps, 'optimizer step')} instead of {STEPS}: "
            f"{size}",
            "The batch size and the workers are per process",
        )
    rates = expected_rates()
    for step, (rate, expected) in enumerate(zip(ranks[0]["rates"], rates, strict=True), 1):
        if abs(rate - expected) > 1e-6:
            raise Wrong(
                f"on two processes, the learning rate of step {step} is {rate:.4g} instead of "
                f"{expected:.4g}",
                "The schedule counts optimizer steps",
            )
    if ranks[0]["seed"] == ranks[1]["seed"]:
        raise Wrong(
            "both processes have the same seed, so they would draw the same dropout masks",
            "A seed for each epoch and rank",
        )


def expected_rates() -> list[float]:
    return [0.1 * min((step + 1) / 10, 1 - step / STEPS) for step in range(STEPS)]


def judge_findings(events: Path, answer: Path, folder: Path) -> None:
    """Make the checks of the audit. Raise `Wrong` if they find anything above a note."""
    from accel_demo.lab.audit.command import run_checks
    from accel_demo.lab.audit.result import NOTE
    from accel_demo.lab.observed.evidence import Evidence
    from accel_demo.lab.observed.ranks import read_launches

    ranks, *_ = read_launches(events) or [[]]
    findings, _ = run_checks(Evidence(ranks, exit_code=0))
    findings = [finding for finding in findings if finding.verdict != NOTE]
    if findings:
        first = findings[0]
        lines = [place.line for place in first.places if Path(place.file) == answer]
        where = f" (line {lines[0]} of your file)" if lines else ""
        sentence = first.sentence.replace(f"{folder}{os.sep}", "")
        raise Wrong(f"the audit reports this {first.verdict}: {sentence}{where}")


def judge_files(folder: Path, expected: Path) -> None:
    """Compare best.pt, wrong.txt and log.jsonl with those of the reference."""
    lines, right = log_of(folder), log_of(expected)
    epochs = [line.get("epoch") for line in lines]
    if epochs != list(range(EPOCHS)):
        raise Wrong(f"log.jsonl has the epochs {epochs} instead of {list(range(EPOCHS))}", FILES)
    weights, reference = weights_of(folder), weights_of(expected)
    if weights.keys() != reference.keys():
        raise Wrong(f"best.pt has the names {', '.join(list(weights)[:2])}, …", FILES)
    for name, values in reference.items():
        if (difference := (weights[name] - values).abs().max().item()) > TOLERANCE:
            raise Wrong(
                f"{name} in best.pt differs by {difference:.2g} from the weights that one process "
                "trains with the same global batch",
                "First one process, then two",
            )
    for name, section in (("loss", LOGGED), ("macro_f1", OF_SAMPLES)):
        for line, other in zip(lines, right, strict=True):
            value = line.get(name)
            if not isinstance(value, float) or abs(value - other[name]) > OF_SCORES:
                shown = f"{value:.4f}" if isinstance(value, float) else value
                raise Wrong(
                    f"in log.jsonl, {name} of epoch {line['epoch']} is {shown} instead of "
                    f"{other[name]:.4f}. Does it include the samples of all processes, each once?",
                    section,
                )
    listed, other_list = (
        (each / "wrong.txt").read_text(encoding="utf-8").split() for each in (folder, expected)
    )
    ids, others = set(listed), set(other_list)
    if len(listed) > len(ids):
        raise Wrong(
            f"wrong.txt has {counted(len(listed) - len(ids), 'id')} twice",
            OF_SAMPLES,
        )
    if len(ids ^ others) > FLIPS:
        raise Wrong(
            f"wrong.txt has {counted(len(ids), 'id')}, and {len(ids ^ others)} of them or of the "
            "expected ones are only in one of the two files",
            OF_SAMPLES,
        )


def log_of(folder: Path) -> list[dict]:
    try:
        return [
            json.loads(line)
            for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, ValueError) as error:
        raise Wrong(f"log.jsonl cannot be read: {grading.describe_error(error)}", FILES) from None


def weights_of(folder: Path) -> dict:
    try:
        state = torch.load(folder / "best.pt", weights_only=True, map_location="cpu")
        return {name: values.float() for name, values in state.items()}
    except Exception as error:
        raise Wrong(
            f"best.pt does not contain the weights: {grading.describe_error(error)}", FILES
        ) from None


class Training:
    """What one rank does: its optimizer steps, their learning rates, and its seed at the last."""

    def __init__(self):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.rates, self.connected, self.seed = [], 1, 0
        register_optimizer_step_pre_hook(self.before_step)

    def before_step(self, optimizer, *_) -> None:
        if grading.dist.is_initialized():
            self.connected = grading.dist.get_world_size()
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        self.seed = torch.initial_seed()

    def observation(self) -> dict:
        steps = len(self.rates)
        return {"steps": steps, "rates": self.rates} | {
            "connected": self.connected,
            "seed": self.seed,
        }


def observe(answer: Path, folder: Path, flags: str) -> Iterator[dict]:
    training = Training()
    sys.argv = [str(answer), "--folder", str(folder), "--dropout", "0", *shlex.split(flags)]
    sys.path[0] = str(answer.parent)
    runpy.run_path(str(answer), {grading.ANSWER: True}, "__main__")
    yield training.observation()


def run_rank(options) -> int:
    """Run the script on this rank, and write a report. Return the exit code."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    report, patience = {}, limit("ACCEL_DEMO_PATIENCE", PATIENCE)
    main_thread = threading.get_ident()

    def give_up() -> None:
        frame = sys._current_frames()[main_thread]
        while frame and not is_in_answer(frame):
            frame = frame.f_back
        where = f" and is at line {frame.f_lineno} of your file" if frame else ""
        report["mistake"] = (
            f"{list_ranks([int(rank)])} has not finished after {patience:g} s{where}. Do all "
            "processes make the same calls, and leave the loop after the same epoch?"
        )
        report.update(read=STOP, is_late=True)
        grading.write_report(options.report, f"{world}-{rank}", report)
        os._exit(1)

    def kill() -> None:
        log = options.folder / "log.jsonl"
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") >= KILL_AFTER)
        os.kill(os.getpid(), signal.SIGKILL)

    watch = threading.Timer(patience, give_up)
    watch.daemon = True
    watch.start()
    if options.kill:
        threading.Thread(target=kill, daemon=True).start()
    if options.events:
        os.environ[FOLDER] = str(options.events)
        agent.start()
    grading.fill_in(report, observe, options.answer, options.folder, options.flags)
    watch.cancel()
    grading.write_report(options.report, f"{world}-{rank}", report)
    if report["mistake"]:
        os._exit(1)  # Python's own exit may wait for the other ranks
    return 0


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="folder for the script's files")
    parser.add_argument("--flags", help="flags of the script")
    parser.add_argument("--events", type=Path, help="folder for the events of the observer")
    parser.add_argument("--kill", action="store_true", help="kill it after two epochs")
    options = grading.read(parser)
    if options.report:
        sys.exit(run_rank(options))
    sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))
