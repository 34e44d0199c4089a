"""Test our SyncBatchNorm: it computes what one process computes with the samples of all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_demo.anatomy import batch_norm


def compare(device, split):
    return batch_norm.compare(device, split, "by hand")


@pytest.mark.parametrize("split", batch_norm.SPLITS, ids=str)
def test_all_ranks_together_equal_the_whole_batch(together, split):
    results = together(compare, len(split), split=split)
    assert len(results) == len(split)
    assert max(value for result in results for value in result.values()) < 1e-12


def test_plain_batch_norm_differs_from_the_whole_batch_only_on_several_ranks(together):
    for split in ((12,), (6, 6)):
        for result in together(compare_plain, len(split), split=split):
            differs = [value > 0.01 for value in result.values()]
            assert all(differs) if len(split) > 1 else not any(differs)


def compare_plain(device, split):
    return batch_norm.compare(device, split, "`BatchNorm1d`")


def run_options(device, shape, options):
    """Return the state of both layers after two batches, and their outputs in evaluation."""
    torch.manual_seed(0)
    inputs = torch.randn(2, *shape, dtype=torch.float64)
    whole = nn.BatchNorm2d(shape[1], **options).double()
    ours = batch_norm.convert(nn.Sequential(nn.BatchNorm2d(shape[1], **options).double()))[0]
    ours.load_state_dict(whole.state_dict())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for batch in inputs:
        expected = whole(batch).chunk(ranks)[rank]
        assert (ours(batch.chunk(ranks)[rank]) - expected).abs().max() < 1e-12
    for name, tensor in whole.state_dict().items():
        assert (ours.state_dict()[name] - tensor).abs().max() < 1e-12, name
    ours.eval()
    whole.eval()
    assert (ours(inputs[0]) - whole(inputs[0])).abs().max() < 1e-12
    return int(ours.num_batches_tracked) if ours.num_batches_tracked is not None else None


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, 2),
        ({"momentum": None}, 2),
        ({"affine": False, "eps": 0.1}, 2),
        ({"track_running_stats": False}, None),
    ],
    ids=str,
)
def test_images_and_all_options_of_the_layer(together, options, batches):
    assert together(run_options, 2, shape=(4, 3, 5, 5), options=options) == [batches] * 2


def run_in_16_bits(device, dtype, samples):
    """Return the type of the outputs, and the largest differences from the whole batch."""
    torch.manual_seed(0)
    inputs = (torch.randn(samples, 2) + 1).to(dtype)
    whole = nn.BatchNorm1d(2)
    ours = batch_norm.convert(nn.Sequential(nn.BatchNorm1d(2)))[0]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = whole(inputs).tensor_split(ranks)[rank]
    outputs = ours(inputs.tensor_split(ranks)[rank])
    buffers = [
        batch_norm.difference(getattr(ours, name), getattr(whole, name))
        for name in ("running_mean", "running_var")
    ]
    return outputs.dtype, batch_norm.difference(outputs.float(), expected.float()), max(buffers)


@pytest.mark.parametrize(("dtype", "samples"), [(torch.bfloat16, 1003), (torch.float16, 70_000)])
def test_sums_and_counts_of_16_bit_inputs_are_exact(together, dtype, samples):
    for type_, output, buffer in together(run_in_16_bits, 2, dtype=dtype, samples=samples):
        assert type_ == dtype
        assert output <= torch.finfo(dtype).eps  # one rounding of the outputs
        assert buffer < 1e-5  # float32 sums in another order


def run_single_values(device):
    """Return the error for one value per channel, and if the running statistics are unchanged."""
    norm = batch_norm.convert(nn.Sequential(nn.BatchNorm1d(2)))[0]
    error = ""
    try:
        norm(torch.ones(1, 2))
    except ValueError as caught:
        error = str(caught)
    return error, bool((norm.running_mean == 0).all() and (norm.running_var == 1).all())


def test_one_value_per_channel_is_an_error_unless_another_rank_has_one_too(together):
    [(error, is_unchanged)] = together(run_single_values, 1)
    assert error.startswith("Expected more than 1 value per channel when training") and is_unchanged
    assert together(run_single_values, 2) == [("", False)] * 2


def test_converting_keeps_parameters_buffers_and_names():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3)), nn.GroupNorm(1, 3))
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    parameters = [*model.parameters()]
    assert batch_norm.convert(model) is model
    assert type(model[1][0]) is batch_norm.SyncBatchNorm and type(model[2]) is nn.GroupNorm
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_torchs_layer_refuses_the_cpu(together):
    [messages] = {tuple(result) for result in together(refusals, 2)}
    assert messages[0].startswith("SyncBatchNorm expected input tensor to be on GPU")
    assert messages[1] == "SyncBatchNorm layers only work with GPU modules"


def refusals(device) -> list[str]:
    messages = []
    for call in (
        lambda: nn.SyncBatchNorm(2)(torch.ones(3, 2)),
        lambda: nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(2)),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages
