"""Draw the ranks of two nodes with two processes each, their ring, and the disks they can read.

python tutorials/44_ranks.py --plot ranks.png
"""

from pathlib import Path

from matplotlib.axes import Axes

from accel_demo import show
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser

NODES, PROCESSES = 2, 2  # PROCESSES is per node
BLUE, GREEN, ORANGE, RED = (show.COLORS[index] for index in (0, 2, 3, 4))
GRAY = "#606060"


def draw(file: Path) -> None:
    figure = show.new_figure(8, 4.6)
    axes = figure.add_subplot(xlim=(-1.1, 8.1), ylim=(-2.0, 3.2))
    axes.axis("off")

    def box(x: float, y: float, text: str, color: str) -> None:
        frame = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": color}
        axes.text(x, y, text, ha="center", va="center", color=color, fontsize=10, bbox=frame)

    places = []  # of the ranks
    for node in range(NODES):
        left = 5 * node
        corners = [left - 1, left - 1, left + 3, left + 3, left - 1]
        axes.plot(corners, [-0.5, 2.6, 2.6, -0.5, -0.5], color=GRAY, linewidth=1)
        axes.text(left + 1, 2.8, f"node {node}", ha="center", fontsize=11, weight="bold")
        axes.plot([left + 1, 3.5], [-0.5, -1.3], ":", color=GRAY, zorder=0)
        for local_rank in range(PROCESSES):
            rank, x = PROCESSES * node + local_rank, left + 2 * local_rank
            kind, color = "", GRAY
            if local_rank == 0:
                kind, color = "\nlocal main process", BLUE
            if rank == 0:
                kind, color = "\nmain process and\nlocal main process", ORANGE
            box(x, 1.1, f"rank {rank}\nlocal rank {local_rank}{kind}", color)
            axes.plot([x, left + 1], [0.8, 0.1], color=GRAY, zorder=0)
            places.append(x)
        box(left + 1, 0, f"disk of node {node}", GREEN)
    halves = [0.92, 0.65, 0.92, 0.65]  # half the width of each rank's box, and a little more
    for rank in range(len(places) - 1):
        start, end = places[rank] + halves[rank], places[rank + 1] - halves[rank + 1]
        arrow(axes, (start, 1.1), (end, 1.1), bend=0)
    arrow(axes, (places[-1], 1.45), (places[0], 1.7), bend=0.13)
    axes.fill_between([3, 4], 0.9, 2.3, color="#e0e0e0", zorder=-1)
    axes.text(3.5, 1.55, "cable", ha="center", color=GRAY, fontsize=10)
    box(3.5, -1.5, "shared folder (over the network)", GREEN)
    show.save(figure, file)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float) -> None:
    """Draw what one rank of the ring sends to the next."""
    style = {"arrowstyle": "->", "color": RED, "connectionstyle": f"arc3,rad={bend}", "lw": 1.5}
    axes.annotate("", end, start, arrowprops=style)


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("--plot", metavar="FILE", type=Path, required=True, help="picture file")
        draw(parser.parse_args().plot)
