"""Page 32: batch statistics of all ranks, two forwards, a GAN, and averages of the weights."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from accel_demo.anatomy.batch_norm import EQUAL as SAME
from accel_demo.anatomy.batch_norm import SyncBatchNorm, convert
from tests.pages.pages import TUTORIALS, bound_to, load_module, rows_below

PAGE = TUTORIALS / "32_batch_statistics.md"


def test_only_the_layer_by_hand_equals_the_whole_batch_on_several_ranks():
    rows = rows_below(PAGE, "samples of each rank")
    assert {len(row[0].split(", ")) for row in rows} == {1, 2, 3}
    for samples, layer, *results in rows:
        is_equal = layer == "by hand" or "," not in samples
        assert all((result == "equal") == is_equal for result in results), samples
    assert SAME <= 1e-10


def test_plain_batch_norm_evaluates_differently_on_each_rank_until_the_buffers_are_equal():
    rows = rows_below(PAGE, "layer")
    assert len(rows) == 6
    losses = {(name, statistics): tuple(map(float, both)) for name, statistics, *both in rows}
    no_broadcast = "BatchNorm, `forward_sync_buffers=False`"
    for (name, statistics), (first, second) in losses.items():
        is_equal = name == "SyncBatchNorm" or statistics != "each rank's"
        assert (first == second) == is_equal, name
    assert (no_broadcast, "average") in losses  # its loss depends on the seed
    assert losses["BatchNorm", "rank 0's, broadcast"][0] == losses["BatchNorm", "each rank's"][0]


class BatchNormReLU(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input).relu()


@pytest.mark.parametrize("converter", [convert, nn.SyncBatchNorm.convert_sync_batchnorm])
def test_converting_a_subclass_loses_its_forward(converter):
    inputs, model = torch.randn(6, 3), nn.Sequential(BatchNormReLU(3))
    assert model(inputs).min() == 0
    assert "ReLU" not in type(converter(model)[0]).__name__
    assert converter(model).eval()(inputs).min() < 0  # in training, torch's needs a GPU


def test_two_forwards_fail_with_unused_parameters_and_with_a_buffer_that_backward_reads():
    bound_to("torch", PAGE.name, "PyTorch {version} hides DDP's broadcast")
    results = {tuple(row[:2]): row[2] for row in rows_below(PAGE, "model")}
    unused, synced = "`find_unused_parameters=True`", "`forward_sync_buffers=False`"
    error = "`RuntimeError: Expected to mark a variable ready only once.`"
    assert results.pop(("two heads", unused)) == error
    assert results.pop(("running scale", "–")).startswith("**off by ")
    assert set(results) == {("BatchNorm", "–"), ("two heads", "–"), ("running scale", synced)}
    assert set(results.values()) == {"right"}


def test_the_gan_on_several_processes_equals_one_and_differs_from_plain_only_by_design():
    rows = {method: result for method, *result in rows_below(PAGE, "method")}
    assert rows == {
        "DDP": ["6", "equal", "equal", "equal"],
        "Accelerate": ["6", "equal", "equal", "equal"],
        "DDP, without `requires_grad_(False)`": ["7", "different", "equal", "equal"],
        "… and `zero_grad()` first": ["7", "equal", "equal", "equal"],
        "Accelerate, 2 micro-batches": ["11", "different", "equal", "equal"],
    }
    program = load_module(TUTORIALS / "32_gan.py")
    generator, discriminator = program.make_models()
    norms = [each for each in generator.modules() if isinstance(each, SyncBatchNorm)]
    assert len(norms) == 1 and not any("Norm" in str(each) for each in discriminator.modules())


@pytest.mark.parametrize(
    ("average", "updates", "ranks", "compared"),
    [
        ("`unwrap_model(model)`, after each step", "20", "equal", "equal"),
        ("after each micro-batch", "40", "equal", "different"),
        ("`use_buffers=False`", "20", "equal", "different"),
        ("plain BatchNorm", "20", "**buffers differ**", "different"),
        ("evaluated without `eval()`", "20", "equal", "different"),
        ("the wrapped model", "20", "equal", "equal"),
        ("resumed, registered", "20", "equal", "equal"),
        ("resumed, not registered", "10", "equal", "different"),
    ],
)
def test_the_average_is_right_only_as_the_page_says(average, updates, ranks, compared):
    [row] = [row for row in rows_below(PAGE, "average") if row[0] == average]
    prefix = "module." if average == "the wrapped model" else ""
    assert row[1:] == [updates, ranks, f"`{prefix}0.weight`", compared]


def test_update_bn_recomputes_the_statistics_of_an_average_without_buffers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    average = AveragedModel(model, use_buffers=False)
    batches = torch.randn(5, 8, 4, dtype=torch.float64)
    update_bn(batches, average)
    outputs = model[0](batches)
    buffers = dict(average.module.named_buffers())
    assert (buffers["1.running_mean"] - outputs.mean((0, 1))).abs().max() < 1e-12
    assert (buffers["1.running_var"] - outputs.var(1).mean(0)).abs().max() < 1e-12


def test_a_last_batch_of_one_sample_is_an_error_without_positions():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    nn.BatchNorm1d(3)(torch.ones(1, 3, 4))


def test_only_a_method_that_forward_calls_has_its_gradients_averaged():
    (_, error), (_, apart), (_, equal) = rows_below(PAGE, "loss")
    assert error == "`AttributeError: 'DistributedDataParallel' object has no attribute 'loss'`"
    assert apart.startswith("differ by ") and float(apart.split()[-1]) > 0 and equal == "equal"


def test_the_variance_of_answer_1():
    rows = torch.tensor([-1.0, 1.0] * 3 + [1.0, 3.0] * 3)
    assert rows[:6].var(correction=0) == rows[6:].var(correction=0) == 1
    assert rows.var(correction=0) == 2
