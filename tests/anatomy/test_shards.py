"""Tests for the methods that split the samples of an epoch among ranks."""

import pytest

from accel_demo.anatomy.shards import METHODS, who_reads_what

SIZES = [(samples, batch_size) for samples in (6, 7, 11, 12, 16, 29) for batch_size in (1, 2)]


def deal():
    """Return the batches that this rank reads in two epochs, for each method and size."""
    batches = {
        (method, samples, batch_size, epoch): who_reads_what(method, samples, batch_size, epoch)
        for method in METHODS
        for samples, batch_size in SIZES
        for epoch in (0, 1)
    }
    with pytest.raises(ValueError, match="^method must be one of"):
        who_reads_what("by chance", 8, 2)
    return batches


@pytest.fixture(scope="module")
def dealt(together):
    """Return what three ranks read: {(method, samples, batch size, epoch): batches by rank}."""
    ranks = together(deal, 3)
    return {key: [batches[key] for batches in ranks] for key in ranks[0]}


def of_method(dealt, method):
    return {key[1:]: ranks for key, ranks in dealt.items() if key[0] == method}


@pytest.mark.parametrize("method", METHODS)
def test_the_ranks_read_no_sample_twice_except_for_the_padding(dealt, method):
    pads = method in ("DistributedSampler", "Accelerate")
    for (samples, batch_size, _), ranks in of_method(dealt, method).items():
        assert len({len(batches) for batches in ranks}) == 1  # otherwise a rank would hang
        read = [sample for batches in ranks for batch in batches for sample in batch]
        unit = 3 * (1 if method == "DistributedSampler" else batch_size)
        if pads:
            assert set(read) == set(range(samples)) and len(read) - samples < unit
        else:
            assert len(set(read)) == len(read) == samples // unit * unit


@pytest.mark.parametrize("method", METHODS)
def test_each_epoch_has_a_different_order(dealt, method):
    for (samples, batch_size, epoch), ranks in of_method(dealt, method).items():
        if samples > 7:
            assert ranks != dealt[method, samples, batch_size, 1 - epoch]


def test_train_ddp_reads_the_same_samples_as_accelerate_unlike_torchs_sampler(dealt):
    for size, ours in of_method(dealt, "train_ddp.py").items():
        assert ours == dealt["Accelerate, drop_last", *size]
        if size[1] > 1:
            assert ours != dealt["DistributedSampler", *size]
