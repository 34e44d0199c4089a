"""Lose one of two nodes during training in five ways, and compare what happens next.

python tutorials/45_lost_machine.py    # needs root and Linux; takes minutes
"""

import hashlib
import re
import shlex
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.patches import Patch
from tqdm import tqdm

from accel_demo import show
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.environment import environment_for

LOST = "step 33:"  # node 1 is lost as soon as rank 0 has printed this
TRAIN = "torchrun accel_demo/train.py --epochs 3 --checkpoint-every 5 --print-every 1"
TRAIN += " --collective-timeout 10 --resume auto"
TIME_LIMIT = 300  # seconds for one launch
CASES = {  # what happens, and the options of each `accel-demo nodes`
    "nothing": [""],
    "node 1 loses its cable": [f"--cut-after '{LOST}'", ""],
    "node 1 loses its cable, elastic": [f"--elastic --cut-after '{LOST}'"],
    "it loses it for 20 s, elastic": [f"--elastic --cut-after '{LOST}' --cut-for 20"],
    "node 1's processes die, elastic": [f"--elastic --kill-after '{LOST}'"],
    "they die and start again, elastic": [f"--elastic --kill-after '{LOST}' --restart-after 3"],
}
STARTING, WAITING = "starting, or waiting for nodes", "node 1 is lost, node 0 waits"
COLORS = {
    STARTING: "#c0c0c0",
    "training, 4 processes": show.COLORS[0],
    WAITING: show.COLORS[3],
    "training, 2 processes": show.COLORS[5],
}


@dataclass
class Run:
    """What the launches of one case printed, and the final weights."""

    lines: list[tuple[float, str]] = field(default_factory=list)  # (seconds since the start, text)
    digest: str = ""  # of the weights

    def first(self, pattern: str, after: float = 0.0) -> tuple[float, str]:
        """Return the first line that matches and comes later: its second and its last group."""
        for second, line in self.lines:
            if second > after and (match := re.search(pattern, line)):
                return second, match[match.lastindex or 0]
        raise UserError(f"no line matches {pattern!r} ({self.lines[-1][1]})")

    @property
    def lost(self) -> float | None:
        """The second at which node 1 was lost."""
        events = ("--- the cable of node 1", "--- node 1")
        return next((second for second, line in self.lines if line.startswith(events)), None)

    @property
    def processes(self) -> int:
        """The number of processes at the end."""
        starts = [line for _, line in self.lines if "images per step" in line]
        return int(starts[-1].split(" | ")[1].split()[0])


def main(plot: Path | None) -> None:
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(tqdm(CASES, unit="case", leave=False, disable=None)):
            runs[case] = train(case, Path(folder, str(number)))
    print("Errors of the second case:")
    for _, line in runs["node 1 loses its cable"].lines:
        if re.match(r"node \d \| error: ", line):
            print(line)
    head = ["what happens", "noticed after", "trains again after", "from step", "processes"]
    rows = [row(case, run, runs["nothing"].digest) for case, run in runs.items()]
    print("\n" + show.table([*head, "weights"], rows))
    if plot:
        draw(runs, plot)


def train(case: str, folder: Path) -> Run:
    """Run the launches of a case, one after the other."""
    run, start = Run(), time.monotonic()
    for options in CASES[case]:
        command = f"accel-demo nodes {options} -- {TRAIN} --run-dir {folder}"
        process = subprocess.Popen(
            shlex.split(command),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_for({}),
        )
        limit = threading.Timer(TIME_LIMIT, process.kill)
        limit.start()
        assert process.stdout
        for line in process.stdout:
            run.lines.append((time.monotonic() - start, line.rstrip()))
        process.wait()
        limit.cancel()
    if not (folder / "model.safetensors").exists():
        raise UserError(f"{case}: the run has not finished ({run.lines[-1][1]})")
    run.digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return run


def row(case: str, run: Run, undisturbed: str) -> list:
    if run.lost is None:
        return [case, "–", "–", "–", run.processes, "–"]
    noticed, again = (second - run.lost for second in moments(run))
    _, step = run.first(r"resumed from \S+, after step (\d+)")
    weights = "equal" if run.digest == undisturbed else "differ"
    return [case, f"{noticed:.0f} s", f"{again:.0f} s", step, run.processes, weights]


def moments(run: Run) -> tuple[float, float]:
    """Return when node 0 noticed that node 1 was lost, and when it finished a step again."""
    assert run.lost is not None
    noticed, _ = run.first(r"^node 0 \| error: ", run.lost)
    return noticed, run.first(r"step \d+:", noticed)[0]


def phases(run: Run) -> list[tuple[float, str]]:
    """Return (second at which it ends, name) for each phase of a run."""
    ends = [(run.first(r"step \d+:")[0], STARTING)]
    if run.lost is not None:
        noticed, again = moments(run)
        ends += [(run.lost, "training, 4 processes"), (noticed, WAITING), (again, STARTING)]
    return [*ends, (run.first(r"\| done: ")[0], f"training, {run.processes} processes")]


def draw(runs: dict[str, Run], file: Path) -> None:
    """Draw the phases of each run over the time."""
    figure = show.new_figure(8, 3.6)
    axes = figure.subplots()
    for number, run in enumerate(runs.values()):
        start = 0.0
        for end, phase in phases(run):
            axes.barh(number, end - start, left=start, color=COLORS[phase], height=0.6)
            start = end
    axes.set_yticks(range(len(runs)), [case.replace(", ", ",\n") for case in runs])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the launch")
    patches = [Patch(color=color, label=phase) for phase, color in COLORS.items()]
    place = {"loc": "lower center", "bbox_to_anchor": (0.35, 1)}
    axes.legend(handles=patches, frameon=False, ncols=2, **place)
    axes.spines[["top", "right"]].set_visible(False)
    show.save(figure, file)


if __name__ == "__main__":
    with one_line_errors():
        main(Parser(__doc__, plot=True).parse_args().plot)
