"""Run 10_where_am_i.py with each launcher. Count how many processes start, and how many connect.

python tutorials/10_every_way.py
python tutorials/10_every_way.py --plot tutorials/10_where_am_i.svg    # only three launches
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end

PROGRAM = "tutorials/10_where_am_i.py"
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
CONFIG = "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml"
USE_CPU = "ACCELERATE_USE_CPU=true "
# (expected number of connected processes, command)
LAUNCHES = [
    (1, "python {program}"),
    (1, "accelerate launch {program}"),
    (2, "accelerate launch --num_processes 2 {program}"),
    (2, "accelerate launch --cpu --num_processes 2 {program}"),
    (2, "accelerate launch --config_file tutorials/10_multi_cpu.yaml {program}"),
    (2, f"{TORCHRUN} {{program}}"),
    (2, f"{CONFIG} {{program}}"),
    (2, f"{TORCHRUN} {{program}} --cpu"),
    (2, f"{USE_CPU}{TORCHRUN} {{program}}"),
    (2, f"{USE_CPU}accelerate launch --multi_gpu --num_processes 2 {{program}}"),
    (2, f"{TORCHRUN} {{program}} --cpu-if-needed"),
    (2, f"{CONFIG} {{program}} --cpu-if-needed"),
    (2, "python {program} --debug-launcher"),
]
if sys.platform == "darwin":
    LAUNCHES.pop()  # debug_launcher of accelerate 1.15.0 needs the network interface `lo`
DRAWN = (3, 6, 8)  # rows of the table
LINE = re.compile(
    r"RANK=(\w+) LOCAL_RANK=\w+ WORLD_SIZE=(\w+) \| (.*) \| torch group: (\w+) \| received \[(.*)\]"
)


def main(plot: Path | None) -> None:
    commands = [command for _, command in LAUNCHES]
    if plot:
        commands = [commands[row - 1] for row in DRAWN]
    with ThreadPoolExecutor(2) as pool:  # two launches at a time
        all_started = list(pool.map(start, commands))
    if plot:
        draw(list(zip(commands, all_started, strict=True)), plot)
        return
    print("| row | command | expected | started | connected |")
    print("|---|---|---|---|---|")
    for row, (expected, command) in enumerate(LAUNCHES, start=1):
        processes = all_started[row - 1]
        number = connected(processes)
        mark = "" if number == expected else "⚠ "
        shown = command.format(program="…")
        print(f"| {row} | `{shown}` | {expected} | {len(processes)} | {mark}{number} |")


def start(command: str) -> list[dict]:
    """Run the command, and return the values that each process printed."""
    variables = {"ACCELERATE_USE_CPU": "true"} if command.startswith(USE_CPU) else {}
    result = run_to_end(command.removeprefix(USE_CPU).format(program=PROGRAM), **variables)
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


def draw(launches: list[tuple[str, list[dict]]], file: Path) -> None:
    """Draw one panel per launch, with its command, processes, environment and process group."""
    from matplotlib.patches import Rectangle

    titles = {  # {(connected processes, started processes): end of the panel's title}
        (1, 1): "one process instead of two",
        (1, 2): "two unconnected processes",
        (2, 2): "two connected processes",
    }
    figure = show.new_figure(5, 9.6)
    figure.get_layout_engine().set(hspace=0.08)
    panels = figure.subplots(len(launches), 1)
    for axes, row, (command, processes) in zip(panels, DRAWN, launches, strict=True):
        together = connected(processes) > 1
        axes.set(xlim=(0, 10), ylim=(-0.5, 10))
        axes.axis("off")
        color = "#1b5e20" if together else "#b3261e"
        title = f"Row {row}: {titles[connected(processes), len(processes)]}"
        axes.set_title(title, color=color, weight="bold", fontsize=11)

        def box(x, y, width, height, text, axes=axes, **style):
            style = {"facecolor": "#f4f4f4", "edgecolor": "#555555", **style}
            axes.add_patch(Rectangle((x, y), width, height, **style))
            center = (x + width / 2, y + height / 2)
            axes.text(*center, text, ha="center", va="center", fontsize=8.5, linespacing=1.5)

        words = [word.split("/")[-1] for word in command.format(program="…").split()]
        box(0.2, 8.2, 9.6, 1.6, f"{' '.join(words[:2])}\n{' '.join(words[2:])}")
        for index, process in enumerate(processes):
            x = 0.2 + 5 * index if len(processes) > 1 else 2.7
            arrow = {"arrowstyle": "-|>", "color": "#555555"}
            axes.annotate("", (x + 2.3, 6.9), (x + 2.3, 8.2), arrowprops=arrow)
            variables = f"environment:\nRANK={process['rank']}\nWORLD_SIZE={process['world_size']}"
            box(x, 4.9, 4.6, 2, variables, facecolor="#e3edf9")
            axes.annotate("", (x + 2.3, 3.7), (x + 2.3, 4.9), arrowprops=arrow)
            identity, device, kind, backend = process["state"].split(", ")
            text = f"Accelerate:\n{identity}\n{device}, {backend}"
            box(x, 1.7, 4.6, 2, text, edgecolor=color, linewidth=1.8)
        group = processes[0]["group"]
        if together:
            box(0.2, -0.3, 9.6, 0.9, f"process group of {group}", edgecolor=color, linewidth=1.8)
            for x in (2.5, 7.5):
                both = {"arrowstyle": "<|-|>", "color": color}
                axes.annotate("", (x, 0.6), (x, 1.7), arrowprops=both)
        elif group != "none":
            unused = f"process group of {group}, not used by Accelerate"
            box(0.2, -0.3, 9.6, 0.9, unused, edgecolor=color, linestyle="--")
        else:
            axes.text(5, 0.3, "no process group", ha="center", va="center", color=color)
    show.save(figure, file)


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_plot("only draw three of the launches in FILE")
        main(parser.parse_args().plot)
