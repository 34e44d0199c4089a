"""Scatter splits batches of any structure like torch.chunk, and gather joins them in order."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_demo.anatomy.data_parallel.scatter_gather import (
    chunk_sizes,
    gather,
    mean_over_samples,
    scatter,
    tensors_in,
)

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "image label")


def test_chunks_are_the_same_as_torchs_and_may_be_fewer_than_replicas():
    assert chunk_sizes(30, 8) == [4, 4, 4, 4, 4, 4, 4, 2]
    assert chunk_sizes(30, 7) == [5] * 6 and chunk_sizes(9, 8) == [2, 2, 2, 2, 1]
    assert chunk_sizes(3, 8) == [1, 1, 1] and chunk_sizes(0, 8) == [0]
    parts = scatter(torch.arange(30), [CPU] * 8)
    assert all(map(torch.equal, parts, torch.arange(30).chunk(8)))


def test_scatter_and_gather_move_every_tensor_to_the_requested_device():
    batch = {"both": (torch.ones(4, 2), [torch.ones(4)])}
    for part, device in zip(scatter(batch, [CPU, META]), [CPU, META], strict=True):
        assert part["both"][0].device == part["both"][1][0].device == device
    joined = gather([batch, batch], META)
    assert joined["both"][0].device == joined["both"][1][0].device == META


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(4, 3), torch.ones(3)), r"inputs must .* batch size .* got \[3, 4\]"),
        ({"a": torch.ones(4), "b": [torch.ones(1)]}, r"inputs must .* got \[1, 4\]"),
        (torch.tensor(3.0), "inputs must contain tensors with the samples along"),
        ((1, "text", None), "inputs must contain tensors with the samples along"),
    ],
)
def test_inputs_that_cannot_be_split_are_rejected(inputs, message):
    with pytest.raises(ValueError, match=message):
        scatter(inputs, [CPU] * 2)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([1.5, 2.5], "outputs must be tensors, got float"),
        ([torch.ones(1), None], "outputs must have the same structure, got NoneType and Tensor"),
        ([(torch.ones(1),), (torch.ones(1), None)], r"the same structure, got lengths \[1, 2\]"),
        (
            [{"a": torch.ones(1)}, {"b": torch.ones(1)}],
            "the same structure, got dicts with different",
        ),
    ],
)
def test_outputs_that_cannot_be_joined_are_rejected(outputs, message):
    with pytest.raises(ValueError, match=message):
        gather(outputs, CPU)


def test_the_mean_over_all_samples_follows_from_the_means_and_sizes_of_chunks():
    values = torch.randn(30, dtype=torch.float64)
    for replicas in range(1, 9):
        means = torch.stack([chunk.mean() for chunk in values.chunk(replicas)])
        mean = mean_over_samples(means, chunk_sizes(30, replicas))
        assert mean.item() == pytest.approx(values.mean().item())
    assert mean_over_samples(torch.tensor([1.0, 3.0]), [3, 1]) == 1.5


@st.composite
def batches(draw):
    """Draw nested tensors with the same batch size and various dtypes and shapes."""
    batch_size = draw(st.integers(1, 20))
    shapes = st.lists(st.integers(0, 3), max_size=2)
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])

    def tensor(shape, dtype, seed):
        drawn = torch.randn(batch_size, *shape, generator=torch.Generator().manual_seed(seed))
        return (10 * drawn).to(dtype)

    tensors = st.builds(tensor, shapes, dtypes, st.integers(0, 2**31))
    inside = st.recursive(
        tensors,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.builds(Pair, inner, st.none()),
            st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=4,
    )
    return batch_size, (draw(tensors), draw(inside))  # at least one tensor


@settings(deadline=None, max_examples=40)
@given(batches(), st.integers(1, 9))
def test_any_batch_is_unchanged_after_scatter_and_gather(batch, replicas):
    batch_size, inputs = batch
    parts = scatter(inputs, [CPU] * replicas)
    assert len(parts) == len(chunk_sizes(batch_size, replicas)) <= replicas
    for part, size in zip(parts, chunk_sizes(batch_size, replicas), strict=True):
        assert {len(tensor) for tensor in tensors_in(part)} == {size}
    joined = gather(parts, CPU)
    before, after = tensors_in(inputs), tensors_in(joined)
    assert len(before) == len(after)
    for tensor, other in zip(before, after, strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor, other)
    assert structure_of(joined) == structure_of(inputs)


def structure_of(value):
    if isinstance(value, dict):
        return type(value), {key: structure_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [structure_of(item) for item in value]
    return type(value)
