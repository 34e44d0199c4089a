"""Grade exercise 50: run the script in two processes, and compare it with training in one.

torchrun starts this program on every rank. A thread on each rank records where the script is, as
50_where.py does. If no rank moves any more, the check ends the run and prints where each rank is.
"""

import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import grading
from grading import Wrong, dist, flatten, largest_difference, limit, torch

from accel_demo.files import write_whole
from accel_demo.lab.course.originals import TUTORIALS
from accel_demo.wording import counted

PROCESSES, EPOCHS, BATCH_SIZE, TARGET, LEARNING_RATE = 2, 10, 32, 0.8, 0.05
TRAINING_IMAGES, VALIDATION_IMAGES = 1024, 301
FOLDER = "runs/exercise_50"
DATA = ("train.pt", "test.pt")
FILES = (*DATA, "log.txt", "best.pt")
STILL = 4  # seconds without any progress on any rank, after which the script hangs
BUSY_SHARE = 0.1  # a process that waits uses less of the CPU's time
PATIENCE = 60  # seconds for the script; a right answer takes about three
TOLERANCE = 1e-4  # a right answer's weights differ from those of one process by about 1e-7
WRITE_DELAY = 1  # seconds before rank 0 writes the images, so that a rank that doesn't wait is seen
LONGEST_SLEEP = 0.05  # seconds; a rank that sleeps instead of waiting is seen, too
LOG_LINE = r"step (\d+): loss ([\d.]+), accuracy ([\d.]+)"
# A process that waits for the others is in one of these files.
WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/distributed.py")
CAUSES = "What the causes have in common"
SIZES_DIFFER = Wrong(
    "a collective of one rank meets one of the other rank with a tensor of a different size. The "
    "ranks are at different lines: 50_where.py prints how many collectives each has called",
    "Step 3: find the first collective that differs",
)


