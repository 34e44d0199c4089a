"""Grade exercise 34: kill training at four random batches, resume it, and compare the weights.

python tutorials/exercises/graders/34.py FILE
python tutorials/exercises/graders/34.py FILE --seed 7    # the same kills again
"""

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import grading
from grading import (
    NotFinished,
    Outcome,
    Wrong,
    flatten,
    largest_difference,
    limit,
    prefixed,
    torch,
)
from ranks import begin_rank, end_rank, run_ranks, start_server, wait_for_reports

from accel_demo.processes.launch import free_port
from accel_demo.wording import counted

PATIENCE = 30  # seconds for one launch of the training; a correct answer takes about one second
WORLD_SIZES = (1, 3)  # with one or two processes, the order of additions makes no difference
EPOCHS, BATCHES, BATCH_SIZE, ACCUMULATE = 3, 10, 4, 2  # BATCHES is per process and epoch
ALL = EPOCHS * BATCHES
# Batches before each kill: after the first checkpoint, early in the second epoch when the newest
# checkpoint is from the first epoch, and after the checkpoints of the second and third epochs.
KILLS = (range(5, 8), range(10, 13), range(16, 20), range(24, ALL))
CONSTANTS = {"EPOCHS": 3, "BATCH_SIZE": 4, "ACCUMULATE": 2, "SAVE_AFTER": (3, 7)}  # of the answer
MOST_LOST = 8  # how many batches may be repeated after a kill
ORDINALS = ("first", "second", "third")
ROUNDING = 1e-4  # a larger difference between weights is not caused by the order of additions
# Headings of page 34
POSITION = "Level 1: what `save_state` does not save"
ORDER = "Level 2: an order that depends only on a seed and the epoch"
EPOCH, WINDOW = "Level 3: the epoch number", "Level 4: no saving inside an accumulation window"
LOADER = "Level 5: the random number a loader draws"
FIRST_STEP = "Level 6: DDP's first step adds in a different order"
EVERY_RANK = "Every rank calls `save_state`"


def judge_all(answer: Path, seed: int) -> str:
    start_server("torch._dynamo")
    deadline = time.monotonic() + limit("ACCEL_DEMO_TIME_LIMIT", grading.TIME_LIMIT)
    draw = random.Random(seed)
    kills = [draw.choice(batches) for batches in KILLS]
    for world_size in WORLD_SIZES:
        try:
            judge_kills(answer, world_size, kills, deadline)
        except Wrong as mistake:
            where = f"on {counted(world_size, 'process')}"
            grader = "python tutorials/exercises/graders/34.py FILE"
            same = f"(To repeat the same kills: {grader} --seed {seed})"
            raise type(mistake)(f"{where}, {mistake}\n{same}", mistake.read) from None
    return (
        "level 6, the last. The final weights are bitwise identical with and without kills, on one "
        f"process and on three. The runs were killed after {', '.join(map(str, kills))} batches"
    )


def judge_kills(answer: Path, world_size: int, kills: list[int], deadline: float) -> None:
    """Kill a run several times. After each kill, let a copy of the run finish, and judge it."""
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = train(answer, world_size, Path(folder, "uninterrupted"), deadline)
        judge_uninterrupted(uninterrupted)
        run, resumed_at = Path(folder, "killed"), 0
        for done in kills:
            with prefixed(f"killed after {done} batches: "):
                train(answer, world_size, run, deadline, kill_after=done - resumed_at)
                shutil.copytree(run / "answers", run / "copy")
                resumed = train(answer, world_size, run, deadline)
                judge_resumed(uninterrupted, resumed, done, run)
            resumed_at = ALL - len(resumed[0]["samples"])
            shutil.rmtree(run / "answers")
            (run / "copy").rename(run / "answers")


