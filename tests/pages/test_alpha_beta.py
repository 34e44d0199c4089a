"""The α–β model: fits recover exact links, and its all-reduce is the chunked ring of page 21."""

import re

import pytest
import torch
import torch.distributed as dist
from alpha_beta import NCCL_LINKS, SIZES, Link, fit_link, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_demo.anatomy import traffic
from tests.conftest import GPUS, VISIBLE_GPUS
from tests.pages.pages import TUTORIALS

LATENCIES, BANDWIDTHS = st.floats(1e-7, 1e-2), st.floats(1e7, 1e12)


@settings(deadline=None)  # the first call also loads LAPACK
@given(LATENCIES, BANDWIDTHS)
def test_a_fit_to_exact_times_recovers_the_link(latency, bandwidth):
    link = Link(latency, bandwidth)
    fitted = fit_link({size: link.message(size) for size in SIZES})
    for size in SIZES:  # a huge latency hides the bandwidth, so compare the times
        assert fitted.message(size) == pytest.approx(link.message(size), rel=1e-6)


@settings(deadline=None)
@given(LATENCIES, BANDWIDTHS, st.floats(0.5, 2), st.sampled_from(SIZES))
def test_the_fit_minimizes_the_relative_errors(latency, bandwidth, factor, disturbed):
    times = {size: Link(latency, bandwidth).message(size) for size in SIZES}
    times[disturbed] *= factor
    fitted = fit_link(times)

    def squares(latency: float, seconds_per_byte: float) -> float:
        return sum(
            ((latency + size * seconds_per_byte) / time - 1) ** 2 for size, time in times.items()
        )

    best = squares(fitted.latency, 1 / fitted.bandwidth)
    for step in (-1e-3, 1e-3):
        assert best <= squares(fitted.latency * (1 + step), 1 / fitted.bandwidth) + 1e-9
        assert best <= squares(fitted.latency, (1 + step) / fitted.bandwidth) + 1e-9


def test_the_models_all_reduce_has_the_messages_of_the_chunked_ring():
    for ranks in (1, 2, 3, 5):
        sizes = traffic.chunk_sizes(60, 4, ranks)
        sent, _ = traffic.chunked_ring_bytes(0, sizes)  # tested with real messages in test_ring.py
        assert Link(0, 1).ring_all_reduce(240, ranks) == pytest.approx(sent)
        assert Link(1, float("inf")).ring_all_reduce(240, ranks) == 2 * (ranks - 1)
    assert Link(1, 1).ring_all_reduce(240, 1) == 0  # one rank has nothing to send


def test_the_program_prints_its_help_and_exits(start):
    shown = start(["python", TUTORIALS / "alpha_beta.py", "--help"])
    assert (shown.returncode, shown.stderr) == (0, "") and "--plot FILE" in shown.stdout


def test_measuring_needs_a_second_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="^measure needs at least two processes$"):
            measure(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def measure_briefly(device):
    messages, all_reduces = measure(device, repeats=3)
    return dist.get_world_size(), messages, all_reduces


def test_a_long_message_takes_longer_than_a_short_one(together):
    for rank, (world_size, messages, all_reduces) in enumerate(together(measure_briefly, 2)):
        assert world_size == 2 and list(messages) == list(all_reduces) == SIZES
        assert all(seconds > 0 for seconds in (*messages.values(), *all_reduces.values())), rank
        assert messages[SIZES[-1]] > 3 * messages[SIZES[0]]
        assert all_reduces[SIZES[-1]] > 3 * all_reduces[SIZES[0]]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_on_gpus_the_clock_is_read_only_when_the_messages_have_arrived(together):
    for world_size, messages, _ in together(measure_briefly, 2, environment=VISIBLE_GPUS):
        assert world_size == 2 and messages[SIZES[-1]] > messages[SIZES[0]]


def test_the_bandwidths_are_at_most_the_nominal_ones():
    bandwidths = {name: link.bandwidth for name, link in NCCL_LINKS.items()}
    assert bandwidths["NVLink of an H100"] < 450e9 and bandwidths["NVLink of an A100"] < 300e9
    assert bandwidths["PCIe 5.0, 16 lanes"] < 64e9
    for name, bandwidth in bandwidths.items():
        if speed := re.search(r"(\d+) Gbit/s", name):
            assert 0.9 < bandwidth / (float(speed[1]) * 1e9 / 8) <= 1, name
