"""Compare two versions of all-reduce, each built from two simpler collectives.

python tutorials/20_collectives.py --processes 3
"""

import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.anatomy.collectives import (
    all_gather,
    broadcast,
    bytes_sent,
    reduce,
    reduce_scatter,
)
from accel_demo.anatomy.wire import Wire
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group


def through_rank_0(tensor: torch.Tensor, first: Wire, second: Wire) -> None:
    """`reduce`, then `broadcast`"""
    reduce(tensor, 0, first)
    broadcast(tensor, 0, second)


def in_shares(tensor: torch.Tensor, first: Wire, second: Wire) -> None:
    """`reduce_scatter`, then `all_gather`"""
    shares = list(tensor.tensor_split(first.world_size))  # a view of the tensor for each rank
    own_share = shares[first.rank].clone()
    reduce_scatter(own_share, shares, first)
    all_gather(shares, own_share, second)


def main(device: torch.device) -> None:
    values = torch.arange(60.0, device=device) + dist.get_rank()  # 240 bytes
    expected, rows = values.clone(), []
    dist.all_reduce(expected)
    for all_reduce in (through_rank_0, in_shares):
        tensor, first, second = values.clone(), Wire(), Wire()
        all_reduce(tensor, first, second)
        halves, is_same = [first.messages(), second.messages()], [None] * first.world_size
        dist.all_gather_object(is_same, torch.equal(tensor, expected))
        arrows = "; then ".join(
            ", ".join(f"{m.source}→{m.target}" for m in half) for half in halves
        )
        same = "yes" if all(is_same) else "no"
        rows.append([all_reduce.__doc__, arrows, *bytes_sent(sum(halves, [])), same])
    if dist.get_rank() == 0:
        head = ["all-reduce built from", "messages, from → to", "bytes in total"]
        head += ["busiest rank sends", "equals `dist.all_reduce` on every rank"]
        print(show.table(head, rows))


if __name__ == "__main__":
    with one_line_errors():
        options = Parser(__doc__, plot=True, processes=3).parse_args()
        run_in_group(main, options.processes)