def train(
    answer: Path, world_size: int, run: Path, deadline: float, kill_after: int | None = None
) -> list[dict]:
    """Run the training in the folder `run`, and return the observation of each rank.

    If `kill_after` is given, the ranks kill themselves after this many batches. Then return [].
    """
    reports = run / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    for earlier in reports.iterdir():
        earlier.unlink()
    (run / "answers").mkdir(exist_ok=True)
    patience = limit("ACCEL_DEMO_PATIENCE", PATIENCE)
    end = min(time.monotonic() + patience, deadline)
    arguments = (answer, run, world_size, free_port(), kill_after)
    exit_codes = run_ranks(run_rank, world_size, *arguments, end=end, is_over=any)
    failed = [code for code in exit_codes if code]
    if None in exit_codes and not failed:
        if end == deadline:
            seconds = limit("ACCEL_DEMO_TIME_LIMIT", grading.TIME_LIMIT)
            raise NotFinished(f"all launches together have not finished after {seconds:g} s")
        raise NotFinished(
            f"a launch has not finished after {patience:g} s: is there an infinite loop, or is a "
            "rank waiting for another?"
        )
    is_killed = kill_after is not None and set(failed) == {-signal.SIGKILL}
    outcome = Outcome(
        0 if is_killed or not failed else failed[0], "", grading.read_reports(reports), 0
    )
    grading.check(outcome, (world_size,))
    if kill_after is not None and not is_killed:
        raise Wrong(f"it ended before the kill, after fewer than {kill_after} more batches")
    by_rank = [outcome.reports[f"{world_size}-{rank}"]["seen"] for rank in range(world_size)]
    return [observation for seen in by_rank for observation in seen]


def run_rank(
    rank: int, answer: Path, run: Path, world_size: int, port: int, kill_after: int | None
) -> None:
    begin_rank(rank, world_size, port)
    reports, samples = run / "reports", []

    def begin_batch(numbers):
        if len(samples) == kill_after:
            report = {"mistake": "", "seen": []}
            grading.write_report(reports, f"{world_size}-{rank}", report)
            wait_for_reports(reports, world_size)  # to kill all ranks at the same batch
            os.kill(os.getpid(), signal.SIGKILL)
        samples.append([int(number) for number in numbers])

    arguments = (answer, run / "answers", world_size, samples, begin_batch)
    end_rank(reports, rank, world_size, grading.fill_in({}, observe, *arguments))


def observe(
    answer: Path, folder: Path, world_size: int, samples: list, begin_batch
) -> Iterator[dict]:
    """Train with the answer. Yield what each batch used, the number of steps, and the weights.

    "masks" and "weights_before" have a digest for each batch: of the elements that dropout has set
    to 0, and of the first layer's weights. "has_leftover_gradient" is true if there were gradients
    before the first batch, and "passes_after_load" counts uses of dropout after `load_state` and
    before the first batch.
    """
    from accelerate import Accelerator, PartialState
    from torch.nn.functional import mse_loss
    from torch.nn.modules.module import register_module_forward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import TensorDataset

    masks, weights_before, steps = {}, {}, []
    is_loaded, has_leftover_gradient, passes_after_load = False, False, 0
    load_state = Accelerator.load_state

    def load(*arguments, **options):
        nonlocal is_loaded
        load_state(*arguments, **options)
        is_loaded = True

    def digest(tensor) -> str:
        return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()

    def after_forward(module, inputs, output) -> None:
        nonlocal has_leftover_gradient, passes_after_load
        batch = len(samples) - 1
        if batch < 0 and isinstance(module, torch.nn.Dropout) and module.training and module.p:
            passes_after_load += is_loaded
        if batch == 0:
            for parameter in module.parameters():
                has_leftover_gradient |= parameter.grad is not None and bool(parameter.grad.any())
        if batch >= 0 and isinstance(module, torch.nn.Dropout) and module.training and module.p:
            masks[batch] = digest(output == 0)
        if batch >= 0 and isinstance(module, torch.nn.Linear):
            weights_before.setdefault(batch, digest(module.weight))

    def after_step(*_) -> None:
        if samples:  # not in a pass before the first batch
            steps.append(len(samples))

    Accelerator.load_state = load
    count = BATCHES * BATCH_SIZE * world_size
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(dim=1, keepdim=True)
    dataset = TensorDataset(torch.arange(count), inputs, targets)
    register_module_forward_hook(after_forward)
    register_optimizer_step_post_hook(after_step)
    module = grading.import_answer(answer)
    for name, value in CONSTANTS.items():
        if getattr(module, name, value) != value:
            raise Wrong(f"{name} was changed: keep {name} = {value}")
    model = module.train(folder, dataset, begin_batch)
    if not isinstance(model, torch.nn.Module):
        raise Wrong(f"train returned {type(model).__name__} instead of the model")
    if (connected := PartialState().num_processes) != world_size:
        raise Wrong(f"Accelerate connected {counted(connected, 'process')}: keep cpu=use_cpu()")
    weights = flatten(model.parameters())
    model.eval()
    with torch.no_grad():
        loss = mse_loss(model(inputs), targets) / mse_loss(torch.zeros_like(targets), targets)
    yield {
        "samples": samples,
        "masks": [masks[batch] for batch in sorted(masks)],
        "weights_before": [weights_before[batch] for batch in sorted(weights_before)],
        "steps": len(steps),
        "has_leftover_gradient": has_leftover_gradient,
        "passes_after_load": passes_after_load,
        "weights": weights.numpy().tobytes().hex(),
        "relative_loss": loss.item(),
    }


