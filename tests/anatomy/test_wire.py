"""Every message arrives unchanged, and is logged once, by its sender."""

import pytest
import torch

from accel_demo.anatomy.wire import Wire
from tests.conftest import GPUS, VISIBLE_GPUS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def pass_on(device):
    """Send tensors of every dtype around the ring; return failures, messages, and bytes sent."""
    wire, wrong = Wire(), []
    right, left = (wire.rank + 1) % wire.world_size, (wire.rank - 1) % wire.world_size
    for step, dtype in enumerate(DTYPES):
        for shape in ((0,), (), (3,), (2, 3)):
            outgoing = torch.full(shape, wire.rank, device=device).to(dtype)
            incoming = torch.full_like(outgoing, 9)
            wire.exchange(outgoing, right, incoming, left, step, "row")
            if not torch.equal(incoming, torch.full_like(outgoing, left)):
                wrong.append((dtype, shape))
        column = torch.zeros(2, 3, device=device).to(dtype).t()
        wire.exchange(torch.ones_like(column), right, column, left, step, "column")
        if not bool((column == 1).all()):
            wrong.append((dtype, "not contiguous"))
    tensor = torch.ones(4, device=device)
    if wire.rank == 0:
        wire.send(tensor[::2], 1, 99, "last")
    if wire.rank == 1:
        part = torch.zeros(4, device=device)
        wire.receive(part[::2], 0)
        wrong += [] if part.tolist() == [1, 0, 1, 0] else [part.tolist()]
    return wrong, wire.messages(), wire.bytes_sent()


def test_every_message_arrives_and_is_logged_once(together):
    check(together(pass_on, 3))


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_every_message_between_gpus_arrives_and_is_logged_once(together):
    check(together(pass_on, 2, environment=VISIBLE_GPUS))


def check(results):
    processes, elements = len(results), 0 + 1 + 3 + 6 + 6
    assert [wrong for wrong, _, _ in results] == [[]] * processes
    messages = results[0][1]
    assert all(other == messages for _, other, _ in results)
    expected = [step for step in range(len(DTYPES)) for _ in range(5 * processes)]
    assert [message.step for message in messages] == [*expected, 99]
    assert all(message.target == (message.source + 1) % processes for message in messages)
    sent = sum(elements * dtype.itemsize for dtype in DTYPES)
    assert [size for _, _, size in results] == [sent + 8, *[sent] * (processes - 1)]
