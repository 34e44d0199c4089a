"""What each strategy holds where, counted, is what it says it shares."""

import re
from argparse import Namespace
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy import memory
from accel_demo.anatomy.memory import together as sum_of_kinds
from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from tests.conftest import GPUS, VISIBLE_GPUS

STRATEGIES = [
    "one process",
    "nn.DataParallel",
    "DDP",
    "DDP, gradients as bucket views",
    "the same, ZeRO optimizer",
    "FSDP2",
]
STATES = {"adamw": 2, "sgd": 1}  # tensors for each parameter: two moments, or the momentum


def count(device, cases):
    """For each model and optimizer, what is found; and what a wrong name gives."""
    errors = []
    for model, optimizer in (("cnn", "adamw"), ("tiny_cnn", "lion")):
        with pytest.raises(ValueError) as error:
            memory.count_all(device, model, optimizer)
        errors.append(str(error.value))
    found = {case: memory.count_all(device, *case) for case in cases}
    return found, errors, [bucket_addresses(device, views) for views in (False, True)]


def bucket_addresses(device, views: bool) -> list[set[int]]:
    """Where DDP's buckets are in each of four steps. All are held, so that none is freed."""
    network = memory.make_network("tiny_cnn", device)
    wrapped, steps = DistributedDataParallel(network, gradient_as_bucket_view=views), []

    def see_bucket(group, bucket):
        steps[-1].append(bucket.buffer())
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, see_bucket)
    optimizer = torch.optim.SGD(network.parameters())
    for _ in range(2):  # two steps each, and each step begins with zero_grad
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
def test_each_strategy_holds_what_it_says_it_shares(processes, cases, together):
    for results, errors, addresses in together(count, processes, cases=cases):
        for first, *later in addresses:  # DDP keeps the buckets it has made after the first step
            assert len(later) == 3 and later[0] == later[1] == later[2] and later[0]
            assert first.isdisjoint(later[0])  # as it would be had DDP made them anew
        assert "model must be one of small_cnn, " in errors[0] and "got 'cnn'" in errors[0]
        assert errors[1] == "optimizer must be one of adamw, sgd, got 'lion'"
        assert list(results) == cases
        for (model, optimizer), found in results.items():
            network = make_model(TrainConfig(model=model))
            size = sum(p.numel() * p.element_size() for p in network.parameters())
            assert list(found) == STRATEGIES
            check_data_parallel(found, size, STATES[optimizer], processes)
            check_ddp(found, size, STATES[optimizer], processes)
            check_fsdp(found["FSDP2"], network, STATES[optimizer], processes)


def holds(parameters, gradients, state, buckets=0, gathered=0, stays=0) -> dict:
    sizes = [parameters, gradients, state, buckets, gathered, stays]
    return dict(zip([*memory.KINDS, "stays"], sizes, strict=True))


def check_data_parallel(found: dict, all_bytes: int, states: int, processes: int) -> None:
    """Gradients stay, the optimizer runs and the outputs meet on the first device alone."""
    state = states * all_bytes
    alone = holds(all_bytes, all_bytes, state, stays=all_bytes + state)
    assert found["one process"] == [alone]
    first, *others = found["nn.DataParallel"]
    outputs = memory.GLOBAL_BATCH * 10 * 4
    assert first == {**alone, "gathered": outputs}
    assert others == [holds(all_bytes, all_bytes, 0)] * (processes - 1)


def check_ddp(found: dict, all_bytes: int, states: int, processes: int) -> None:
    """Every rank has everything; what is on one rank only is ZeRO's state of its parameters."""
    state = states * all_bytes
    stays = 2 * all_bytes + state  # the buckets stay too
    assert found["DDP"] == [holds(all_bytes, all_bytes, state, all_bytes, stays=stays)] * processes
    views = found["DDP, gradients as bucket views"]
    assert views == [holds(all_bytes, all_bytes, state, stays=stays)] * processes
    zero = found["the same, ZeRO optimizer"]
    shares = [one["optimizer state"] for one in zero]
    assert sum(shares) == state and 0 < min(shares) <= max(shares) < state
    for share, one in zip(shares, zero, strict=True):
        assert one == holds(all_bytes, all_bytes, share, stays=2 * all_bytes + share)