def judge_uninterrupted(uninterrupted: list[dict]) -> None:
    """Check that the uninterrupted run trains as the exercise requires."""
    for rank in uninterrupted:
        if len(rank["samples"]) != ALL:
            raise Wrong(
                f"an uninterrupted run had {len(rank['samples'])} batches, not {ALL}: "
                "call begin_batch once per batch, and train all epochs"
            )
    epochs = [
        [rank["samples"][first : first + BATCHES] for rank in uninterrupted]
        for first in range(0, ALL, BATCHES)
    ]
    for epoch in epochs:
        numbers = {number for batches in epoch for batch in batches for number in batch}
        if len(numbers) != BATCHES * BATCH_SIZE * len(uninterrupted):
            raise Wrong(
                "an epoch does not contain every sample exactly once. Do all ranks shuffle with "
                "the same seed?",
                ORDER,
            )
    if epochs[0] in epochs[1:]:
        raise Wrong("without a kill, several epochs read the samples in the same order", EPOCH)
    for rank in uninterrupted:
        if len(rank["masks"]) != ALL:
            raise Wrong(
                f"without a kill, the model used dropout in {len(rank['masks'])} of {ALL} batches "
                "after begin_batch: call it at the start of the batch, and keep the model in "
                "training mode"
            )
        if rank["steps"] != ALL // ACCUMULATE:
            raise Wrong(
                f"without a kill, the optimizer stepped {rank['steps']} times, not "
                f"{ALL // ACCUMULATE}: {ACCUMULATE} batches share a step"
            )
        if not rank["relative_loss"] < 0.9:
            raise Wrong("the loss did not decrease in an uninterrupted run")
    if len({tuple(rank["masks"]) for rank in uninterrupted}) < len(uninterrupted):
        raise Wrong("the ranks draw the same dropout masks: keep the seeds device-specific", ORDER)


def judge_resumed(uninterrupted: list[dict], resumed: list[dict], done: int, run: Path) -> None:
    """Check a run that was killed after `done` batches. Most errors name a level of page 34."""
    followed = [len(rank["samples"]) for rank in resumed]
    resumed_at = ALL - followed[0]  # batches before the restart
    if len(set(followed)) > 1:
        raise Wrong(f"after the restart, the ranks had different numbers of batches: {followed}")
    if resumed_at <= 0:
        if not any(path.is_file() for path in (run / "copy").rglob("*")):
            raise Wrong(
                f"it saved nothing in {done} batches. What does the docstring say about a "
                "checkpoint that cannot be right?",
                WINDOW,
            )
        raise Wrong(
            "it started again from the first batch of the first epoch: level 0. Does the "
            "checkpoint contain the position in the run?",
            POSITION,
        )
    if resumed_at > done:
        raise Wrong(
            f"only {followed[0]} batches followed instead of at least {ALL - done}, so some "
            "batches were never used. In which epochs does it skip batches?",
            POSITION,
        )
    if done - resumed_at > MOST_LOST:
        raise Wrong(
            f"it repeated {done - resumed_at} batches after the kill, but at most "
            f"{MOST_LOST} are allowed"
        )
    judge_samples(uninterrupted, resumed, resumed_at)
    pairs = list(zip(uninterrupted, resumed, strict=True))
    if any(expected["weights"] != rank["weights"] for expected, rank in pairs):
        raise wrong_weights(uninterrupted, resumed, resumed_at, run)


