"""Batches are split as torch.chunk splits, in every structure, and joined again in order."""

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


def test_chunks_are_those_of_torch_and_may_be_fewer_than_replicas():
    assert chunk_sizes(30, 8) == [4, 4, 4, 4, 4, 4, 4, 2]
    assert chunk_sizes(30, 7) == [5] * 6 and chunk_sizes(9, 8) == [2, 2, 2, 2, 1]
    assert chunk_sizes(3, 8) == [1, 1, 1] and chunk_sizes(0, 8) == [0]
    parts = scatter(torch.arange(30), [CPU] * 8)
    assert all(map(torch.equal, parts, torch.arange(30).chunk(8)))


def test_a_gather_of_a_scatter_is_the_batch_and_gradients_flow_through_both():
    for samples, replicas in ((12, 4), (10, 4), (3, 8), (1, 2), (5, 1)):
        images = torch.randn(samples, 2, requires_grad=True)
        labels = torch.arange(samples)
        batch = OrderedDict(pair=Pair(images, [labels]), empty=[], none=None)
        parts = scatter(batch, [CPU] * replicas)
        assert [len(part["pair"].image) for part in parts] == chunk_sizes(samples, replicas)
        assert all(type(part) is OrderedDict and part["empty"] == [] for part in parts)
        found = gather(parts, CPU)
        assert torch.equal(found["pair"].image, images)
        assert torch.equal(found["pair"].label[0], labels) and found["none"] is None
        (gradient,) = torch.autograd.grad(found["pair"].image.sum(), images)
        assert torch.equal(gradient, torch.ones_like(images))


def test_every_tensor_of_a_part_is_on_its_device_and_every_one_of_an_output_on_the_one_asked():
    batch = {"both": (torch.ones(4, 2), [torch.ones(4)])}
    for part, device in zip(scatter(batch, [CPU, META]), [CPU, META], strict=True):
        assert part["both"][0].device == part["both"][1][0].device == device
    found = gather([batch, batch], META)
    assert found["both"][0].device == found["both"][1][0].device == META


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(4, 3), torch.ones(3)), r"inputs must .* batch size .* got \[3, 4\]"),
        ({"a": torch.ones(4), "b": [torch.ones(1)]}, r"inputs must .* got \[1, 4\]"),
        (torch.tensor(3.0), "inputs must hold tensors with the samples along"),
        ((1, "text", None), "inputs must hold tensors with the samples along"),
    ],
)
def test_inputs_that_cannot_be_split_are_named(inputs, message):
    with pytest.raises(ValueError, match=message):
        scatter(inputs, [CPU] * 2)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([1.5, 2.5], "outputs must be tensors to be gathered, got float"),
        ([torch.ones(1), None], "outputs must have the same structure, got NoneType and Tensor"),
        ([(torch.ones(1),), (torch.ones(1), None)], r"the same structure, got lengths \[1, 2\]"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], "the same structure, got dicts with other"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(outputs, message):
    with pytest.raises(ValueError, match=message):
        gather(outputs, CPU)


def test_means_of_chunks_give_the_mean_over_all_samples_with_a_size_for_each():
    values = torch.randn(30, dtype=torch.float64)
    for replicas in range(1, 9):
        means = torch.stack([chunk.mean() for chunk in values.chunk(replicas)])
        found = mean_over_samples(means, chunk_sizes(30, replicas))
        assert found.item() == pytest.approx(values.mean().item())
    assert mean_over_samples(torch.tensor([1.0, 3.0]), [3, 1]) == 1.5
    for means, sizes in ((torch.ones(2), [4]), (torch.ones(1), [1, 2]), (torch.tensor(1.0), [4])):
        with pytest.raises(ValueError, match="^sizes must have one for each of means: got"):
            mean_over_samples(means, sizes)


@st.composite
def batches(draw):
    """Tensors of one batch size, of several dtypes and shapes, in tuples, lists and dicts."""
    batch_size = draw(st.integers(1, 20))
    shapes = st.lists(st.integers(0, 3), max_size=2)
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])

    def tensor(shape, dtype, seed):
        drawn = torch.randn(batch_size, *shape, generator=torch.Generator().manual_seed(seed))
        return (10 * drawn).to(dtype)

    tensors = st.builds(tensor, shapes, dtypes, st.integers(0, 2**31))
    inside = st.recursive(
        tensors,
        lambda some: st.one_of(
            st.lists(some, min_size=1, max_size=3),
            st.tuples(some, some),
            st.dictionaries(st.text(max_size=2), some, min_size=1, max_size=3),
        ),
        max_leaves=4,
    )
    return batch_size, draw(inside)


@settings(deadline=None)
@given(batches(), st.integers(1, 9))
def test_what_is_scattered_and_gathered_is_what_it_was(batch, replicas):
    batch_size, inputs = batch
    parts = scatter(inputs, [CPU] * replicas)
    assert len(parts) == len(chunk_sizes(batch_size, replicas)) <= replicas
    for part, size in zip(parts, chunk_sizes(batch_size, replicas), strict=True):
        assert {len(tensor) for tensor in tensors_in(part)} == {size}
    joined = gather(parts, CPU)
    before, after = tensors_in(inputs), tensors_in(joined)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert structure_of(joined) == structure_of(inputs)


def structure_of(value):
    if isinstance(value, dict):
        return {key: structure_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(structure_of(one) for one in value)
    return type(value)
