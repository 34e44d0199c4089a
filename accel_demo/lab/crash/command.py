"""Kill a training again and again, and see whether it ends with the same weights.

accel-demo crash
accel-demo crash --processes 2 --kills 20 --seed 7

A twin trains without a break. Then the same training runs beside its folder, and a random rank of
it is killed (SIGKILL) at a random moment: in a step, during a save, or while it starts. Whatever is
left goes on with `--resume auto`, and is killed again. In the end the weights are compared.
"""

import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab import flags

KILLS, QUICK_KILLS = 5, 1
STEPS_PER_EPOCH = 15
STEPS_PER_KILL = 5
LAST_STEPS = 9  # without a kill: one that waits for a save shall find one
BATCH_SIZE = 16
KINDS = ("save", "step", "start-up", "save", "step")  # dealt out again and again, then shuffled
TRAINING = (
    f"--batch-size {BATCH_SIZE} --accumulate 2 --dropout 0.2 --augment --num-workers 1 "
    "--test-samples 200 --eval-batch-size 100 --log-every 1 --checkpoint-every 3"
).split()


@dataclass(frozen=True)
class Kill:
    """When a rank is to be killed: `fraction` of the usual duration after the kind's beginning.

    In a step or a save that is the first one after optimizer step `step`.
    """

    kind: str
    rank: int
    step: int
    fraction: float


