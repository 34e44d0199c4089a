"""Whoever deals the samples out decides which rank reads which."""

import pytest

from accel_demo.anatomy import shards
from accel_demo.anatomy.shards import WAYS, in_words, who_reads_what
from accel_demo.errors import one_line_errors

SIZES = [(samples, batch_size) for samples in (6, 7, 11, 12, 16, 29) for batch_size in (1, 2)]


def deal():
    """What this rank reads in two epochs, in each way, for each of the sizes."""
    found = {}
    for way in WAYS:
        for samples, batch_size in SIZES:
            for epoch in (0, 1):
                batches = who_reads_what(way, samples, batch_size, epoch)
                found[way, samples, batch_size, epoch] = batches
    with pytest.raises(ValueError, match="^way must be one of"):
        who_reads_what("by chance", 8, 2)
    return found


@pytest.fixture(scope="module")
def dealt(together):
    return {world_size: together(deal, world_size) for world_size in (1, 3)}


def of_ranks(dealt, world_size, key):
    return [found[key] for found in dealt[world_size]]


def keys(dealt, way):
    for world_size, ranks in dealt.items():
        for key in ranks[0]:
            if key[0] == way:
                yield world_size, key


@pytest.mark.parametrize("way", WAYS)
def test_the_ranks_read_disjoint_parts_that_cover_the_epoch_but_for_the_padding(dealt, way):
    pads = way in ("DistributedSampler", "Accelerate")
    for world_size, key in keys(dealt, way):
        _, samples, batch_size, _ = key
        ranks = of_ranks(dealt, world_size, key)
        assert len({len(batches) for batches in ranks}) == 1  # or some would wait for the others
        read = [sample for batches in ranks for batch in batches for sample in batch]
        unit = world_size * (1 if way == "DistributedSampler" else batch_size)
        if pads:
            assert set(read) == set(range(samples)) and len(read) - samples < unit
        else:
            assert len(set(read)) == len(read) == samples // unit * unit


@pytest.mark.parametrize("way", WAYS)
def test_each_epoch_has_an_order_of_its_own(dealt, way):
    for world_size, (_, samples, batch_size, epoch) in keys(dealt, way):
        if samples > 7:
            this = of_ranks(dealt, world_size, (way, samples, batch_size, epoch))
            assert this != of_ranks(dealt, world_size, (way, samples, batch_size, 1 - epoch))


def test_the_raw_file_deals_as_accelerate_and_torchs_sampler_does_not(dealt):
    for world_size, (_, *size) in keys(dealt, "train_ddp.py"):
        ours = of_ranks(dealt, world_size, ("train_ddp.py", *size))
        assert ours == of_ranks(dealt, world_size, ("Accelerate, drop_last", *size))
        if world_size > 1 and size[1] > 1:
            assert ours != of_ranks(dealt, world_size, ("DistributedSampler", *size))


def test_it_is_said_in_words_what_was_read():
    assert in_words([[[0, 1]], [[2, 3]]], 4) == "each once"
    assert in_words([[[0, 1]], [[2, 0]]], 4) == "1 twice, 1 not at all"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--samples 3", "2 processes with batches of 2 need --samples 4 or more, got 3"),
        ("--processes -1", "--processes must be at least 1, got -1"),
    ],
)
def test_what_cannot_be_dealt_gets_one_line(capsys, flags, said):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        shards.main(flags.split())
    assert (stopped.value.code, *capsys.readouterr()) == (2, "", f"error: {said}\n")
