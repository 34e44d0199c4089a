"""Count the bytes that the busiest rank sends in three all-reduce algorithms on 2, 4 and 8 ranks.

python tutorials/21_ring.py
python tutorials/21_ring.py --plot bytes.png
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy.ring import ALGORITHMS
from accel_demo.anatomy.traffic import FORMULAS
from accel_demo.anatomy.wire import Wire
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.environment import is_launched
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table

RANKS = (2, 4, 8)
ELEMENTS = 960  # float32 numbers; in the table, S is their total size in bytes
MOST_RANKS = 12  # the largest N in the picture
FIRST = [1e8, 1.0, -1e8]  # value of all elements on rank 0, 1 and 2; on higher ranks it is 0


def main() -> None:
    options = Parser(__doc__, plot=True).parse_args()
    if is_launched():
        raise UserError(
            "this program starts its own processes. Start it with python, without a launcher."
        )
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            run_in_group(measure, ranks, Path(folder, f"{ranks}.json"))
        results = {ranks: json.loads(Path(folder, f"{ranks}.json").read_text()) for ranks in RANKS}
    sent = {name: {ranks: results[ranks][name][0] for ranks in RANKS} for name in ALGORITHMS}
    rows = [
        [name, ranks, f"{sent[name][ranks]:g} × S", results[ranks][name][1]]
        for name in ALGORITHMS
        for ranks in RANKS
    ]
    print(table(["all-reduce", "ranks", "busiest rank sends", "same bits on all ranks"], rows))
    if options.plot:
        draw(sent, options.plot)


def measure(device: torch.device, report: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = torch.full((ELEMENTS,), FIRST[rank] if rank < len(FIRST) else 0.0, device=device)
    results = {}
    for name, all_reduce in ALGORITHMS.items():
        wire, total = Wire(), values.clone()
        all_reduce(total, wire)
        by_rank = [None] * ranks
        dist.all_gather_object(by_rank, (wire.bytes_sent(), total.tolist()))
        busiest = max(sent for sent, _ in by_rank) / values.nbytes
        same = all(summed == by_rank[0][1] for _, summed in by_rank)
        results[name] = busiest, "yes" if same else "no"
    if rank == 0:
        report.write_text(json.dumps(results))


def draw(counted: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the bytes that the busiest rank sends, as the formulas predict and as counted.

    `counted` maps the name of each all-reduce to {number of ranks: bytes / S}.
    """
    styles = {
        "gather + broadcast": {"color": "#bbbbbb", "linewidth": 6},
        "naive ring": {"color": "black", "linestyle": "--"},
        "chunked ring": {"color": COLORS[0], "linewidth": 2.5},
    }
    figure = new_figure(4.9, 3.5)
    axes = figure.subplots()
    rank_counts = range(2, max(MOST_RANKS, *counted["chunked ring"]) + 1)
    for name, style in styles.items():
        sent = [FORMULAS[name][0](0, [1] * ranks)[0] / ranks for ranks in rank_counts]  # S = N
        axes.plot(rank_counts, sent, label=name, **style)
        dots = {"color": "black", "markerfacecolor": "white", "zorder": 9}
        axes.plot(list(counted[name]), list(counted[name].values()), "o", **dots)
    axes.plot([], [], "o", color="black", markerfacecolor="white", label="counted in this run")
    axes.axhline(2, color=COLORS[0], linestyle=":", label="2 × S")
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter("{x:g} × S")
    axes.set_xlabel("N, the number of ranks", fontsize=10)
    axes.set_ylabel("bytes sent by the busiest rank\n(S is the size of the tensor)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10, loc="upper left")
    save(figure, path)


if __name__ == "__main__":
    with one_line_errors():
        main()
