"""Grade exercise 11: kill the training at three random batches, go on, and compare the weights.

python tutorials/exercises/graders/11.py FILE
"""

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from accel_demo.processes.environment import QUIET, RANK_VARIABLES, rank_environment
from accel_demo.processes.launch import free_port
from accel_demo.wording import counted

TIME_LIMIT = 60  # seconds for one start; without a mistake it takes a few
EPOCHS, BATCHES, BATCH_SIZE = 3, 10, 4  # batches per process and epoch
ALL = EPOCHS * BATCHES
KILLS = range(14, ALL)  # batches done at the kill: from the second epoch on, after its first save
MAY_COST = 8  # batches
# Each start is a process of its own. A server that has imported torch already forks it.
PROCESSES = multiprocessing.get_context("forkserver")


def main(answer: Path, seed: int) -> int:
    """Say what is wrong at the first kill after which something is; 0 where nothing is."""
    os.environ.update(QUIET)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    PROCESSES.set_forkserver_preload(["accelerate", "torch._dynamo"])
    kills = sorted(random.Random(seed).sample(KILLS, 3))
    points = f"{kills[0]}, {kills[1]} and {kills[2]} batches (--seed {seed})"
    for world_size in (1, 2):
        where = f"on {counted(world_size, 'process')}"
        try:
            grade(answer, world_size, kills)
        except Wrong as mistake:
            print(f"wrong: {where}, {mistake}\n(The kills were drawn: after {points}.)")
            return 1
    print(
        "right: the last rung. The weights are the same, bit for bit, as without a kill: on one "
        f"process and on two, killed after {points}"
    )
    return 0


class Wrong(Exception):
    """What is wrong with the answer, to be read after "on 2 processes,"."""