def judge_all(answer: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        torchrun = f"torchrun --standalone --nproc-per-node {PROCESSES}"
        flags = f"--folder {shlex.quote(folder)}"
        outcome = grading.run_answer(__file__, answer, torchrun, flags)
        grading.check(outcome, (PROCESSES,), sizes_differ=SIZES_DIFFER)
        seen = [outcome.reports[f"{PROCESSES}-{rank}"]["seen"][0] for rank in range(PROCESSES)]
        expected = seen[0]["expected"]
        with grading.prefixed("it doesn't hang, but "):
            judge_files([each["written"] for each in seen], [each["read"] for each in seen])
            judge_training(seen, expected)
            judge_validation([each["validated"] for each in seen], len(expected["log"]))
            judge_log(Path(folder, FOLDER, "log.txt"), expected["log"])
            judge_best(seen[0]["best"])
    return (
        f"it doesn't hang. Two processes stop after step {expected['steps']} with the weights, the "
        "log and the saved weights of one process that trains on the same batches"
    )


def judge_files(written: list[list[str]], read: list[list[str]]) -> None:
    of_rank_0, *of_others = written
    for rank, files in enumerate(of_others, 1):
        if files:
            why = (
                "it has not waited until rank 0 had written it"
                if files[0] in DATA
                else "only rank 0 may write it"
            )
            raise Wrong(f"rank {rank} writes {files[0]}: {why}")
    for name in DATA:
        if name not in of_rank_0:
            raise Wrong(f"rank 0 doesn't write {name} any more")
        for rank, files in enumerate(read):
            if rank != 0 and name not in files:
                raise Wrong(f"rank {rank} doesn't read {name}, which rank 0 has written for it")


def judge_training(seen: list[dict], expected: dict) -> None:
    steps = [each["steps"] for each in seen]
    for rank, number in enumerate(steps):
        if number == 0:
            raise Wrong(f"rank {rank} takes no optimizer step: both must train")
    if len(set(steps)) > 1:
        raise Wrong(f"rank 0 takes {counted(steps[0], 'step')} and rank 1 {steps[1]}")
    if len({each["weights"] for each in seen}) > 1:
        raise Wrong("the ranks have different weights: are the gradients averaged?")
    if steps[0] != expected["steps"]:
        raise Wrong(
            f"training ends after step {steps[0]} instead of "
            f"{expected['steps']}. It has to stop after the first step at which the smoothed loss, "
            "averaged over the ranks, is below TARGET",
            CAUSES,
        )
    if seen[0]["difference"] > TOLERANCE:
        raise Wrong(
            "the weights are not those of one process that trains on the same "
            "batches. Is the mean brightness that of all images, and does each rank train on its "
            "own half with gradients that are averaged?"
        )


def judge_validation(validated: list[int], epochs: int) -> None:
    for rank, images in enumerate(validated):
        each = images / epochs
        if abs(each - VALIDATION_IMAGES / PROCESSES) > 5:
            raise Wrong(
                f"rank {rank} validates {each:g} images per epoch instead of "
                f"half of the {VALIDATION_IMAGES}"
            )


def judge_log(file: Path, expected: list[list[float]]) -> None:
    if not file.exists():
        raise Wrong("log.txt is missing")
    rows = [
        [float(text) for text in row]
        for row in re.findall(LOG_LINE, file.read_text(encoding="utf-8"))
    ]
    if len(rows) != len(expected):
        raise Wrong(
            f"log.txt has {counted(len(rows), 'line')} of the form `step 16: "
            f"loss 1.6887, accuracy 0.6711` instead of {len(expected)}: one after each epoch, and "
            "one when the training stops"
        )
    for row, right in zip(rows, expected, strict=True):
        for name, value, wanted in zip(("step", "loss", "accuracy"), row, right, strict=True):
            if abs(value - wanted) > TOLERANCE:
                meant = {
                    "step": "the number of steps so far",
                    "loss": "the smoothed loss, averaged over the ranks",
                    "accuracy": f"that of all {VALIDATION_IMAGES} images, each counted once",
                }[name]
                raise Wrong(
                    f"in the line of step {right[0]:g}, log.txt has the {name} "
                    f"{value:g} instead of {wanted:.5g}: {meant}"
                )


def judge_best(difference: float | None) -> None:
    if difference is None:
        raise Wrong("best.pt does not contain the weights of the model")
    if difference > TOLERANCE:
        raise Wrong("best.pt does not contain the weights with the best accuracy")


def train_alone() -> dict:
    """Train in this process on the batches of both ranks. Return what the script should do."""
    from accel_demo.data import packaged_set

    functional = torch.nn.functional
    torch.manual_seed(0)
    images, labels = packaged_set("train")[:TRAINING_IMAGES]
    test_images, test_labels = packaged_set("test")[:VALIDATION_IMAGES]
    brightness = images.mean()
    samplers = [
        torch.utils.data.DistributedSampler(range(len(images)), PROCESSES, rank)
        for rank in range(PROCESSES)
    ]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    log, smooth, steps, best, best_weights = [], 2.3, 0, 0.0, None
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [torch.tensor([*each]).split(BATCH_SIZE) for each in samplers]
        for batches in zip(*parts, strict=True):
            batch = torch.cat(batches)
            loss = functional.cross_entropy(model(images[batch] - brightness), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            smooth = 0.9 * smooth + 0.1 * loss.item()
            if smooth < TARGET:
                break
        with torch.no_grad():
            hits = model(test_images - brightness).argmax(dim=1) == test_labels
        accuracy = hits.float().mean().item()
        log.append([steps, smooth, accuracy])
        if accuracy > best:
            best, best_weights = accuracy, flatten(model.parameters()).clone()
        if smooth < TARGET:
            break
    return {
        "log": log,
        "steps": steps,
        "weights": flatten(model.parameters()),
        "best": best_weights,
    }


def make_model():
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


class Watch:
    """What the script does on this rank: its steps, the images it validates, the files it uses."""

    def __init__(self, rank: int):
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.rank, self.steps, self.validated, self.parameters = rank, 0, 0, []
        self.process, self.folder = os.getpid(), Path(FOLDER).resolve()
        self.written, self.read, self.delays = [], [], set()
        register_optimizer_step_post_hook(self.after_step)
        register_module_forward_pre_hook(self.before_forward)
        sys.addaudithook(self.before_event)
        self.save, self.sleep = torch.save, time.sleep
        torch.save, time.sleep = self.before_save, self.before_sleep

    def after_step(self, optimizer, *_) -> None:
        self.steps += 1
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def before_forward(self, module, inputs) -> None:
        if isinstance(module, torch.nn.Flatten) and not torch.is_grad_enabled():
            self.validated += len(inputs[0])

    def before_event(self, event: str, arguments: tuple) -> None:
        """Python calls this before it opens or renames a file. The new name counts as written."""
        if event == "os.rename":
            self.before_use(arguments[1], is_written=True)
        elif event == "open":
            path, _, flags = arguments
            self.before_use(path, is_written=bool(flags & (os.O_WRONLY | os.O_RDWR)))

    def before_save(self, value, file, *arguments, **options):
        self.before_use(file, is_written=True)  # PyTorch opens a path in C++, without an event
        return self.save(value, file, *arguments, **options)

    def before_use(self, path, is_written: bool) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a file that is open
        file = Path(os.fsdecode(path)).resolve()
        if self.folder not in file.parents:
            return
        if file.name in FILES:
            (self.written if is_written else self.read).append(file.name)
        missing = sum(not (self.folder / name).exists() for name in DATA)
        if is_written and self.rank == 0 and missing and missing not in self.delays:
            self.delays.add(missing)
            self.sleep(WRITE_DELAY)

    def before_sleep(self, seconds: float) -> None:
        """Shorten a sleep of the script, but not one of a process that it has forked."""
        is_script = grading.is_in_answer(sys._getframe(1)) and os.getpid() == self.process
        self.sleep(min(seconds, LONGEST_SLEEP) if is_script else seconds)


class Places:
    """Where the script is on this rank and on the others, in files of a folder that all share."""

    def __init__(self, answer: Path, folder: Path, rank: int):
        spec = importlib.util.spec_from_file_location("where", TUTORIALS / "50_where.py")
        assert spec is not None and spec.loader is not None
        self.where = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.where)
        self.answer, self.folder, self.rank = answer, folder, rank
        self.has_ended = False

    def follow(self, give_up) -> None:
        """Record this rank's place until the script ends. If no rank moves, call `give_up`."""
        last, since, busy = None, 0.0, 0.0
        while not self.has_ended:
            place, waits = self.current()
            if place != last:
                last, since, busy = place, time.monotonic(), time.process_time()
            seconds = time.monotonic() - since
            is_idle = time.process_time() - busy < BUSY_SHARE * seconds
            waits = waits and is_idle
            self.write(place, since if waits else None)
            if waits and all(self.is_still(rank) for rank in range(PROCESSES)):
                give_up()
                return
            time.sleep(0.2)

    def current(self) -> tuple[str, bool]:
        """Return the line and the last collective, and whether this rank may wait for others."""
        frame = sys._current_frames()[self.where.MAIN]
        waits = any(part in frame.f_code.co_filename for part in WAITING)
        place = self.where.line_in(str(self.answer), traceback.extract_stack(frame))
        collective = self.where.last_collective() if dist.is_initialized() else "not connected"
        return f"{place}, {collective}", waits

    def write(self, place: str, since: float | None) -> None:
        """Record the place, and since when this rank waits there, or None if it doesn't."""
        if not self.has_ended:
            write_whole(self.folder / f"place-{self.rank}.json", json.dumps([place, since]))

    def read(self, rank: int) -> list:
        try:
            return json.loads((self.folder / f"place-{rank}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ["not started", None]

    def end(self) -> None:
        self.write("ended", 0.0)
        self.has_ended = True

    def is_still(self, rank: int) -> bool:
        _, since = self.read(rank)
        return since is not None and time.monotonic() - since > STILL

    def of_all_ranks(self) -> str:
        """Return a line for each rank, as 50_where.py prints it."""
        return "".join(f"\nrank {rank}: {self.read(rank)[0]}" for rank in range(PROCESSES))


def observe(answer: Path, places: Places) -> Iterator[dict]:
    watch = Watch(places.rank)
    sys.argv, sys.path[0] = [str(answer)], str(answer.parent)
    try:
        runpy.run_path(str(answer), {grading.ANSWER: True}, "__main__")
    except RuntimeError as error:
        if "gloo" not in str(error) or any(text in str(error) for text in grading.GLOO_SIZE_ERRORS):
            raise
        time.sleep(1)  # the other rank may still be writing why it has failed
        raise Wrong(
            f"rank {places.rank} lost the connection to the other rank{places.of_all_ranks()}",
            CAUSES,
        ) from None
    places.end()
    observed = {name: getattr(watch, name) for name in ("steps", "validated", "written", "read")}
    weights = flatten(watch.parameters) if watch.parameters else torch.zeros(0)
    expected = train_alone()
    yield observed | {
        "weights": weights.numpy().tobytes().hex(),
        "difference": largest_difference(weights, expected["weights"]),
        "best": difference_of_best(expected["best"]),
        "expected": {"log": expected["log"], "steps": expected["steps"]},
    }


def difference_of_best(expected) -> float | None:
    """Return the difference of the saved from the expected weights, or None if there are none."""
    model = make_model()
    try:
        model.load_state_dict(torch.load(Path(FOLDER, "best.pt"), weights_only=True))
    except Exception:
        return None
    return largest_difference(flatten(model.parameters()), expected)


def run_rank(answer: Path, reports: Path, folder: Path) -> int:
    """Run the script on this rank, and write a report. Return the exit code."""
    rank, report = int(os.environ["RANK"]), {}
    patience = limit("ACCEL_DEMO_PATIENCE", PATIENCE)

    def fail(mistake: str, **more) -> None:
        report.update(mistake=mistake, seen=[], **more)
        grading.write_report(reports, f"{PROCESSES}-{rank}", report)
        os._exit(1)

    places = Places(answer, folder, rank)
    late = f"the script has not finished after {patience:g} s:"
    watch = threading.Timer(patience, lambda: fail(late + places.of_all_ranks(), is_late=True))
    follow = threading.Thread(
        target=places.follow,
        args=[lambda: fail(f"the script hangs:{places.of_all_ranks()}", read=CAUSES)],
        daemon=True,
    )
    watch.daemon = True
    watch.start()
    os.chdir(folder)
    follow.start()
    grading.fill_in(report, observe, answer, places)
    watch.cancel()
    grading.write_report(reports, f"{PROCESSES}-{rank}", report)
    if report["mistake"]:
        os._exit(1)  # Python's own exit may wait for the other ranks
    return 0


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="folder for the script's files")
    options = grading.read(parser)
    if options.report:
        sys.exit(run_rank(options.answer, options.report, options.folder))
    sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))
