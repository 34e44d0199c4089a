"""Launch 10_where_am_i.py in several ways. Count how many processes start, and how many connect.

python tutorials/10_every_way.py
python tutorials/10_every_way.py --more    # nine more launches
python tutorials/10_every_way.py --plot tutorials/10_where_am_i.svg
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end

COURSE = Path(__file__).parent.parent
PROGRAM = "tutorials/10_where_am_i.py"
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
CONFIG = "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml"
USE_CPU = "ACCELERATE_USE_CPU=true "
# (expected number of connected processes, command)
LAUNCHES = [
    (1, "python {program}"),
    (2, "accelerate launch --num_processes 2 {program}"),
    (2, f"{TORCHRUN} {{program}}"),
    (2, f"{TORCHRUN} {{program}} --cpu"),
    (1, "accelerate launch {program}"),
    (2, "accelerate launch --cpu --num_processes 2 {program}"),
    (2, "accelerate launch --config_file tutorials/10_multi_cpu.yaml {program}"),
    (2, f"{CONFIG} {{program}}"),
    (2, f"{USE_CPU}{TORCHRUN} {{program}}"),
    (2, f"{USE_CPU}accelerate launch --multi_gpu --num_processes 2 {{program}}"),
    (2, f"{TORCHRUN} {{program}} --cpu-if-needed"),
    (2, f"{CONFIG} {{program}} --cpu-if-needed"),
    (2, "python {program} --debug-launcher"),
]
if sys.platform == "darwin":
    LAUNCHES.pop()  # debug_launcher of accelerate 1.15.0 needs the network interface `lo`
MAIN, DRAWN = (1, 2, 3, 4), (3, 4)  # rows of the table
LINE = re.compile(
    r"RANK=(\w+) LOCAL_RANK=\w+ WORLD_SIZE=(\w+) \| (.*) \| torch group: (\w+) \| received \[(.*)\]"
)


def main(plot: Path | None, more: bool) -> None:
    rows = DRAWN if plot else range(len(MAIN) + 1, len(LAUNCHES) + 1) if more else MAIN
    launches = [LAUNCHES[row - 1] for row in rows]
    with ThreadPoolExecutor(2) as pool:  # two launches at a time
        all_started = list(pool.map(start, [command for _, command in launches]))
    if plot:
        draw(all_started, plot)
        return
    print("| row | command | expected | started | connected |")
    print("|---|---|---|---|---|")
    for row, (expected, command), processes in zip(rows, launches, all_started, strict=True):
        number = connected(processes)
        mark = "" if number == expected else "⚠ "
        shown = command.format(program="…")
        print(f"| {row} | `{shown}` | {expected} | {len(processes)} | {mark}{number} |")


def start(command: str) -> list[dict]:
    """Run the command, and return the values that each process printed."""
    variables = {"ACCELERATE_USE_CPU": "true"} if command.startswith(USE_CPU) else {}
    result = run_to_end(
        command.removeprefix(USE_CPU).format(program=PROGRAM), cwd=COURSE, **variables
    )
    matches = [LINE.fullmatch(line) for line in sorted(result.stdout.splitlines())]
    if result.returncode != 0 or None in matches:
        raise RuntimeError(f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}")
    names = ("rank", "world_size", "state", "group", "received")
    return [dict(zip(names, line.groups(), strict=True)) for line in matches]


def connected(processes: list[dict]) -> int:
    """Return how many processes are connected, which is how many ranks each process received."""
    counts = {len(process["received"].split(",")) for process in processes}
    if len(counts) != 1:
        raise RuntimeError(f"the processes received different numbers of ranks: {processes}")
    return counts.pop()


def draw(all_started: list[list[dict]], file: Path) -> None:
    """Draw one panel per launch, with its command, processes, environment and process group."""
    titles = {  # {(connected processes, started processes): end of the panel's title}
        (1, 2): "two clones",
        (2, 2): "two connected processes",
    }
    figure = show.new_figure(4.8, 8.4)  # one below the other, so that a phone shows the words
    panels = figure.subplots(len(all_started), 1)
    for axes, row, processes in zip(panels, DRAWN, all_started, strict=True):
        number, group = connected(processes), processes[0]["group"]
        color = "#1b5e20" if number > 1 else "#b3261e"
        axes.set(xlim=(0, 10), ylim=(0, 10))
        axes.axis("off")
        title = f"Row {row}: {titles[number, len(processes)]}"
        axes.set_title(title, color=color, weight="bold", fontsize=10.5)
        words = LAUNCHES[row - 1][1].format(program="…").split()
        box(axes, (0.1, 8.3, 9.8, 1.6), f"{' '.join(words[:2])}\n{' '.join(words[2:])}")
        for index, process in enumerate(processes):
            x = 0.1 + 5.1 * index
            arrow(axes, x + 2.35, 8.3, 7.3)
            variables = f"environment:\nRANK={process['rank']}\nWORLD_SIZE={process['world_size']}"
            box(axes, (x, 5.2, 4.7, 2.1), variables, facecolor="#e3edf9")
            arrow(axes, x + 2.35, 5.2, 4.2)
            identity, device, _, backend = process["state"].split(", ")
            text = f"Accelerate:\n{identity}\n{device}, {backend}"
            box(axes, (x, 2.1, 4.7, 2.1), text, edgecolor=color, linewidth=1.8)
            if number > 1:
                arrow(axes, x + 2.35, 2.1, 1.2, arrowstyle="<|-|>", color=color)
        if number > 1:
            box(
                axes,
                (0.1, 0.1, 9.8, 1.1),
                f"process group of {group}",
                edgecolor=color,
                linewidth=1.8,
            )
        else:
            unused = f"process group of {group}, not used by Accelerate"
            box(axes, (0.1, 0.1, 9.8, 1.1), unused, edgecolor=color, linestyle="--")
    show.save(figure, file)


def box(axes, place: tuple[float, float, float, float], text: str, **style) -> None:
    """Draw a rectangle with a text. `place` is its left and lower edge, width and height."""
    from matplotlib.patches import Rectangle

    x, y, width, height = place
    style = {"facecolor": "#f4f4f4", "edgecolor": "#555555", **style}
    axes.add_patch(Rectangle((x, y), width, height, **style))
    center = (x + width / 2, y + height / 2)
    axes.text(*center, text, ha="center", va="center", fontsize=8.5, linespacing=1.4)


def arrow(axes, x: float, top: float, bottom: float, **style) -> None:
    style = {"arrowstyle": "-|>", "color": "#555555", **style}
    axes.annotate("", (x, bottom), (x, top), arrowprops=style)


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_plot("draw two of the launches to FILE instead")
        parser.add_argument("--more", action="store_true", help="run the other launches instead")
        options = parser.parse_args()
        main(options.plot, options.more)
