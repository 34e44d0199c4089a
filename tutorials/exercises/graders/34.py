"""Grade exercise 34: kill training at three random batches, resume it, and compare the weights.

python tutorials/exercises/graders/34.py FILE
"""

import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from accel_demo.lab import grading
from accel_demo.lab.grading import Outcome, Wrong
from accel_demo.processes.environment import QUIET, RANK_VARIABLES, rank_environment
from accel_demo.processes.launch import free_port
from accel_demo.wording import counted

TIME_LIMIT = 60  # seconds per start; a correct answer takes a few seconds
EPOCHS, BATCHES, BATCH_SIZE = 3, 10, 4  # BATCHES is per process and epoch
ALL = EPOCHS * BATCHES
KILLS = range(14, ALL)  # batches before a kill; after 14, epoch 2 has saved a checkpoint
MOST_LOST = 8  # how many batches may be repeated after a kill
# Fork the processes of every start from a server that has already imported torch.
PROCESSES = multiprocessing.get_context("forkserver")


def judge_all(answer: Path, seed: int) -> str:
    os.environ.update(QUIET)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    PROCESSES.set_forkserver_preload(["accelerate", "torch._dynamo"])
    kills = sorted(random.Random(seed).sample(KILLS, 3))
    points = f"{kills[0]}, {kills[1]} and {kills[2]} batches (--seed {seed})"
    for world_size in (1, 2):
        try:
            judge_kills(answer, world_size, kills)
        except Wrong as mistake:
            where = f"on {counted(world_size, 'process')}"
            raise Wrong(
                f"{where}, {mistake}\n(The runs were killed after {points}.)", mistake.read
            ) from None
    return (
        "the last level. The weights are the same, bit for bit, as without a kill, on one process "
        f"and on two. The runs were killed after {points}"
    )


