"""Grade exercise 91: train with the port, kill it, start it again, and compare with a reference.

torchrun starts this program on every rank, and recorder_91.py runs the learner's script there.
reference_91.py trains as the script should.
"""

import ast
import difflib
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grading
import recorder_91
from grading import (
    NotFinished,
    Outcome,
    Wrong,
    largest_difference,
    limit,
    prefixed,
    torch,
    vector,
)
from recorder_91 import Record
from reference_91 import (
    BATCH,
    EPOCHS,
    KILL_AFTER,
    LEARNING_RATE,
    MISTAKES,
    MISTAKES_AFTER_KILL,
    OLD_SCRIPT,
    TEST,
    TRAIN,
    global_batches,
    image_numbers,
    new_network,
    reference,
)

TIME_LIMIT = 100  # seconds for one launch; a correct answer takes about ten
PATIENCE = 60  # seconds for the script itself, after the imports
TOLERANCE = 1e-4  # largest difference from the reference; rounding makes it about 1e-7
MOST_CHANGES = 100  # lines; the ports in our tests change 57 to 68
EXAMPLE = "`epoch 2: 407 of 501 test images correct`"
# Headings of page 91
CONNECT = "From DDP to Accelerate"
SAVE = "Why `torch.load` refuses a file from `torch.save(net)`"


def judge_all(answer: Path) -> str:
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(2) as pool:
        full, killed, single = (Path(parent, name) for name in ("full", "killed", "single"))
        # Two launches at a time: there may be only two cores.
        without_kill = pool.submit(launch, answer, full, 2)
        until_kill = pool.submit(launch, answer, killed, 2, is_killed=True)
        reference(2)  # while the launches import torch
        with prefixed("on two processes, "):
            judge(full, without_kill.result())
            until_kill.result()
        after_kill = pool.submit(launch, answer, killed, 2)
        alone = pool.submit(launch, answer, single, 1)
        with prefixed(f"on two processes, killed after epoch {KILL_AFTER} and started again, "):
            judge(killed, after_kill.result(), first_epoch=KILL_AFTER + 1)
        with prefixed("on one process, "):
            judge(single, alone.result())
    changes = changed_lines(
        OLD_SCRIPT.read_text(encoding="utf-8"), answer.read_text(encoding="utf-8")
    )
    if changes > MOST_CHANGES:
        raise Wrong(
            f"it works, but {changes} lines differ from the old script, counting removed and added "
            f"lines, and at most {MOST_CHANGES} may: leave the other lines unchanged"
        )
    return (
        "the weights, the test results and the files are as expected, on one process, on two, and "
        f"after a kill. The port changes {changes} lines of the old script (at most {MOST_CHANGES})"
    )


def launch(answer: Path, folder: Path, processes: int, is_killed: bool = False) -> list[Record]:
    """Run the script under torchrun, and return each rank's record, or [] if it is killed."""
    folder.mkdir(exist_ok=True)
    torchrun = f"torchrun --standalone --nproc-per-node {processes}"
    flags = f"--folder {shlex.quote(str(folder))} --kill-after {KILL_AFTER if is_killed else -1}"
    outcome = grading.run_answer(__file__, answer, torchrun, flags, TIME_LIMIT)
    records = {name: Record(**report) for name, report in outcome.reports.items()}
    if is_killed and any(record.is_killed for record in records.values()):
        return []
    check_end(outcome, records, processes)
    if is_killed:
        raise Wrong(f"it prints the line of epoch {KILL_AFTER} in some runs, but not in others")
    return [records[f"{processes}-{rank}"] for rank in range(processes)]


def check_end(outcome: Outcome, records: dict[str, Record], processes: int) -> None:
    """Raise `Wrong` if the script failed or did not finish. The oldest record comes first."""
    if any(0 < record.connected < processes for record in records.values()):
        raise Wrong(
            "the processes are not connected: each one trains alone, as if it were the only one",
            CONNECT,
        )
    errors = [outcome.stderr, *(record.error for record in records.values())]
    if any(text in error for text in grading.GLOO_SIZE_ERRORS for error in errors):
        raise Wrong(
            "a process receives a message of the wrong size, so the processes are not in the same "
            "call. Does only one process make a call that all must make?"
        )
    for name, record in records.items():
        if record.error.startswith("FileNotFoundError"):  # another rank may have renamed the file
            check_files(list(records.values()))
        if record.error:
            same = len([one for one in records.values() if one.error == record.error]) == processes
            who = "it" if same else f"rank {name[-1]}"
            raise Wrong(f"{who} exited early with {record.error}")
        if record.is_stuck:
            patience = limit("ACCEL_DEMO_PATIENCE", PATIENCE)
            lines = {name[-1]: one.is_at for name, one in records.items() if one.is_at}
            places = [f"rank {rank} is at line {line}" for rank, line in sorted(lines.items())]
            raise NotFinished(
                f"it has not finished after {patience:g} s: {' and '.join(places)} of your file. "
                "Does every process make the same communication calls, in the same order?"
            )
    if outcome.exit_code is None:
        raise NotFinished(
            f"it did not finish within {outcome.time_limit:g} s: is there an infinite loop?"
        )
    if outcome.exit_code != 0:
        raise Wrong("a process exited early without an error. Does it call os._exit, or crash?")