def check_fsdp(found: list, network, states: int, processes: int) -> None:
    """Each rank has a share of every parameter, of its gradient and of its state."""

    def filled_up(parameter) -> int:
        """All shards are as long as the first: so is the memory FSDP2 takes for them."""
        rows = -(-len(parameter) // processes) * processes
        return rows * parameter[0].numel() * parameter.element_size()

    share = sum(map(filled_up, network.parameters())) // processes
    layers = [sum(map(filled_up, one.parameters(recurse=False))) for one in network.modules()]
    for one in found:
        state = one["optimizer state"]
        assert one == holds(share, share, state, gathered=max(layers), stays=share + state)
    all_bytes = memory.bytes_of(network.parameters())
    assert sum(one["optimizer state"] for one in found) == states * all_bytes
    assert processes * share == all_bytes or processes == 3


def test_memory_that_two_tensors_share_is_counted_once():
    tensor = torch.zeros(6, 4)
    assert memory.bytes_of([tensor]) == 96
    assert memory.bytes_of([tensor, tensor[2:], tensor.t(), torch.zeros(3)]) == 108
    counted = set()
    assert memory.bytes_of([tensor], counted) == 96
    assert memory.bytes_of([tensor.view(-1)], counted) == 0
    assert memory.bytes_of([]) == 0


def test_processes_that_cannot_share_the_batch_are_refused():
    for processes in (0, 5, 7, 25):
        with pytest.raises(ValueError, match=f"processes must divide 24 images, got {processes}"):
            memory.check("small_cnn", "adamw", processes)
    for processes in (1, 2, 3, 4, 6, 8):
        memory.check("small_cnn", "adamw", processes)


def test_the_program_prints_and_draws(start, tmp_path):
    command = ["python", "-m", "accel_demo.anatomy.memory"]
    picture = tmp_path / "memory.svg"
    options = ["--model", "tiny_cnn", "--optimizer", "sgd", "--plot", picture]
    shown = start([*command, *options])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("2 connected processes")
    rows = re.findall(r"^\| (.+?) +\| (rank|device) (\d) ", shown.stdout, re.MULTILINE)
    expected = [(way, "rank", str(rank)) for way in STRATEGIES[2:] for rank in range(2)]
    devices = [("nn.DataParallel", "device", str(index)) for index in range(2)]
    assert rows == [("one process", "rank", "0"), *devices, *expected]
    assert all(f"<!-- {kind} -->" in picture.read_text() for kind in memory.KINDS)
    for flag, wrong in (("--model", "alexnet"), ("--optimizer", "lion"), ("--processes", "5")):
        refused = start([*command, flag, wrong])
        assert (refused.returncode, refused.stdout) == (2, "")  # before any process is started
        assert len(refused.stderr.splitlines()) == 1
        assert flag in refused.stderr and wrong in refused.stderr


def test_a_mistake_of_ours_is_not_said_to_be_the_users(monkeypatch):
    monkeypatch.setattr(memory, "count_all", Mock(side_effect=ValueError("ours")))
    with pytest.raises(ValueError, match="ours"):
        memory.show(torch.device("cpu"), Namespace(model="tiny_cnn", optimizer="sgd"))


def test_one_process_takes_the_gpus_of_its_own_machine_alone(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    for processes, expected in ((1, gpus[:1]), (2, gpus), (8, gpus)):
        assert memory.devices_of_a_process(torch.device("cuda", 1), processes) == expected
    cpu = torch.device("cpu")
    assert memory.devices_of_a_process(cpu, 3) == [cpu] * 3


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_what_cuda_measures_is_at_least_what_was_counted(start):
    found = start(["python", "-m", "accel_demo.anatomy.memory", "--model", "vgg11"], **VISIBLE_GPUS)
    assert found.returncode == 0, found.stderr
    lines = [line.split("|")[1:-1] for line in found.stdout.splitlines() if line.startswith("|")]
    rows = [line for line in lines if re.match(r" (rank|device) \d", line[1])]
    assert len(rows) == 11
    for row in rows:
        *kinds, counted, stays, peak = map(int, row[2:])
        assert sum(kinds) == counted and peak >= max(stays, counted - kinds[-1])


def test_the_sum_of_a_row_is_of_its_kinds():
    assert sum_of_kinds(holds(1, 2, 4, 8, 16, stays=32)) == 31