def judge_samples(uninterrupted: list[dict], resumed: list[dict], resumed_at: int) -> None:
    expected = [rank["samples"][resumed_at:] for rank in uninterrupted]
    continued = [rank["samples"] for rank in resumed]
    if continued == expected:
        return
    for epoch, other in permutations(range(EPOCHS), 2):
        first, last, shift = epoch * BATCHES, (epoch + 1) * BATCHES, (other - epoch) * BATCHES
        first = max(first, resumed_at)  # earlier batches of this epoch were not repeated
        order = uninterrupted[0]["samples"][first + shift : last + shift]
        if first < last and continued[0][first - resumed_at : last - resumed_at] == order:
            raise Wrong(
                f"it continued the {ORDINALS[epoch]} epoch with the order of the "
                f"{ORDINALS[other]}: level 1 or 2. Does the order depend only on a seed and the "
                "epoch, and is the epoch set before batches are skipped?",
                EPOCH,
            )
    is_same = [
        before == after
        for pair in zip(expected, continued, strict=True)
        for before, after in zip(*pair, strict=True)
    ]
    raise Wrong(
        f"only {sum(is_same)} of {len(is_same)} batches after the checkpoint have the same samples "
        "as without a kill: level 1. Does the order depend only on a seed and the epoch?",
        ORDER,
    )


def wrong_weights(
    uninterrupted: list[dict], resumed: list[dict], resumed_at: int, run: Path
) -> Wrong:
    """Return why the weights differ, although the samples are the same."""
    but = f"it continued after {resumed_at} batches with the right samples, but the weights differ"
    now, before = resumed[0]["weights_before"][0], uninterrupted[0]["weights_before"]
    if now != before[resumed_at]:
        which = f" (they are those after {before.index(now)} batches)" if now in before else ""
        return Wrong(
            f"it continued after {resumed_at} batches, but its weights differ from those of a run "
            f"without a kill at that point{which}. Were the position and the weights saved after "
            "the same batch?",
            POSITION,
        )
    if resumed_at % ACCUMULATE:
        return Wrong(f"{but}: level 3. Which gradients existed when it saved?", WINDOW)
    if any(rank["has_leftover_gradient"] for rank in resumed):
        return Wrong(
            f"{but}: there were gradients before its first batch. Where do they come from, and "
            "does zero_grad have an effect there?",
            FIRST_STEP,
        )
    for number, (expected, rank) in enumerate(zip(uninterrupted, resumed, strict=True)):
        if expected["masks"][resumed_at:] == rank["masks"]:
            continue
        if any(run.rglob("random_states_0.*")) and not any(run.rglob(f"random_states_{number}.*")):
            return Wrong(f"{but}: the checkpoint has no random states of rank {number}", EVERY_RANK)
        if rank["passes_after_load"]:
            why = "because the model drew dropout masks between load_state and the first batch"
            return Wrong(f"{but}, {why}", FIRST_STEP)
        return Wrong(
            f"{but}, because the dropout masks differ: level 4. What else draws random "
            "numbers or sets a seed?",
            LOADER,
        )
    difference = largest_difference(
        *(grading.vector(one[0]["weights"]) for one in (uninterrupted, resumed))
    )
    if len(resumed) > 2 and difference < ROUNDING:
        return Wrong(
            f"{but} by at most {difference:.0e}, although the dropout masks are also the same: "
            "level 5. What is different in the first step after a restart?",
            FIRST_STEP,
        )
    return Wrong(
        f"{but} by up to {difference:.0e}. Was the state of the optimizer restored?", POSITION
    )


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="random seed")
    options = grading.read(parser)
    sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer, options.seed)))
