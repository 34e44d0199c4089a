"""DataParallel and DDP: bytes received and held, processes and threads, and the same weights."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from accel_demo.anatomy import memory
from accel_demo.anatomy.data_parallel.phases import DataParallel
from accel_demo.anatomy.ddp.flight_recorder import recorded
from accel_demo.anatomy.dp_and_ddp import counting, tables
from accel_demo.config import TrainConfig
from accel_demo.models import make_model
from tests.anatomy.programs import printed, table_rows, words_in
from tests.anatomy.test_anatomy import overlapping
from tests.conftest import GPUS, VISIBLE_GPUS

COMMAND = ["python", "-m", "accel_demo.anatomy.dp_and_ddp"]


def count(device, model_name):
    return counting.count_all(device, model_name), os.getpid()


def run_all(device, picture):
    """Run everything that needs two processes, so that one launch is enough."""
    text = printed(tables.show, device, model="tiny_cnn", plot=picture)
    trained = trained_in_both_ways(device), gradients_of_two_losses(device)
    return count(device, "small_cnn"), plain_ddp(device), *trained, text


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return tmp_path_factory.mktemp("drawn") / "bytes.svg"


@pytest.fixture(scope="module")
def results(together, drawn):
    return together(run_all, 2, picture=drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "model_name"), [(3, "tiny_cnn"), (4, "small_cnn"), (2, "vgg11")]
)
def test_any_number_of_devices_and_buckets_has_the_expected_bytes(processes, model_name, together):
    check_bytes(together(count, processes, model_name=model_name), model_name)


def test_each_device_receives_and_holds_the_expected_bytes(results):
    check_bytes([counted for counted, *_ in results], "small_cnn")


def check_bytes(results, model_name):
    """Compare the counts with the numbers that formulas predict."""
    processes, pids = len(results), [pid for _, pid in results]
    assert len(set(pids)) == processes
    model = make_model(TrainConfig(model=model_name))
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    images = 4 * 28 * 28 * memory.GLOBAL_BATCH // processes
    outputs = 4 * 10 * memory.GLOBAL_BATCH // processes
    for counts, _ in results:
        first, *others = counts["DataParallel"]
        assert len(others) == processes - 1 == len(counts["DDP"]) - 1
        of_each_other = [0, outputs, weights, 0]
        assert list(first.received.values()) == [len(others) * size for size in of_each_other]
        for device in others:
            # In backward, each replica receives the gradients of its outputs.
            to_each = [0, weights + buffers + images, outputs, 0]
            assert list(device.received.values()) == to_each
        for index, device in enumerate(counts["DataParallel"]):
            assert (device.process, device.thread) == (pids[0], f"replica {index}")
        for rank, device in enumerate(counts["DDP"]):
            assert (device.process, device.thread) == (pids[rank], "main")
            constructor, forward, backward, step = (
                device.received[time] for time in counting.TIMES
            )
            assert (forward, step) == (buffers if rank > 0 else 0, 0)
            assert 0 <= constructor - (weights + buffers if rank > 0 else 0) < 2000
            exact = 2 * weights * (processes - 1) / processes
            assert abs(backward - exact) <= 8 * len(device.buckets)
            assert 4 * sum(device.buckets) == weights
        both = [device for devices in counts.values() for device in devices]
        assert {device.images for device in both} == {memory.GLOBAL_BATCH // processes}
        states = [device.held.by_kind["optimizer state"] for device in both]
        assert states == [2 * weights, *[0] * len(others), *[2 * weights] * processes]
        held = [device.held.by_kind["parameters"] for device in both]
        assert held == [weights, *[0] * len(others), *[weights] * processes]
        # Weights, gradients, and on most devices Adam's two averages and a second copy of gradients
        others_hold = [2 * weights] * len(others)
        gathered = outputs * processes
        peaks = [sum(device.peak.values()) for device in both]
        assert peaks == [5 * weights + gathered, *others_hold, *[5 * weights] * processes]


def test_after_backward_nothing_of_a_replica_is_left():
    model = memory.make_contiguous_model("small_cnn", torch.device("cpu"))
    log, optimizer = counting.ForwardLog(model), torch.optim.AdamW(model.parameters())
    images, labels = memory.batch(torch.device("cpu"))

    def held(replica: int) -> int:
        return counting.held_by(log.tensors[f"replica {replica}"], optimizer).total

    output = DataParallel(model, 2)(images)
    assert held(1) > 0  # autograd still needs the weights
    F.cross_entropy(output, labels).backward()
    assert held(1) == 0
    log._note(model, (images,))
    weights = counting.held_by(log.tensors["main"], optimizer).by_kind
    size = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert (weights["parameters"], weights["gradients"]) == (size + buffers, size)


def plain_ddp(device):
    """Return the collectives of a step of DDP without a hook, as (name, bytes)."""
    wrapped = DistributedDataParallel(memory.make_contiguous_model("small_cnn", device))
    images, labels = (tensor.chunk(2)[dist.get_rank()] for tensor in memory.batch(device))
    for _ in range(3):
        with recorded() as forward:
            outputs = wrapped(images)
        with recorded() as backward:
            F.cross_entropy(outputs, labels).backward()
    return [[(call.name, call.size) for call in calls] for calls in (forward, backward)]


def test_ddp_without_our_ring_all_reduces_the_gradients_once_and_sends_no_weights(results):
    model = make_model(TrainConfig(model="small_cnn"))
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for _, (forward, backward), *_ in results:
        assert {name for name, _ in forward} == {"broadcast"}
        assert sum(size for _, size in forward) == buffers
        assert backward == [("all_reduce", weights)]


def trained_in_both_ways(device):
    """Train two copies of a model for three steps, and return the weights of both."""
    torch.manual_seed(0)
    model = memory.make_contiguous_model("small_cnn", device)
    images, labels = memory.batch(device)
    weights = []
    for method in ("DataParallel", "DDP"):
        module, x, y = copy.deepcopy(model), images, labels
        wrapped = DataParallel(module, 2)
        if method == "DDP":
            wrapped = DistributedDataParallel(module)
            x, y = images.chunk(2)[dist.get_rank()], labels.chunk(2)[dist.get_rank()]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([parameter.detach() for parameter in module.parameters()])
    return [parameter.detach() for parameter in model.parameters()], *weights


def test_data_parallel_and_ddp_train_the_same_weights(results):
    for _, _, (before, with_dp, with_ddp), *_ in results:
        changes = [(a - b).abs().max().item() for a, b in zip(before, with_ddp, strict=True)]
        assert max(changes) > 1e-2
        for a, b in zip(with_dp, with_ddp, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def gradients_of_two_losses(device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradients of DataParallel and of DDP, for a mean and for a sum over the batch."""
    gradients, rank = [], dist.get_rank()
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        net, inputs, labels = torch.nn.Linear(4, 3), torch.randn(8, 4), torch.randn(8, 3)
        ddp = DistributedDataParallel(copy.deepcopy(net))
        halves = inputs.chunk(2)[rank], labels.chunk(2)[rank]
        F.mse_loss(ddp(halves[0]), halves[1], reduction=reduction).backward()
        F.mse_loss(DataParallel(net, 2)(inputs), labels, reduction=reduction).backward()
        gradients.append((net.weight.grad, ddp.module.weight.grad))
    return gradients


