"""Test the count of the bytes that exist, after each operation."""

import torch
import torch.distributed as dist
from torch import nn

from accel_demo.anatomy.live import LiveBytes


def test_views_are_counted_once_and_freed_tensors_no_longer():
    with LiveBytes() as live:
        first = torch.zeros(1000)
        view = first.view(10, 100)[2:]
        assert live.now() == live.peak == 4000
        del first
        assert live.now() == 4000, "the view keeps the whole memory"
        del view
        second = torch.zeros(500)
        assert (live.now(), live.peak) == (2000, 4000)
        live.peak = 0
        second.add_(1)
        assert live.peak == 2000


def test_gradients_and_what_autograd_saves_are_counted():
    layer = nn.Linear(100, 100, bias=False)
    layer(torch.ones(1, 100)).sum().backward()
    size = layer.weight.nbytes
    with LiveBytes(layer.parameters()) as live:
        assert live.now() == 2 * size
        layer.zero_grad()
        assert live.now() == size
        output = layer(torch.ones(1, 100)).relu()
        assert live.now() == size + 2 * 400, "the input, and relu's output"
        output.sum().backward()
        assert live.now() == 2 * size + 400


def gathered_bytes(device):
    """Return the processes, and the bytes before, with and after a gathered tensor."""
    own = torch.ones(1000)
    sizes = []
    with LiveBytes([own]) as live:
        sizes.append(live.now())
        whole = own.new_empty(1000 * dist.get_world_size())
        dist.all_gather_into_tensor(whole, own)
        sizes.append(live.now())
        del whole
        own.add_(1)
        sizes.append(live.now())
    return dist.get_world_size(), sizes


def test_a_tensor_of_a_collective_is_counted_until_it_is_freed(together):
    for connected, sizes in together(gathered_bytes, 2):
        assert (connected, sizes) == (2, [4000, 12000, 4000])