def judge_kills(answer: Path, world_size: int, kills: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = train(answer, world_size, Path(folder, "uninterrupted"))
        judge_uninterrupted(uninterrupted)
        for done in kills:
            run = Path(folder, str(done))
            train(answer, world_size, run, done)
            resumed = train(answer, world_size, run)
            try:
                judge_resumed(uninterrupted, resumed, done, run)
            except Wrong as mistake:
                raise Wrong(f"killed after {done} batches: {mistake}", mistake.read) from None


def train(answer: Path, world_size: int, run: Path, kill_after: int | None = None) -> list[dict]:
    """Run the training in the folder `run`, and return the observation of each rank.

    If `kill_after` is given, the ranks kill themselves after so many batches, and [] is returned.
    """
    reports = run / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    for earlier in reports.iterdir():
        earlier.unlink()
    (run / "answers").mkdir(exist_ok=True)
    shared = (answer, run, world_size, free_port(), kill_after)
    ranks = [PROCESSES.Process(target=be_rank, args=(rank, *shared)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIME_LIMIT
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        if any(process.exitcode == 1 for process in ranks):  # do not wait for the other ranks
            break
    is_late = time.monotonic() >= deadline
    for process in ranks:
        process.kill()
        process.join()
    exit_codes = {process.exitcode for process in ranks}
    is_as_planned = exit_codes == {0 if kill_after is None else -signal.SIGKILL}
    exit_code = None if is_late else 0 if is_as_planned else max(exit_codes)
    outcome = Outcome(exit_code, "", grading.read_reports(reports), TIME_LIMIT)
    grading.check(outcome, (world_size,))
    if not is_as_planned:
        raise RuntimeError(f"the ranks exited with the codes {exit_codes}")
    by_rank = [outcome.reports[f"{world_size}-{rank}"]["seen"] for rank in range(world_size)]
    return [observation for seen in by_rank for observation in seen]


def be_rank(
    rank: int, answer: Path, run: Path, world_size: int, port: int, kill_after: int | None
) -> None:
    from accelerate import PartialState

    if world_size > 1:
        os.environ.update(rank_environment(rank, world_size, port))
    sys.stderr = open(os.devnull, "w")
    reports, name, samples = run / "reports", f"{world_size}-{rank}", []

    def begin_batch(numbers):
        if len(samples) == kill_after:
            grading.write_report(reports, name, {"mistake": "", "seen": []})
            # Wait until every rank has reported, so that all are killed at the same point.
            while len(list(reports.glob("*.json"))) < world_size:
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        samples.append(numbers.tolist())

    arguments = (answer, run / "answers", world_size, samples, begin_batch)
    report = grading.fill_in({}, observe, *arguments)
    grading.write_report(reports, name, report)
    if report["mistake"]:
        os._exit(1)
    PartialState().destroy_process_group()


def observe(
    answer: Path, folder: Path, world_size: int, samples: list, begin_batch
) -> Iterator[dict]:
    import torch
    from accelerate import PartialState
    from torch.utils.data import TensorDataset

    count = BATCHES * BATCH_SIZE * world_size
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.arange(count), inputs, inputs.sum(dim=1, keepdim=True))
    model = grading.import_answer(answer).train(folder, dataset, begin_batch)
    if (connected := PartialState().num_processes) != world_size:
        raise Wrong(f"Accelerate connected {counted(connected, 'process')}: keep cpu=use_cpu()")
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    yield {"samples": samples, "weights": digest.hexdigest()}


def judge_uninterrupted(uninterrupted: list[dict]) -> None:
    """Check that the uninterrupted run uses every sample once per epoch."""
    for rank in uninterrupted:
        if len(rank["samples"]) != ALL:
            raise Wrong(
                f"an uninterrupted training run had {len(rank['samples'])} batches, not {ALL}: "
                "call begin_batch once per batch, and train all epochs"
            )
    for first in range(0, ALL, BATCHES):
        epoch = [rank["samples"][first : first + BATCHES] for rank in uninterrupted]
        numbers = {number for batches in epoch for batch in batches for number in batch}
        if len(numbers) != BATCHES * BATCH_SIZE * len(uninterrupted):
            raise Wrong(
                "an epoch does not have every sample once, because each rank shuffles in a "
                "different order: give the seedable sampler a data_seed"
            )


def judge_resumed(uninterrupted: list[dict], resumed: list[dict], done: int, run: Path) -> None:
    """Check a run that was killed after `done` batches. Most errors name a level of page 34."""
    place = ALL - len(resumed[0]["samples"])  # the run resumed after this many batches
    if place <= 0:
        raise Wrong(
            "it started again with the first batch of the first epoch: level 0. Save the epoch and "
            "the number of finished batches in it, and skip these batches"
        )
    if place > done:
        raise Wrong(f"it continued after {place} batches: some batches were never used")
    if done - place > MOST_LOST:
        raise Wrong(f"it continued after {place} batches: at most {MOST_LOST} may be repeated")
    pairs = list(zip(uninterrupted, resumed, strict=True))
    is_same = [
        before == after
        for expected, rank in pairs
        for before, after in zip(expected["samples"][place:], rank["samples"], strict=True)
    ]
    if not all(is_same):
        raise Wrong(
            f"the samples differ: {sum(is_same)} of {len(is_same)} batches after the checkpoint "
            "are the same as in the uninterrupted run. That is below level 3: does the order "
            "depend only on a seed and the epoch, and is the epoch set before batches are skipped?"
        )
    if all(expected["weights"] == rank["weights"] for expected, rank in pairs):
        return
    but = "the samples are the same, but the weights differ"
    if place % 2:
        raise Wrong(
            f"{but}: level 3. It continued after {place} batches, inside an accumulation window, "
            "so gradients of that window were lost: save only if sync_gradients is true"
        )
    if place % BATCHES == 0:
        raise Wrong(
            f"{but}: it continued after {place} batches, at the beginning of an epoch. Was the "
            "checkpoint saved there?"
        )
    for rank in range(len(resumed)):
        if not any(run.rglob(f"random_states_{rank}.*")):
            raise Wrong(
                f"{but}: the checkpoint has no random states for rank {rank}. Call save_state on "
                "every rank"
            )
    raise Wrong(
        f"{but}, and no window was open: level 4. Dropout has different random numbers: does the "
        "loader have a separate generator?"
    )


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="random seed")
    options = parser.parse_args()
    sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer, options.seed)))