def test_data_parallel_and_ddp_have_equal_gradients_for_a_mean_loss_but_not_for_a_sum(results):
    for *_, (of_mean, of_sum), _ in results:
        for (with_dp, with_ddp), times in ((of_mean, 1), (of_sum, 2)):
            torch.testing.assert_close(with_dp, times * with_ddp)


def test_the_program_prints_and_draws(results, drawn):
    text = results[0][4]
    cells = {row[0]: row[1:] for row in table_rows(text)}
    assert cells["process"] == ["1", "1", "1", "2"] and results[1][4] == ""
    kinds = {*memory.KINDS, counting.OF_REPLICA_0}
    assert words_in(drawn) >= {*kinds, "in forward", "rank 1"} - {"gathered"}
    assert "gathered" not in words_in(drawn)  # too small to see


@pytest.mark.parametrize("devices", [2, 4])
def test_no_texts_overlap_in_the_picture(devices, monkeypatch):
    figures = []
    monkeypatch.setattr(tables, "save", lambda figure, path: figures.append(figure))
    held = memory.DeviceMemory(dict.fromkeys(memory.KINDS, 4), 0)
    received = dict.fromkeys(counting.TIMES, 4)
    peak = held.by_kind | {counting.OF_REPLICA_0: 4}
    device = counting.DeviceCounts(1, "main", 24, received, held, peak, [1])
    tables.draw({"DataParallel": [device] * devices, "DDP": [device] * devices}, "")
    assert overlapping(figures[0]) == []


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_the_counts_are_the_same_on_two_gpus(start):
    on_cpu, on_gpus = start(COMMAND), start(COMMAND, **VISIBLE_GPUS)
    assert (on_gpus.returncode, on_gpus.stderr) == (0, "")
    assert on_gpus.stdout.replace("cuda (nccl)", "cpu (gloo)") == on_cpu.stdout
