"""Each strategy uses as many bytes per device as expected from the tensors that it shards."""

import re

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy import memory
from accel_demo.anatomy.memory import DeviceMemory
from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from tests.anatomy.programs import printed, table_rows, words_in
from tests.conftest import GPUS, VISIBLE_GPUS

STRATEGIES = [
    "one process",
    "nn.DataParallel",
    "DDP",
    "DDP, gradients as bucket views",
    "the same, ZeRO optimizer",
    "FSDP2",
]
STATES = {"adamw": 2, "sgd": 1}  # state tensors per parameter: two moments, or the momentum


def count(device, cases, picture):
    """Return the memory for each case, the addresses of DDP's buckets, and the program's output."""
    results = {case: memory.count_all(device, *case) for case in cases}
    addresses = [bucket_addresses(device, views) for views in (False, True)]
    options = {"model": "tiny_cnn", "optimizer": "sgd", "plot": picture}
    return results, addresses, printed(memory.show, device, **options)


def bucket_addresses(device, views: bool) -> list[set[int]]:
    """Return the addresses of DDP's buckets in each of four steps.

    `steps` keeps all buckets alive, so that no address is reused.
    """
    model = memory.make_contiguous_model("tiny_cnn", device)
    wrapped, steps = DistributedDataParallel(model, gradient_as_bucket_view=views), []

    def see_bucket(group, bucket):
        steps[-1].append(bucket.buffer())
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, see_bucket)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):  # `memory.train` runs two steps per call
        batch = memory.batch(device)
        memory.train(wrapped, optimizer, *batch, before_step=lambda: steps.append([]))
    return [{buffer.untyped_storage().data_ptr() for buffer in step} for step in steps]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, [("small_cnn", "adamw"), ("tiny_cnn", "sgd")]),
        pytest.param(3, [("tiny_cnn", "adamw")], marks=pytest.mark.slow),
    ],
)
def test_each_strategy_keeps_the_expected_bytes_on_every_device(
    processes, cases, together, tmp_path
):
    ranks = together(count, processes, cases=cases, picture=tmp_path / "memory.svg")
    expected = [["one process", "rank 0"]]
    expected += [["nn.DataParallel", f"device {index}"] for index in range(processes)]
    expected += [[name, f"rank {rank}"] for name in STRATEGIES[2:] for rank in range(processes)]
    assert [row[:2] for row in table_rows(ranks[0][2])[1:]] == expected
    assert words_in(tmp_path / "memory.svg") >= set(memory.KINDS)
    assert all(text == "" for *_, text in ranks[1:])
    for results, addresses, _ in ranks:
        for first, *later in addresses:  # DDP rebuilds its buckets once, after the first step
            assert len(later) == 3 and later[0] == later[1] == later[2] and later[0]
            assert first.isdisjoint(later[0])  # the new buckets have new addresses
        assert list(results) == cases
        for (model_name, optimizer), memories in results.items():
            model = make_model(TrainConfig(model=model_name))
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            assert list(memories) == STRATEGIES
            check_data_parallel(memories, size, STATES[optimizer], processes)
            check_ddp(memories, size, STATES[optimizer], processes)
            check_fsdp(memories["FSDP2"], model, STATES[optimizer], processes)


def holds(parameters, gradients, state, buckets=0, gathered=0, stays=0) -> DeviceMemory:
    sizes = [parameters, gradients, state, buckets, gathered]
    return DeviceMemory(dict(zip(memory.KINDS, sizes, strict=True)), stays)


def check_data_parallel(memories: dict, all_bytes: int, states: int, processes: int) -> None:
    """Check that only the first device has optimizer state and gathered outputs.

    The other devices have parameters and gradients, but keep nothing after the step.
    """
    state = states * all_bytes
    kept = (all_bytes, all_bytes, state)
    stays = all_bytes + state
    assert memories["one process"] == [holds(*kept, stays=stays)]
    first, *others = memories["nn.DataParallel"]
    outputs = memory.GLOBAL_BATCH * 10 * 4
    assert first == holds(*kept, gathered=outputs, stays=stays)
    assert others == [holds(all_bytes, all_bytes, 0)] * (processes - 1)


def check_ddp(memories: dict, all_bytes: int, states: int, processes: int) -> None:
    """Check that every rank holds all tensors, and that ZeRO shards the optimizer state."""
    state = states * all_bytes
    stays = 2 * all_bytes + state  # parameters, buckets and optimizer state
    plain = holds(all_bytes, all_bytes, state, all_bytes, stays=stays)
    assert memories["DDP"] == [plain] * processes
    views = memories["DDP, gradients as bucket views"]
    assert views == [holds(all_bytes, all_bytes, state, stays=stays)] * processes
    zero = memories["the same, ZeRO optimizer"]
    shares = [rank.by_kind["optimizer state"] for rank in zero]
    assert sum(shares) == state and 0 < min(shares) <= max(shares) < state
    for share, rank in zip(shares, zero, strict=True):
        assert rank == holds(all_bytes, all_bytes, share, stays=2 * all_bytes + share)


def check_fsdp(memories: list[DeviceMemory], model, states: int, processes: int) -> None:
    """Check that each rank holds a shard of every parameter, gradient and optimizer state."""

    def padded(parameter) -> int:
        """Return the bytes of all shards. FSDP2 pads each shard to the size of the first."""
        rows = -(-len(parameter) // processes) * processes
        return rows * parameter[0].numel() * parameter.element_size()

    share = sum(map(padded, model.parameters())) // processes
    layers = [sum(map(padded, layer.parameters(recurse=False))) for layer in model.modules()]
    for rank in memories:
        state = rank.by_kind["optimizer state"]
        assert rank == holds(share, share, state, gathered=max(layers), stays=share + state)
    all_bytes = memory.bytes_of(model.parameters())
    assert sum(rank.by_kind["optimizer state"] for rank in memories) == states * all_bytes
    assert processes * share == all_bytes or processes == 3


def test_memory_shared_by_several_tensors_is_counted_once():
    tensor = torch.zeros(6, 4)
    assert memory.bytes_of([tensor]) == 96
    assert memory.bytes_of([tensor, tensor[2:], tensor.t(), torch.zeros(3)]) == 108
    counted = set()
    assert memory.bytes_of([tensor], counted) == 96
    assert memory.bytes_of([tensor.view(-1)], counted) == 0
    assert memory.bytes_of([]) == 0


def test_one_process_uses_at_most_the_gpus_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    for processes, expected in ((1, gpus[:1]), (2, gpus), (8, gpus)):
        assert memory.devices_of_a_process(torch.device("cuda", 1), processes) == expected
    cpu = torch.device("cpu")
    assert memory.devices_of_a_process(cpu, 3) == [cpu] * 3


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_the_peak_that_cuda_measures_is_at_least_the_counted_memory(start):
    command = ["python", "-m", "accel_demo.anatomy.memory", "--model", "vgg11"]
    result = start(command, **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr
    lines = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    rows = [line for line in lines if re.match(r" (rank|device) \d", line[1])]
    assert len(rows) == 11
    for row in rows:
        *kinds, counted, stays, peak = map(int, row[2:])
        assert sum(kinds) == counted and peak >= max(stays, counted - kinds[-1])


def test_the_total_is_the_sum_of_the_kinds():
    assert holds(1, 2, 4, 8, 16, stays=32).total == 31
