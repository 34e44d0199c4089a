"""Kill a save at each change of a file or folder, and see which checkpoint a resume would load.

python tutorials/35_protocol.py --plot protocol.svg  # on Linux or macOS
"""

import itertools
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.lab.course.originals import EXERCISES
from accel_demo.options import Parser

sys.path.insert(0, str(EXERCISES / "graders"))
from kill_points import call_in_process

NAMES = ["model.bin", "optimizer.bin"]
COLORS = {"step 9": show.COLORS[0], "step 12": show.COLORS[2], "parts of both": show.COLORS[3]}
Files = dict[str, bytes]


def files_of(step: int) -> Files:
    return {name: f"{name} after step {step}".encode() for name in NAMES}


def overwrite(folder: Path, step: int) -> None:
    """Write over the files of the last checkpoint."""
    for name, content in files_of(step).items():
        (folder / name).write_bytes(content)


def write_then_rename(folder: Path, step: int) -> None:
    """Write a new folder, and give it its name when it is complete."""
    new = folder / ".unfinished"
    new.mkdir()
    for name, content in files_of(step).items():
        (new / name).write_bytes(content)
    new.rename(folder / f"step-{step}")


def after_overwriting(folder: Path) -> Files:
    return {name: (folder / name).read_bytes() for name in NAMES}


def after_renaming(folder: Path) -> Files:
    steps = [int(each.name.removeprefix("step-")) for each in folder.glob("step-*")]
    return after_overwriting(folder / f"step-{max(steps)}")


METHODS = {
    "overwrite": (overwrite, after_overwriting),
    "write, then rename": (write_then_rename, after_renaming),
}


def loaded(save: Callable, load: Callable, kill_at: int) -> tuple[str | None, str]:
    """Save step 9, then kill the save of step 12. Return where, and what a resume would load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, 9)
        killed, _ = call_in_process(partial(save, folder, 12), "save", folder, kill_at)
        found = load(folder)
    same = [step for step in (9, 12) if found == files_of(step)]
    return killed, f"step {same[0]}" if same else "parts of both"


def main(plot: Path | None) -> None:
    rows, strips = [], {}
    for method, (save, load) in METHODS.items():
        strips[method] = []
        for point in itertools.count(1):
            killed, result = loaded(save, load, point)
            if killed is None:
                break
            strips[method].append(result)
            rows.append([method, killed, result])
        rows.append([method, "after the save", result])
        strips[method].append(result)
    print(show.table(["method", "killed …", "a resume loads"], rows))
    if plot:
        draw(strips, plot)


def draw(strips: dict[str, list[str]], path: Path) -> None:
    """Draw a cell for each moment of a save, with the color of what a resume would load."""
    figure = show.new_figure(5.2, 2.6)
    axis = figure.subplots()
    for place, results in enumerate(strips.values()):
        for moment, result in enumerate(results):
            axis.barh(place, 0.94, left=moment, color=COLORS[result], height=0.6)
    for result, color in COLORS.items():
        axis.barh([0], [0], color=color, label=result)
    axis.set_yticks(range(len(strips)), list(strips))
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.set_xlabel("moments of the save of step 12, from left to right", fontsize=9)
    axis.set_title("If the save is killed here, a resume loads", loc="left", fontsize=10)
    place = {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.2)}
    axis.legend(frameon=False, fontsize=9, ncols=3, handlelength=1, **place)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    show.save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        main(Parser(__doc__, plot=True).parse_args().plot)
