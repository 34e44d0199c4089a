"""All-reduce in three ways, on 2, 4 and 8 ranks: how much does the busiest rank send?

python tutorials/05_ring.py
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from accel_demo.anatomy.ring import ALGORITHMS
from accel_demo.anatomy.wire import Wire
from accel_demo.errors import Parser, UserError, one_line_errors
from accel_demo.processes.environment import is_launched
from accel_demo.processes.group import run_in_group
from accel_demo.show import table

RANKS = (2, 4, 8)
ELEMENTS = 960  # float32 numbers, S bytes
FIRST = [1e8, 1.0, -1e8]  # what the first ranks have in each element; the others have 0


def main() -> None:
    if is_launched():
        raise UserError("this starts its own processes: start it with python, without a launcher")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            run_in_group(measure, ranks, Path(folder, f"{ranks}.json"))
        found = [json.loads(Path(folder, f"{ranks}.json").read_text()) for ranks in RANKS]
    rows = [[name, *one[name]] for name in ALGORITHMS for one in found]
    print(table(["all-reduce", "ranks", "the busiest sends", "same bits on all ranks"], rows))
    print(f"\nFrom {RANKS[0]} ranks to {RANKS[-1]}, what the busiest rank sends grows")
    for name in ALGORITHMS:
        print(f"- from {found[0][name][1]} to {found[-1][name][1]} in {name}")


def measure(device: torch.device, report: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.full((ELEMENTS,), FIRST[rank] if rank < len(FIRST) else 0.0, device=device)
    found = {}
    for name, all_reduce in ALGORITHMS.items():
        wire, total = Wire(), mine.clone()
        all_reduce(total, wire)
        everyone = [None] * ranks
        dist.all_gather_object(everyone, (wire.bytes_sent(), total.tolist()))
        busiest = max(sent for sent, _ in everyone) / mine.nbytes
        same = all(values == everyone[0][1] for _, values in everyone)
        found[name] = (ranks, f"{busiest:g} × S", "yes" if same else "no")
    if rank == 0:
        report.write_text(json.dumps(found))


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
