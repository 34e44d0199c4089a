"""A training step has the same result for the unsplit model and for every split of it."""

import inspect
import math
from argparse import Namespace
from collections import Counter
from fractions import Fraction
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from accel_demo.anatomy.model_parallel import splits
from accel_demo.anatomy.model_parallel.tables import show, verdict
from tests.anatomy.programs import printed, table_rows, words_in
from tests.conftest import GPUS, VISIBLE_GPUS

METHODS = ["DDP", "`.to()`", "pipeline", "tensor parallel", "FSDP2"]
KINDS = ["forward", "backward"]


def train_with_all_methods(device, picture):
    """Train with all methods, each with several numbers of micro-batches.

    Returns the comparisons, the errors for invalid numbers of micro-batches, the numbers of
    collectives, and the output of the program.
    """
    rows = splits.ROWS_PER_RANK * dist.get_world_size()
    comparisons = {pieces: splits.train_all(device, pieces) for pieces in (1, 4, rows)}
    errors = []
    for pieces in (0, 3 * rows, 5):
        with pytest.raises(ValueError) as error:
            splits.train_all(device, pieces)
        errors.append(str(error.value))
    return comparisons, errors, traffic(device), printed(show, device, microbatches=4, plot=picture)


class Traffic(TorchDispatchMode):
    """Counts the collectives that torch.distributed starts, by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace in ("_c10d_functional", "c10d"):
            self.count[function.overloadpacket.__name__.strip("_")] += 1
        return function(*arguments, **(options or {}))


def traffic(device):
    rows, counts = splits.ROWS_PER_RANK * dist.get_world_size(), {}
    inputs = splits.whole_numbers((rows, splits.WIDTHS[0]), 0).to(device)
    targets = splits.whole_numbers((rows, splits.WIDTHS[-1]), 1).to(device)
    for train in (splits.data_parallel, splits.tensor_parallel, splits.fully_sharded):
        with Traffic() as collectives:
            train(splits.make_model(), inputs, targets, device)
        counts[train.__name__] = dict(collectives.count)
    return counts


@pytest.mark.parametrize(
    "processes", [2, *(pytest.param(more, marks=pytest.mark.slow) for more in (3, 4))]
)
def test_every_method_has_the_result_of_the_unsplit_model_and_splits_it(
    processes, together, tmp_path
):
    results = together(train_with_all_methods, processes, picture=tmp_path / "split.svg")
    elements = splits.elements(splits.make_model())
    for comparisons, errors, counts, _ in results:
        for pieces, comparison in comparisons.items():
            for summary in comparison.methods:
                exact = processes != 3 or summary.method == "`.to()`"  # division by 3 is inexact
                assert summary.difference == 0 if exact else summary.difference < 1e-9, summary
                total = elements * processes if summary.method == "DDP" else elements
                held = summary.elements_held
                assert sum(held) == total and len(held) == processes
            logs = comparison.pipeline_logs
            stages = [[(kind, piece) for kind in KINDS for piece in range(pieces)]] * processes
            assert logs == stages  # GPipe: all forwards, then all backwards
            assert splits.bubble(splits.timetable(logs)) == formula(processes, pieces)
        assert all("microbatches must be a divisor of the batch" in error for error in errors)
        assert len(errors) == 3
        check_traffic(counts)
    assert [summary.method for summary in results[0][0][4].methods] == METHODS
    text, bubble = results[0][3], formula(processes, 4)
    assert [row[0] for row in table_rows(text)][1:6] == METHODS
    assert processes == 3 or text.count("| the same bits |") == len(METHODS)
    idle, units = 2 * (processes - 1), 2 * (processes + 3)
    assert f"is idle for {idle} of {units} time units. The bubble is {bubble}:" in text
    assert f"(stages - 1) / (microbatches + stages - 1) = {bubble}." in text
    assert f"rank {processes - 1}" in words_in(tmp_path / "split.svg")


def check_traffic(counts: dict) -> None:
    """Check the number of collectives in one step of DDP, tensor parallelism and FSDP2."""

    def count(method, *words):
        names = counts[method].items()
        return sum(number for name, number in names if any(word in name for word in words))

    reduces, gathers = ("all_reduce", "allreduce"), ("all_gather", "allgather_base", "allgather_in")
    assert count("data_parallel", *reduces) == 1  # all gradients fit in one bucket
    assert count("tensor_parallel", *reduces) == 3  # two in forward, and one in backward
    assert count("fully_sharded", *gathers) == 8  # for four layers, in forward and in backward
    assert count("fully_sharded", "reduce_scatter") == 4
    assert count("data_parallel", "reduce_scatter") == count("tensor_parallel", *gathers) == 0


def formula(stages: int, pieces: int) -> Fraction:
    return Fraction(stages - 1, pieces + stages - 1)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_a_model_split_over_devices_trains_like_an_unsplit_model(parts):
    inputs, targets = splits.whole_numbers((8, 8), 5), splits.whole_numbers((8, 8), 6)
    model = splits.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=splits.LEARNING_RATE)
    torch.nn.functional.mse_loss(output := model(inputs), targets).backward()
    optimizer.step()
    split = splits.over_devices(splits.make_model(), inputs, targets, ["cpu"] * parts)
    assert torch.equal(split.output, output)
    assert sum(split.elements_held) == splits.elements(model)
    assert len(split.elements_held) == parts
    before = splits.make_model().state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(split.model.state_dict()[name], weight)
        assert not torch.equal(before[name], weight)


def test_a_different_result_is_detected():
    inputs, targets = splits.whole_numbers((8, 8), 5), splits.whole_numbers((8, 8), 6)
    right, wrong = (
        splits.over_devices(splits.make_model(), inputs, targets, ["cpu"]) for _ in range(2)
    )
    assert verdict(splits.difference(wrong, right)) == "the same bits"
    for tensor in (wrong.output, wrong.model[2].weight, wrong.model[6].weight.grad):
        kept = tensor.detach().clone()
        tensor.data.view(-1)[3] += 0.5
        assert splits.difference(wrong, right) == 0.5
        assert verdict(splits.difference(wrong, right)) == "differs by 5e-01"
        tensor.data.copy_(kept)
    for tensor in (wrong.model[6].weight, wrong.model[6].weight.grad):  # the last tensors compared
        tensor.data.fill_(math.nan)
    assert verdict(splits.difference(wrong, right)) == "differs by nan"
    assert math.isnan(splits.largest([0.0, math.nan, 0.5]))  # one difference per rank


def test_a_bug_in_our_code_is_not_reported_as_a_mistake_of_the_user(monkeypatch):
    monkeypatch.setattr(splits, "train_all", Mock(side_effect=ValueError("ours")))
    with pytest.raises(ValueError, match="ours"):
        show(torch.device("cpu"), Namespace(microbatches=4))


def test_gpipe_and_1f1b_both_have_the_bubble_of_the_formula():
    for stages in range(1, 7):
        for pieces in range(1, 9):
            gpipe = [[(kind, piece) for kind in KINDS for piece in range(pieces)]] * stages
            assert splits.bubble(splits.timetable(gpipe)) == formula(stages, pieces)
            logs = [one_forward_one_backward(stages - stage, pieces) for stage in range(stages)]
            assert splits.bubble(splits.timetable(logs)) == formula(stages, pieces)


def one_forward_one_backward(stages_left: int, pieces: int) -> list:
    """Return the 1F1B log of a stage.

    At most `stages_left` micro-batches have run forward but not backward at any time.
    """
    log, backward = [], 0
    for piece in range(pieces):
        if piece - backward == stages_left:
            log.append(("backward", backward))
            backward += 1
        log.append(("forward", piece))
    return log + [("backward", piece) for piece in range(backward, pieces)]


def test_logs_that_would_deadlock_are_rejected():
    first, second = [("backward", 0), ("forward", 0)], [("forward", 0), ("backward", 0)]
    with pytest.raises(ValueError, match="logs must be consistent"):
        splits.timetable([first, second])


@pytest.mark.parametrize("processes", [0, 5])
def test_an_invalid_number_of_processes_is_rejected(processes):
    with pytest.raises(ValueError, match=f"processes must be from 1 to 4.* got {processes}"):
        splits.check(processes, 4)


def test_each_method_takes_less_than_40_lines():
    names = ["data_parallel", "over_devices", "pipeline", "tensor_parallel", "fully_sharded"]
    for name in names:
        assert len(inspect.getsource(getattr(splits, name)).splitlines()) < 40


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_every_method_has_the_same_result_on_gpus(start):
    command = ["python", "-m", "accel_demo.anatomy.model_parallel", "--processes", 2]
    result = start(command, **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr
    assert "2 connected processes on cuda (nccl)" in result.stdout
    assert result.stdout.count("| the same bits |") == len(METHODS)
