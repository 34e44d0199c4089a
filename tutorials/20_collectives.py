"""Compare two versions of all-reduce, each built from two simpler collectives.

python tutorials/20_collectives.py --processes 3
"""

import torch
import torch.distributed as dist

from accel_demo import show
from accel_demo.anatomy.collectives import all_gather, broadcast, bytes_sent, reduce_scatter
from accel_demo.anatomy.wire import Wire
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.group import run_in_group


def reduce_to_rank_0(tensor: torch.Tensor, wire: Wire) -> None:
    """Replace rank 0's tensor by the sum of all ranks' tensors."""
    if wire.rank > 0:
        wire.send(tensor, 0)
        return
    received = torch.empty_like(tensor)
    for source in range(1, wire.world_size):
        wire.receive(received, source)
        tensor += received


def through_rank_0(tensor: torch.Tensor, wire: Wire) -> None:
    """`reduce`, then `broadcast`"""
    reduce_to_rank_0(tensor, wire)
    broadcast(tensor, 0, wire)


def in_shares(tensor: torch.Tensor, wire: Wire) -> None:
    """`reduce_scatter`, then `all_gather`"""
    shares = list(tensor.tensor_split(wire.world_size))  # a view of the tensor for each rank
    own_share = shares[wire.rank].clone()
    reduce_scatter(own_share, shares, wire)
    all_gather(shares, own_share, wire)


def main(device: torch.device) -> None:
    values = torch.arange(60.0, device=device) + dist.get_rank()  # 240 bytes
    expected, rows = values.clone(), []
    dist.all_reduce(expected)
    for all_reduce in (through_rank_0, in_shares):
        tensor, wire = values.clone(), Wire()
        all_reduce(tensor, wire)
        log, is_same = wire.messages(), gather_objects(torch.equal(tensor, expected))
        same = "yes" if all(is_same) else "no"
        rows.append([all_reduce.__doc__, len(log), *bytes_sent(log), same])
    if dist.get_rank() == 0:
        head = ["all-reduce built from", "messages", "bytes in total", "busiest rank sends"]
        print(show.table([*head, "equals `dist.all_reduce` on every rank"], rows))


if __name__ == "__main__":
    with one_line_errors():
        options = Parser(__doc__, processes=3).parse_args()
        run_in_group(main, options.processes)