def main(arguments: list[str]) -> int:
    """Print a line for each launch as it ends, then what came out. 0 where nothing was lost."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    parser = flags.parser_of("crash", __doc__, quick=f"{QUICK_KILLS} kill instead of {KILLS}")
    flags.add_processes(parser, 1, "ranks of the training")
    help = f"how often to kill a rank (default: {KILLS}; with --quick {QUICK_KILLS})"
    parser.add_argument("--kills", type=int, metavar="N", help=help)
    help = "of the random moments and ranks (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=help)
    parser.add_argument(
        "--telling",
        choices=("train", "train_ddp"),
        default="train",
        help="the train file: with Accelerate (default), or in raw torch.distributed",
    )
    options = flags.read(parser, arguments)
    if options.kills is None:
        options.kills = QUICK_KILLS if options.quick else KILLS
    check(options)

    from accel_demo.lab.crash.report import draw, passed, summary

    with tempfile.TemporaryDirectory(prefix="accel-demo-crash-") as folder:
        try:
            found = crash(options, Path(folder))
        except KeyboardInterrupt:
            print("\nstopped, and everything it had started", file=sys.stderr)
            return 130
    print(summary(found))
    if options.json:
        flags.write_json(options.json, found)
    if options.plot:
        draw(found, options.plot)
    return 0 if passed(found) else 1


def check(options) -> None:
    """Raise `UserError` for what would only be found out after the work."""
    if options.kills < 1:
        raise UserError(f"--kills must be at least 1, got {options.kills}")
    if options.telling == "train" and options.processes > 2:
        raise UserError(
            f"accelerate_configs/ has no {options.processes} processes on the CPU: "
            "choose --processes 1 or 2, or --telling train_ddp"
        )
    launcher(options.telling, options.processes)


def launcher(telling: str, processes: int) -> list[str]:
    """The start of the command line that trains in so many processes."""
    from accel_demo.lab.timed_command import accelerate_launch

    config = "cpu.yaml" if processes == 1 else "cpu_two_processes.yaml"
    words = accelerate_launch(config)  # raises where this is no clone
    if telling == "train_ddp":
        words = ["torchrun", "--standalone", "--nproc-per-node", str(processes)]
    return [*words, f"accel_demo/{telling}.py"]


def plan(kills: int, processes: int, seed: int, total_steps: int) -> list[Kill]:
    """Random kills of all kinds, spread over the training. The same for the same seed."""
    draw = random.Random(seed)
    kinds = (KINDS * kills)[:kills]
    kinds = draw.sample(kinds, kills)
    stretch = (total_steps - LAST_STEPS) / (kills - kinds.count("start-up"))
    planned, begin = [], 0.0
    for kind in kinds:
        step = int(begin + draw.random() * stretch)
        planned.append(Kill(kind, draw.randrange(processes), step, draw.random()))
        if kind != "start-up":  # that one makes no progress
            begin += stretch
    return planned


def crash(options, folder: Path) -> dict:
    """Train the twin and the run that is killed, both below `folder`: all that was found."""
    from accel_demo.lab.crash.launches import Launch
    from accel_demo.lab.crash.report import HEAD, compare, line

    epochs = -(-(STEPS_PER_KILL * options.kills + LAST_STEPS) // STEPS_PER_EPOCH)
    total_steps = epochs * STEPS_PER_EPOCH
    # One micro-batch less: the last step of an epoch has a shorter window.
    samples = (2 * STEPS_PER_EPOCH - 1) * BATCH_SIZE * options.processes
    command = [*launcher(options.telling, options.processes), *TRAINING]
    command += ["--epochs", str(epochs), "--train-samples", str(samples)]

    def launch(run: str, number: int = 0, *flags: str) -> Launch:
        words = [*command, "--run-dir", str(folder / run), *flags]
        return Launch(words, folder / run, options.processes, folder / f"{run}-{number}.stdout")

    print(f"{' '.join(command)}\n{total_steps} steps; the uninterrupted twin …", flush=True)
    with launch("twin") as twin:
        usual = watch_twin(twin)
    print(f"trained in {time.monotonic() - twin.started_at:.0f} s", flush=True)
    print(HEAD, flush=True)
    kills = plan(options.kills, options.processes, options.seed, total_steps)
    rows, newest, whole, farthest, began_at = [], None, [], 0, time.monotonic()
    for number, kill in enumerate([*kills, None], start=1):
        with launch("killed", number, "--resume", "auto") as run:
            if kill is None:
                run.wait()
            else:
                wait_for_moment(run, kill, usual)
                run.kill(kill.rank)
        if run.points and run.ranks_seen_at is not None:
            started = run.points[0][0] - run.ranks_seen_at
            usual["start-up"] = min(usual["start-up"], started)
        row = describe(run, kill, newest, whole, farthest, began_at)
        rows.append(row)
        print(line(number, row), flush=True)
        farthest = max(farthest, run.step)
        newest, whole = row["newest"], row["whole"]
    return {
        "telling": options.telling,
        "processes": options.processes,
        "seed": options.seed,
        "steps": total_steps,
        "usual_seconds": usual,
        "launches": rows,
        "twin_points": [(moment - twin.started_at, step) for moment, step in twin.points],
        **compare(folder / "twin", folder / "killed"),
    }


def watch_twin(twin) -> dict[str, float]:
    """Wait for its end. Gives the usual seconds of a step, a save (a quick one), and a start."""
    saves = []
    while twin.launcher.poll() is None:
        twin.watch(lambda: twin.is_saving() or twin.launcher.poll() is not None)
        if twin.launcher.poll() is not None:
            break
        began_at = time.monotonic()
        twin.watch(lambda: not twin.is_saving())
        saves.append(time.monotonic() - began_at)
    twin.wait()
    twin.connected()
    moments = [moment for moment, _ in twin.points]
    steps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    return {
        "step": statistics.median(steps),
        "save": sorted(saves)[len(saves) // 4],  # most others are not over by then
        "start-up": moments[0] - twin.ranks_seen_at,
    }


def wait_for_moment(run, kill: Kill, usual: dict[str, float]) -> None:
    """Watch the launch until the moment of the kill; no start is waited for beyond its end."""
    run.watch(lambda: run.ranks_seen_at is not None)
    if kill.kind == "start-up":
        moment = time.monotonic() + kill.fraction * usual["start-up"]
        run.watch(lambda: run.points or time.monotonic() >= moment)
        return
    run.watch(lambda: run.points and run.step >= kill.step)
    if kill.kind == "save":
        run.watch(run.is_saving, pause=0.0003)
    moment = time.monotonic() + kill.fraction * usual[kill.kind]
    run.watch(lambda: time.monotonic() >= moment, pause=0.0003)


def describe(run, kill: Kill | None, newest, whole: list, farthest: int, began_at: float) -> dict:
    """What a launch did and has left. `newest` and `whole` are the checkpoints it had found.

    `farthest` is the last step any launch before has trained.
    """
    from accel_demo.run.manifest import Damaged, checkpoints_of, newest_whole, verify

    resumed = run.resumed()
    folder, step = resumed or (None, None)
    row = {
        "connected": run.connected(),
        "resumed_after_step": step,
        "resumed_from": folder and str(folder),
        "from_the_newest_whole": resumed is None or folder == (newest and Path(newest)),
        "from_a_damaged": folder is not None and str(folder) not in whole,
        "reached": run.step or None,
        "replayed": max(0, min(run.step, farthest) - (step or 0)),
        "trained": len(run.points),
        "began": run.started_at - began_at,
        "points": [(moment - began_at, number) for moment, number in run.points],
        "kill": None,
    }
    if kill:
        hit = "save" if run.was_saving else "step" if run.steps_at_kill else "start-up"
        row["kill"] = {**asdict(kill), "hit": hit, "moment": run.killed_at - began_at}
        row["kill"]["seconds_to_end"] = run.ended_at - run.killed_at
    newest, _ = newest_whole(run.run)
    row |= {"newest": newest and str(newest), "whole": [], "damaged": []}
    for checkpoint in checkpoints_of(run.run):
        try:
            verify(checkpoint)
            row["whole"].append(str(checkpoint))
        except Damaged as reason:
            row["damaged"].append(f"{checkpoint}: {reason}")
    row["unfinished"] = run.is_saving()  # though nobody is left to end it
    return row
