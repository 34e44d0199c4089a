"""Draw the ranks of two nodes with two processes each, and the disks that they can read.

python tutorials/44_ranks.py --plot ranks.png
"""

from pathlib import Path

from accel_demo import show
from accel_demo.errors import Parser, one_line_errors
from accel_demo.show import check_outputs

NODES, PROCESSES = 2, 2  # PROCESSES is per node
BLUE, ORANGE, GREEN, GREY = show.COLOURS[0], show.COLOURS[3], show.COLOURS[2], "#606060"


def draw(file: Path) -> None:
    figure = show.new_figure(8, 4.2)
    axes = figure.add_subplot(xlim=(-1.1, 8.1), ylim=(-2.0, 3.0))
    axes.axis("off")

    def box(x: float, y: float, text: str, colour: str) -> None:
        frame = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": colour}
        axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=10, bbox=frame)

    for node in range(NODES):
        left = 5 * node
        corners = [left - 1, left - 1, left + 3, left + 3, left - 1]
        axes.plot(corners, [-0.5, 2.4, 2.4, -0.5, -0.5], color=GREY, linewidth=1)
        axes.text(left + 1, 2.65, f"node {node}", ha="center", fontsize=11, weight="bold")
        axes.plot([left + 1, 3.5], [-0.5, -1.3], ":", color=GREY, zorder=0)
        for local_rank in range(PROCESSES):
            rank, x = PROCESSES * node + local_rank, left + 2 * local_rank
            kind, colour = "", GREY
            if local_rank == 0:
                kind, colour = "local main process", BLUE
            if rank == 0:
                kind, colour = "main process and\nlocal main process", ORANGE
            box(x, 1.1, f"rank {rank}\nlocal rank {local_rank}", colour)
            axes.text(x, 1.9, kind, ha="center", va="center", color=colour, fontsize=10)
            axes.plot([x, left + 1], [0.8, 0.1], color=GREY, zorder=0)
        box(left + 1, 0, f"disk of node {node}", GREEN)
    axes.plot([3, 4], [1.1, 1.1], color=ORANGE, linewidth=3)
    axes.text(3.5, 1.3, "cable", ha="center", color=ORANGE, fontsize=10)
    box(3.5, -1.5, "shared folder (over the network)", GREEN)
    show.save(figure, file)


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("--plot", metavar="FILE", type=Path, required=True, help="picture file")
        options = parser.parse_args()
        check_outputs(options)
        draw(options.plot)
