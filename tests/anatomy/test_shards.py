"""Tests for the methods that split the samples of an epoch among ranks."""

import pytest

from accel_demo.anatomy import shards
from accel_demo.anatomy.shards import METHODS, in_words, who_reads_what
from accel_demo.errors import one_line_errors
from accel_demo.processes.environment import rank_environment

AT_LEAST = "--samples must be at least {}, a batch of 2 for each process ({})"
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
    return {world_size: together(deal, world_size) for world_size in (1, 3)}


def of_ranks(dealt, world_size, key):
    return [batches[key] for batches in dealt[world_size]]


def keys(dealt, method):
    for world_size, ranks in dealt.items():
        for key in ranks[0]:
            if key[0] == method:
                yield world_size, key


@pytest.mark.parametrize("method", METHODS)
def test_the_ranks_read_no_sample_twice_except_for_the_padding(dealt, method):
    pads = method in ("DistributedSampler", "Accelerate")
    for world_size, key in keys(dealt, method):
        _, samples, batch_size, _ = key
        ranks = of_ranks(dealt, world_size, key)
        assert len({len(batches) for batches in ranks}) == 1  # otherwise a rank would hang
        read = [sample for batches in ranks for batch in batches for sample in batch]
        unit = world_size * (1 if method == "DistributedSampler" else batch_size)
        if pads:
            assert set(read) == set(range(samples)) and len(read) - samples < unit
        else:
            assert len(set(read)) == len(read) == samples // unit * unit


@pytest.mark.parametrize("method", METHODS)
def test_each_epoch_has_a_different_order(dealt, method):
    for world_size, (_, samples, batch_size, epoch) in keys(dealt, method):
        if samples > 7:
            this = of_ranks(dealt, world_size, (method, samples, batch_size, epoch))
            assert this != of_ranks(dealt, world_size, (method, samples, batch_size, 1 - epoch))


def test_train_ddp_reads_the_same_samples_as_accelerate_unlike_torchs_sampler(dealt):
    for world_size, (_, *size) in keys(dealt, "train_ddp.py"):
        ours = of_ranks(dealt, world_size, ("train_ddp.py", *size))
        assert ours == of_ranks(dealt, world_size, ("Accelerate, drop_last", *size))
        if world_size > 1 and size[1] > 1:
            assert ours != of_ranks(dealt, world_size, ("DistributedSampler", *size))


def test_the_summary_counts_repeated_and_missing_samples():
    assert in_words([[[0, 1]], [[2, 3]]], 4) == "each once"
    assert in_words([[[0, 1]], [[2, 0]]], 4) == "1 twice, 1 not at all"
    assert in_words([[[0, 1]], [[0, 0]]], 2) == "1 twice or more"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--samples 3", f"{AT_LEAST.format(4, 2)}, got 3"),
        ("--processes -1", "--processes must be at least 1, got -1"),
    ],
)
def test_an_invalid_size_is_an_error_of_one_line(capsys, flags, said):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        shards.main(flags.split())
    assert (stopped.value.code, *capsys.readouterr()) == (2, "", f"error: {said}\n")


def test_under_a_launcher_its_number_of_processes_is_used(start, capsys, monkeypatch):
    module = ["-m", "accel_demo.anatomy.shards", "--samples", "3"]
    shown = start(["torchrun", "--standalone", "--nproc-per-node", 1, *module])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("1 connected process on cpu (gloo)\n")
    for name, value in rank_environment(0, 4, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        shards.main(["--samples", "5"])
    said = f"error: {AT_LEAST.format(8, 4)}, got 5\n"
    assert (stopped.value.code, *capsys.readouterr()) == (2, "", said)