def grade(answer: Path, world_size: int, kills: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = start(answer, world_size, Path(folder, "whole"))
        check_whole(whole)
        for done in kills:
            run = Path(folder, str(done))
            start(answer, world_size, run, done)
            resumed = start(answer, world_size, run)
            try:
                judge(whole, resumed, done, run)
            except Wrong as mistake:
                raise Wrong(f"killed after {done} batches: {mistake}") from None


def start(answer: Path, world_size: int, run: Path, kill_after: int | None = None) -> list[dict]:
    """Start the training in `run`; the report of each rank. With `kill_after` they die there."""
    run.mkdir(exist_ok=True)
    for leftover in run.glob("rank-*"):
        leftover.unlink()
    (run / "answers").mkdir(exist_ok=True)
    port = free_port()
    ranks = [
        PROCESSES.Process(target=be_rank, args=(answer, run, rank, world_size, port, kill_after))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIME_LIMIT
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        if any(process.exitcode == 1 for process in ranks):  # the others wait for it in vain
            break
    is_over = time.monotonic() >= deadline
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    broken = sorted(run.glob("rank-*.broken"), key=lambda path: path.stat().st_mtime_ns)
    if broken:  # the first is the cause: where one is gone, the others break off too
        raise Wrong(f"the training broke off\n{broken[0].read_text()}")
    if is_over:
        raise Wrong(f"the training did not end within {TIME_LIMIT} s")
    wanted = 0 if kill_after is None else -signal.SIGKILL
    for rank, process in enumerate(ranks):
        if process.exitcode != wanted:
            raise RuntimeError(f"rank {rank} ended with {process.exitcode}, not with {wanted}")
    if kill_after is not None:
        return []
    reports = [json.loads((run / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    for report in reports:
        if report["connected"] != world_size:
            raise Wrong(f"Accelerate connected {report['connected']}: keep `cpu=use_cpu()`")
    return reports


def check_whole(whole: list[dict]) -> None:
    """Whether the training that nobody kills is the one that was asked for."""
    for report in whole:
        if len(report["samples"]) != ALL:
            raise Wrong(
                f"a training that nobody kills has {len(report['samples'])} batches, not {ALL}: "
                "call begin_batch once in each, and train all epochs"
            )
    for first in range(0, ALL, BATCHES):
        epoch = [report["samples"][first : first + BATCHES] for report in whole]
        numbers = [number for batches in epoch for batch in batches for number in batch]
        if len(set(numbers)) != BATCHES * BATCH_SIZE * len(whole):
            raise Wrong(
                "an epoch does not have every sample once, because each rank shuffles in its own "
                "way: give the seedable sampler a data_seed"
            )


def judge(whole: list[dict], resumed: list[dict], done: int, run: Path) -> None:
    """Raise `Wrong`, with the rung on which the answer stands, unless it went on as it should."""
    trained = len(resumed[0]["samples"])
    place = ALL - trained  # where it went on
    if place <= 0:
        raise Wrong(
            "it began again with the first batch of the first epoch, so it does not know its "
            "place: rung 0. Save the epoch and the batches done of it, and skip those"
        )
    if place > done:
        raise Wrong(f"it went on after {place} batches: some were never trained on")
    if done - place > MAY_COST:
        raise Wrong(f"it went on after {place} batches: a kill may cost {MAY_COST} at most")
    same = [
        before == after
        for rank, report in enumerate(resumed)
        for before, after in zip(whole[rank]["samples"][place:], report["samples"], strict=True)
    ]
    if not all(same):
        raise Wrong(
            f"the samples differ: {sum(same)} of {len(same)} batches after the checkpoint have "
            "those of the training that nobody killed. That is below rung 3: is the order drawn "
            "from a seed and the epoch, and is the epoch set before batches are skipped?"
        )
    if all(mine["weights"] == its["weights"] for mine, its in zip(resumed, whole, strict=True)):
        return
    if place % 2:
        raise Wrong(
            f"the samples are right, but the weights differ: rung 3. It went on after {place} "
            "batches, in the middle of an accumulation window, and the gradients of its first "
            "half were lost: save where sync_gradients is true"
        )
    if place % BATCHES == 0:
        raise Wrong(
            f"the samples are right, but the weights differ: it went on after {place} batches, at "
            "the beginning of an epoch. Was the checkpoint taken there?"
        )
    missing = [rank for rank in range(len(whole)) if not any(run.rglob(f"random_states_{rank}.*"))]
    if missing:
        raise Wrong(
            "the samples are right, but the weights differ: the checkpoint has no random states of "
            f"rank {missing[0]}. Call save_state on every rank"
        )
    raise Wrong(
        "the samples are right, but the weights differ, and no window was open: rung 4. Dropout "
        "has got other random numbers: does the loader draw from a generator of its own?"
    )


def be_rank(
    answer: Path, run: Path, rank: int, world_size: int, port: int, kill_after: int | None
) -> None:
    """One process of a start: train, and report. It kills itself after `kill_after` batches."""
    import torch
    from accelerate import PartialState
    from torch.utils.data import TensorDataset

    if world_size > 1:
        os.environ.update(rank_environment(rank, world_size, port))
    sys.stderr = open(run / f"rank-{rank}.stderr", "w")
    samples = []

    def begin_batch(numbers):
        if len(samples) == kill_after:
            (run / f"rank-{rank}.ready").touch()
            while len(list(run.glob("rank-*.ready"))) < world_size:  # as when the power goes
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        samples.append(numbers.tolist())

    count = BATCHES * BATCH_SIZE * world_size
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.arange(count), inputs, inputs.sum(dim=1, keepdim=True))
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.train(run / "answers", dataset, begin_batch)
        digest = hashlib.sha256()
        for weight in model.state_dict().values():
            digest.update(weight.numpy().tobytes())
    except (Exception, SystemExit):
        (run / f"rank-{rank}.broken").write_text(traceback.format_exc(limit=-2))
        os._exit(1)
    state = PartialState()
    report = {
        "connected": state.num_processes,
        "samples": samples,
        "weights": digest.hexdigest(),
    }
    (run / f"rank-{rank}.json").write_text(json.dumps(report))
    state.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the kills")
    options = parser.parse_args()
    sys.exit(main(options.answer.resolve(), options.seed))