def check_files(records: list[Record]) -> None:
    """Raise `Wrong` if two processes have written the same file."""
    names = set.intersection(*(set(record.files) for record in records))
    if len(records) > 1 and names:
        raise Wrong(f"every process writes {min(names)}: only the main process should", SAVE)


def judge(folder: Path, records: list[Record], first_epoch: int = 0) -> None:
    """Raise `Wrong` if a run has a mistake. `first_epoch` is not 0 after a kill."""
    size = len(records)
    judge_lines(records, first_epoch)
    weights = load_weights(folder)
    expected, scores = reference(size)
    if largest_difference(weights, expected) > TOLERANCE:
        raise Wrong(explain(weights, records, first_epoch))
    for epoch, correct, _ in next(record.lines for record in records if record.lines):
        least, most = scores[epoch]
        if not least <= correct <= most:
            raise Wrong(
                f"it prints {correct} correct predictions after epoch {epoch} instead of {least}. "
                "Does each test image count exactly once?"
            )
    check_files(records)


def judge_lines(records: list[Record], first_epoch: int) -> None:
    printing = [rank for rank, record in enumerate(records) if record.lines]
    if not printing:
        raise Wrong(f"it does not print a line such as {EXAMPLE}")
    if len(printing) > 1:
        raise Wrong("every process prints the line of each epoch: only the main process should")
    lines = records[printing[0]].lines
    epochs = [epoch for epoch, _, _ in lines]
    if first_epoch and epochs[0] == 0:
        raise Wrong("it starts again with epoch 0 instead of the epoch after the kill")
    if first_epoch and epochs[0] < first_epoch:
        raise Wrong(
            f"it repeats epoch {epochs[0]}, whose line was already printed: save the checkpoint "
            "before you print the line, and continue with the next epoch"
        )
    if epochs != list(range(first_epoch, EPOCHS)):
        raise Wrong(
            f"the printed lines are for epochs {', '.join(map(str, epochs))}, but should be for "
            f"epochs {', '.join(map(str, range(first_epoch, EPOCHS)))}"
        )
    for _, _, total in lines:
        if total > TEST:
            raise Wrong(
                f"it counts {total} test images, but there are {TEST}: some are counted twice, "
                "because the shards are padded"
            )
        if total < TEST:
            raise Wrong(f"it counts {total} test images, but there are {TEST}")


def load_weights(folder: Path):
    """Return all weights in model.pth as one vector."""
    if not (folder / "model.pth").exists():
        raise Wrong("there is no file model.pth in the folder at the end", SAVE)
    try:
        state = torch.load(folder / "model.pth", weights_only=True, map_location="cpu")
    except Exception as error:
        raise Wrong(
            "torch.load(..., weights_only=True) refuses model.pth: save the network's state_dict, "
            f"not the network ({type(error).__name__})",
            SAVE,
        ) from None
    shapes = {name: tuple(value.shape) for name, value in new_network().state_dict().items()}
    if not isinstance(state, dict):
        raise Wrong(f"model.pth contains a {type(state).__name__} instead of a state_dict", SAVE)
    if set(state) != set(shapes):
        start = (
            " (of the DDP wrapper)" if any(str(key).startswith("module.") for key in state) else ""
        )
        raise Wrong(
            f"the keys in model.pth are {', '.join(map(str, state))}{start}, instead of "
            f"{', '.join(shapes)}",
            SAVE,
        )
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise Wrong(
                f"{name} in model.pth has the shape {tuple(state[name].shape)} instead of {shape}"
            )
    return torch.cat([state[name].flatten().float() for name in shapes])


