"""Show what each process of 91_old.py does if it reads the argument, and if it reads LOCAL_RANK.

python tutorials/91_local_rank.py
python tutorials/91_local_rank.py --plot local_rank.svg
"""

import json
import runpy
import tempfile
from pathlib import Path

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.launch import run_to_end

COMMAND = "torchrun --standalone --nproc-per-node 2"
IMPORTS = "import json\nimport os\n"
REPORT = """
report = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK")}
report |= {"local_rank": local_rank, "device": str(torch.device("cuda", local_rank))}
print(json.dumps({**report, "would print and save": local_rank == 0}) + "\\n", end="")
"""
RED, GREEN, GRAY = "#b3261e", "#1b5e20", "#555555"


def main() -> None:
    options = Parser(__doc__, plot=True).parse_args()
    old = Path(__file__).with_name("91_old.py").read_text().partition("dist.init")[0]
    edits = runpy.run_path(str(Path(__file__).with_name("91_failures.py")))
    new = old.replace(edits["OLD_PARSER"], edits["NEW_RANK"])
    panels = {"--local_rank, default=0": reports(old), "LOCAL_RANK": reports(new)}
    if options.plot:
        draw(panels, options.plot)
        return
    rows = [[title, *process.values()] for title, both in panels.items() for process in both]
    print(show.table(["the script reads", *panels["LOCAL_RANK"][0]], rows))


def reports(first_lines: str) -> list[dict]:
    """Start the first lines of the script in two processes, and return each one's variables."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "91_old.py")
        script.write_text(IMPORTS + first_lines + REPORT)
        result = run_to_end([*COMMAND.split(), str(script)])
    lines = sorted(result.stdout.splitlines())
    if result.returncode != 0 or len(lines) != 2:
        raise RuntimeError(f"expected two processes\n{result.stdout}\n{result.stderr}")
    return [json.loads(line) for line in lines]


def draw(panels: dict[str, list[dict]], path: Path) -> None:
    """Draw for each panel the variables of both processes, and arrows to the GPUs they choose."""
    figure = show.new_figure(5, 6)
    for axes, (title, both) in zip(figure.subplots(len(panels), 1), panels.items(), strict=True):
        devices = [process["device"] for process in both]
        color = GREEN if len(set(devices)) == 2 else RED
        axes.set(xlim=(0, 10), ylim=(-0.9, 7.1))
        axes.axis("off")
        axes.set_title(f"The script reads {title}", color=color, weight="bold", fontsize=11)
        for index, process in enumerate(both):
            left, middle = 5 * index, 5 * index + 2.35
            variables = ", ".join(f"{name}={process[name]}" for name in ("RANK", "LOCAL_RANK"))
            box(axes, left, 5.6, 1.4, f"torchrun sets\n{variables}", "#e3edf9")
            does = "print and save" if process["would print and save"] else "not print or save"
            text = f"local_rank = {process['local_rank']}\nchooses {process['device']}"
            text += f"\nwould {does}"
            box(axes, left, 2.6, 2.2, text, "#f4f4f4", color)
            gpu = f"cuda:{index}"
            box(axes, left, -0.4, 1.4, f"GPU {gpu}", "white", GRAY, gpu in devices)
            arrow(axes, (middle, 5.6), (middle, 4.8), GRAY)
            target = 5 * int(process["device"].removeprefix("cuda:")) + 2.35
            arrow(axes, (middle, 2.6), (target + (0.5 if target < left else 0), 1), color)
    show.save(figure, path)


def box(axes, x, y, height, text, fill, edge=GRAY, is_chosen=True) -> None:
    from matplotlib.patches import Rectangle

    style = {"facecolor": fill, "edgecolor": edge, "linestyle": "-" if is_chosen else "--"}
    axes.add_patch(Rectangle((x + 0.05, y), 4.6, height, linewidth=1.4, **style))
    text = text if is_chosen else f"{text},\nnot chosen by the script"
    axes.text(x + 2.35, y + height / 2, text, fontsize=10, ha="center", va="center")


def arrow(axes, start, end, color) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color})


if __name__ == "__main__":
    with one_line_errors():
        main()
