"""Test that the observer can compare all kinds of tensors that gradients and weights can be."""

import pytest
import torch

from accel_demo.observer.weights import magnitudes, stored, stored_sums, sums


class Labels(torch.Tensor):
    """A tensor of a class that the observer does not know."""


class Shard(torch.Tensor):
    """A tensor that is divided between ranks, as a DTensor, without their connection."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)


DENSE = torch.arange(1.0, 8.0)
SPARSE = torch.sparse_coo_tensor(torch.tensor([[1, 1, 2]]), torch.ones(3), check_invariants=True)


@pytest.mark.parametrize(
    "tensor",
    [
        DENSE,
        DENSE[1:],  # does not start at a multiple of 8 bytes
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(()),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64).conj(),
        SPARSE,
        DENSE.as_subclass(Shard),
    ],
)
def test_numbers_of_a_tensor_change_with_its_values(tensor):
    before, after = [tensor], [tensor * 2]
    assert stored_sums(before) == stored_sums([tensor.clone()]) != stored_sums(after)
    assert [2 * each for each in magnitudes(before)] == magnitudes(after) != [0.0]
    assert all(each.isfinite().all() for each in stored(before))


def test_shards_are_not_compared_between_ranks():
    assert sums([DENSE, DENSE.as_subclass(Shard)]) is None


@pytest.mark.parametrize("tensor", [DENSE.as_subclass(Labels), DENSE.to("meta"), DENSE.to_mkldnn()])
def test_tensors_without_readable_values_are_left_out(tensor):
    assert stored([tensor, DENSE])[0] is not tensor
    assert len(magnitudes([tensor, DENSE])) == len(stored_sums([tensor, DENSE])) == 1