def explain(weights, records: list[Record], first_epoch: int) -> str:
    """Return why the weights are wrong."""
    size, expected = len(records), reference(len(records))[0]
    trained = [vector(record.weights) for record in records]
    if largest_difference(trained[0], expected) <= TOLERANCE:
        return "model.pth does not contain the network's weights after the last epoch"
    if message := explain_batches(records, first_epoch):
        return message
    rates = sorted({rate for record in records for rate in record.learning_rates})
    if rates != [LEARNING_RATE]:
        return f"the learning rate is {rates[-1]:g}: keep the old script's {LEARNING_RATE:g}"
    first_weights = records[0].first_weights
    if first_epoch == 0 and abs((first_weights or 0) - new_network().fc1.weight.sum()) > TOLERANCE:
        return "it starts with different weights: create Net() right after torch.manual_seed(0)"
    mistakes = {**MISTAKES, **MISTAKES_AFTER_KILL} if first_epoch else MISTAKES
    for mistake, description in mistakes.items():
        if largest_difference(weights, reference(size, mistake)[0]) <= TOLERANCE:
            return description
    if any(largest_difference(other, trained[0]) > TOLERANCE for other in trained):
        if first_epoch:
            return (
                "the processes end with different weights: does each of them load the checkpoint, "
                "with the state of the optimizer?"
            )
        return "the processes end with different weights: are the gradients averaged?"
    return (
        f"the final weights differ by up to {largest_difference(weights, expected):.1e} from those "
        f"of {'a run without a kill' if first_epoch else 'the reference'}, but at most "
        f"{TOLERANCE:.0e} is allowed"
    )


def explain_batches(records: list[Record], first_epoch: int) -> str:
    """Return what is wrong with the images that the optimizer steps used, or ""."""
    size, known = len(records), image_numbers()
    seen = [
        [[known[crc] for crc in batch if crc in known] for batch in record.batches]
        for record in records
    ]
    sizes = {len(batch) for batches in seen for batch in batches}
    if 0 in sizes or not sizes:
        return ""  # the network was replaced, so its images are not known
    epochs = EPOCHS - first_epoch
    steps = [len(batches) for batches in seen]
    if size > 1 and any(
        set(sum(one[: steps[0] // epochs], [])) == set(range(TRAIN)) for one in seen
    ):
        return "every process reads all training images instead of its own share"
    if sizes != {BATCH}:
        return f"an optimizer step uses {max(sizes)} images per process instead of {BATCH}"
    expected = TRAIN // (BATCH * size)
    if steps != [epochs * expected] * size:
        return f"the optimizer makes {steps[0] / epochs:g} steps per epoch instead of {expected}"
    read = []
    for epoch in range(epochs):
        span = range(epoch * expected, (epoch + 1) * expected)
        read.append([sorted(sum((one[step] for one in seen), [])) for step in span])
    if size > 1 and any(len(set(step)) < len(step) for epoch in read for step in epoch):
        return "the processes read the same training images instead of different ones"
    orders = {number: global_batches(number, size) for number in range(EPOCHS)}
    if read == [orders[number] for number in range(first_epoch, EPOCHS)]:
        return ""
    if all(one == read[0] for one in read):
        return "every epoch reads the training images in the same order"
    for number, batches in enumerate(read, first_epoch):
        for other, order in orders.items():
            if batches == order and other != number:
                return f"epoch {number} reads the training images in the order of epoch {other}"
    return "the training images are not in the order that the exercise specifies"


def changed_lines(old: str, new: str) -> int:
    """Return the number of added and removed lines of code. Indentation does not count."""
    diff = difflib.unified_diff(code_lines(old), code_lines(new), n=0, lineterm="")
    return sum(line[0] in "+-" for line in list(diff)[2:])


def code_lines(text: str) -> list[str]:
    """Return the lines of a program without imports, docstrings, comments and blank lines."""
    omitted: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (
            is_text or isinstance(node, ast.Import | ast.ImportFrom)
        ):
            omitted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [line.strip() for n, line in enumerate(text.splitlines(), 1) if n not in omitted]
    return [line for line in lines if line and not line.startswith("#")]


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="folder for the script's files")
    parser.add_argument("--kill-after", type=int, default=-1, help="epoch after which to kill it")
    options = grading.read(parser)
    if options.report:
        patience = limit("ACCEL_DEMO_PATIENCE", PATIENCE)
        arguments = (options.answer, options.folder, EPOCHS, options.report, options.kill_after)
        recorder_91.run(*arguments, patience)
    else:
        sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))
