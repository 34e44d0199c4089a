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
from accel_demo.anatomy.traffic import draw_bytes
from accel_demo.anatomy.wire import Wire
from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.environment import is_launched
from accel_demo.processes.group import run_in_group
from accel_demo.show import table

RANKS = (2, 4, 8)
ELEMENTS = 960  # float32 numbers; in the table, S is their total size in bytes
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
        draw_bytes(sent, options.plot)


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


if __name__ == "__main__":
    with one_line_errors():
        main()
