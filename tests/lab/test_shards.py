"""Test that `accel-demo shards` shows which samples each rank reads and which a metric counts."""

from dataclasses import asdict, replace
from itertools import chain

import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from accel_demo.lab.shards.picture import draw
from accel_demo.lab.shards.reading import make_loader, read_all
from accel_demo.lab.shards.result import (
    ACCELERATE,
    TORCH,
    EpochReads,
    LoaderReads,
    LoaderSettings,
    epoch_reads,
    explain_uneven_batches,
)
from accel_demo.lab.shards.tables import MARKS, reading_table
from tests.lab.measured import run_measured

SIZES = [(samples, batch_size) for samples in (1, 4, 22, 30, 36) for batch_size in (3, 6)]
OPTIONS = [
    {"method": TORCH},
    {"method": TORCH, "set_epoch": False},
    {"method": TORCH, "drop_last": True},
    {"method": TORCH, "shuffle": False},
    {"method": ACCELERATE},
    {"method": ACCELERATE, "set_epoch": False},
    {"method": ACCELERATE, "drop_last": True},
    {"method": ACCELERATE, "shuffle": False},
    {"method": ACCELERATE, "even_batches": False},
    {"method": ACCELERATE, "split_batches": True},
    {"method": ACCELERATE, "split_batches": True, "drop_last": True},
    {"method": ACCELERATE, "split_batches": True, "even_batches": False},
    {"method": ACCELERATE, "dispatch_batches": True},
    {"method": ACCELERATE, "dispatch_batches": True, "drop_last": True},
    {"method": ACCELERATE, "dispatch_batches": True, "split_batches": True},
]
LOADERS = [
    LoaderSettings(samples=samples, batch_size=batch_size, epochs=2, **options)
    for options in OPTIONS
    for samples, batch_size in SIZES
    if not options.get("drop_last") or samples >= 3 * batch_size  # one full batch per process
]


def read_here(device, loaders):
    result, loader = read_all(device, loaders), make_loader(LoaderSettings(ACCELERATE, 22, 5, 2))
    first_batches = [next(iter(loader)).tolist() for _ in range(2)]  # of two unfinished epochs
    return result, first_batches


@pytest.fixture(scope="module")
def loaders(together):
    """The samples that three processes read with each of `LOADERS`."""
    ranks = together(read_here, 3, timeout=220, loaders=LOADERS)
    result, _ = ranks[0]
    for other, (first, second) in ranks:
        assert other == result
        assert first == second  # Accelerate does not count an unfinished epoch (page 30)
    assert result.processes == len(ranks) == 3
    assert [loader.settings for loader in result.loaders] == LOADERS
    return result.loaders


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    command = "shards --quick --samples 10 --no-set-epoch --guess 4"
    return run_measured(tmp_path_factory.mktemp("quick"), command)


def ids_of(epoch):
    """Return the ids of all samples that were read in the epoch, rank by rank."""
    return list(chain.from_iterable(chain.from_iterable(epoch.batches)))


def epochs_with(loaders, **fields):
    """Return a (settings, epoch) pair for each epoch of the loaders that have these settings."""
    pairs = [
        (loader.settings, epoch)
        for loader in loaders
        if fields.items() <= asdict(loader.settings).items()
        for epoch in loader.epochs
    ]
    assert pairs
    return pairs


def test_with_padding_all_samples_are_read_and_without_padding_none_is_read_twice(loaders):
    for settings, epoch in epochs_with(loaders):
        ids, every = ids_of(epoch), set(range(settings.samples))
        again = {sample for sample in ids if ids.count(sample) > 1}
        assert epoch.more_than_once == sorted(again)
        assert epoch.never == sorted(every - set(ids))
        no_padding = settings.drop_last or not settings.even_batches
        assert not (again if no_padding else every - set(ids))


def test_all_ranks_read_the_same_batch_sizes_unless_even_batches_is_off(loaders):
    for loader in loaders:
        settings = loader.settings
        for epoch in loader.epochs:
            sizes = [[len(batch) for batch in batches] for batches in epoch.batches]
            are_even = sizes[0] == sizes[1] == sizes[2]
            assert (loader.gather is not None) == are_even
            # With dispatch_batches, rank 0 pads with samples from its first batch. A first batch
            # of one sample is too small to pad the batches of three ranks.
            is_short = settings.dispatch_batches and settings.samples == 1
            if settings.even_batches:
                assert are_even == (not is_short)
    assert sum(loader.gather is None for loader in loaders) > 10


def test_accelerate_pads_to_full_batches_and_torch_only_to_equal_shards(loaders):
    for settings, epoch in epochs_with(loaders, drop_last=False, even_batches=True):
        padding = len(ids_of(epoch)) - settings.samples
        if settings.method == TORCH or settings.dispatch_batches:
            assert 0 <= padding < 3
        else:
            global_batch = settings.batch_size * (1 if settings.split_batches else 3)
            assert padding == -settings.samples % global_batch


def test_without_set_epoch_torch_repeats_its_order_and_accelerate_does_not(loaders):
    for loader in loaders:
        settings, (first, second) = loader.settings, loader.epochs
        assert first.same_order_as_epoch_1 is None
        if settings.samples > 4:
            repeats = not settings.shuffle or (settings.method == TORCH and not settings.set_epoch)
            assert second.same_order_as_epoch_1 is repeats
    epochs_by_settings = {loader.settings: loader.epochs for loader in loaders}
    for settings, epoch in epochs_with(loaders, method=ACCELERATE, set_epoch=False):
        # Accelerate counts the epochs itself, so `set_epoch` makes no difference.
        assert epoch in epochs_by_settings[replace(settings, set_epoch=True)]


def test_the_repeated_order_is_shuffled(loaders):
    for _, epoch in epochs_with(loaders, method=TORCH, set_epoch=False, samples=30):
        by_rank = [list(chain.from_iterable(batches)) for batches in epoch.batches]
        order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
        assert by_rank == [order[rank::3] for rank in range(3)]
        assert order != sorted(order)


def test_only_gather_for_metrics_with_accelerates_loader_drops_the_padding(loaders):
    for loader in loaders:
        if loader.gather is None:
            continue
        everything = sorted(ids_of(loader.epochs[0]))
        assert sorted(loader.gather) == everything
        counted = sorted(loader.gather_for_metrics)
        if loader.settings.method == TORCH:
            assert counted == everything  # Accelerate does not know which samples are padding
        else:
            assert counted == sorted(set(everything))


def test_split_batches_splits_a_global_batch_among_the_ranks(loaders):
    for settings, epoch in epochs_with(loaders, split_batches=True, drop_last=True):
        order = torch.randperm(settings.samples, generator=torch.Generator().manual_seed(0))
        if epoch.epoch == 1:
            for number, batch in enumerate(order.split(settings.batch_size)):
                parts = [batches[number : number + 1] for batches in epoch.batches]
                whole = list(chain.from_iterable(chain.from_iterable(parts)))
                assert whole == (batch.tolist() if len(batch) == settings.batch_size else [])


def test_the_map_and_the_picture_show_which_rank_read_each_sample(loaders):
    for loader in loaders:
        if (loader.settings.samples, loader.settings.batch_size) != (22, 6):
            continue
        rows = [line for line in reading_table([loader]).splitlines() if "`" in line]
        frames = [set(frame) for frame in framed_samples(draw([loader]))]
        for row, epoch in enumerate(loader.epochs):
            shown = rows[row].split("`")[1]
            who = [[] for _ in range(22)]
            for rank, batches in enumerate(epoch.batches):
                for sample in chain.from_iterable(batches):
                    who[sample].append(MARKS[rank])
            assert list(shown) == ["*" if w[1:] else w[0] if w else "-" for w in who]
            assert frames[row] == set(epoch.more_than_once)


def framed_samples(figure):
    """Return, for each epoch in a one-panel picture, the samples that have a frame."""
    samples = []
    for frames in figure.axes[0].collections[1::3]:  # each epoch has cells, frames, crosses
        assert isinstance(frames, PolyCollection)
        ends = [(p.vertices.min(axis=0), p.vertices.max(axis=0)) for p in frames.get_paths()]
        samples.append([round((low[0] + high[0]) / 2) for low, high in ends])
    return samples


def reads_by_hand(samples, ranks):
    """Make up two epochs in which all ranks read sample 0, and one rank reads each other sample."""
    batches = [[[0, *range(1 + rank, samples, ranks)]] for rank in range(ranks)]
    epochs = [epoch_reads(number, batches, batches, samples) for number in (1, 2)]
    settings = LoaderSettings("by hand", samples, samples, epochs=2)
    return LoaderReads("by hand", samples, settings, epochs)


@pytest.mark.parametrize(("samples", "ranks"), [(4, 2), (22, 3), (22, 9), (400, 6)])
def test_every_text_is_large_enough_and_inside_the_picture(samples, ranks):
    figure = draw(2 * [reads_by_hand(samples, ranks)])
    figure.draw_without_rendering()
    paper = figure.bbox
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible():
            assert text.get_fontsize() >= 8
            box = text.get_window_extent()
            assert paper.x0 <= box.x0 and box.x1 <= paper.x1, text.get_text()
            assert paper.y0 <= box.y0 and box.y1 <= paper.y1, text.get_text()


def test_the_command_prints_the_numbers_of_its_json(quick_run):
    shown, result = quick_run.stdout, quick_run.json
    assert result["processes"] == 2
    assert shown.startswith("2 connected processes on cpu (gloo): 10 samples, batches of 4 per")
    loaders = []
    for loader in result["loaders"]:
        epochs = [EpochReads(**epoch) for epoch in loader["epochs"]]
        loaders.append(
            LoaderReads(
                loader["name"], loader["samples"], LoaderSettings(**loader["settings"]), epochs
            )
        )
    methods = [(loader.settings.method, len(loader.epochs)) for loader in loaders]
    assert methods == [(TORCH, 2), (ACCELERATE, 2)]
    assert reading_table(loaders) in shown
    rows = [line for line in shown.splitlines() if line.startswith("|") and "`" in line]
    assert [row.split("|")[-2].strip() for row in rows[:4]] == ["–", "yes", "–", "no"]


def test_gather_counts_sixteen_samples_instead_of_ten(quick_run):
    accelerate = quick_run.json["loaders"][1]
    assert (len(accelerate["gather"]), len(accelerate["gather_for_metrics"])) == (16, 10)
    assert "16 (10 different) | 10 (10 different)" in quick_run.stdout


def test_the_guess_is_compared_with_the_duplicates_of_the_last_loader(quick_run):
    assert quick_run.stdout.endswith(
        "\nYour guess: 4 samples. The result: 6 samples. Your guess is too low by 2 samples.\n"
    )


def test_the_picture_names_methods_epochs_and_ranks(quick_run):
    for words in (TORCH, ACCELERATE, "epoch 1", "epoch 2", "rank 0", "rank 1", "6 more than once"):
        assert f"<!-- {words} -->" in quick_run.picture
    assert "order of epoch 1" in quick_run.picture
    assert "<!-- read more than once -->" in quick_run.picture
    assert "never read" not in quick_run.picture  # every sample was read


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--dispatch-batches --drop-last", "--no-even-batches"])
def test_the_output_is_the_same_each_time(start, flags):
    command = ["accel-demo", "shards", "--processes", 3, *flags.split()]
    runs = [start(command, timeout=200) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.startswith("3 connected processes on cpu (gloo): 22 ")
    # Without even batches, the last batches of the three ranks have 4, 4 and 2 samples.
    ends = "NCCL may also hang" in runs[0].stdout
    assert ends == (flags == "--no-even-batches")


def test_uneven_batches_are_explained():
    text = explain_uneven_batches([[[0, 1], [2, 3]], [[4, 5]]])
    assert text.startswith("rank 0 has more batches (2) than rank 1 (1).")
    assert "all-reduce of batch 2 on rank 0 would wait for rank 1" in text
    text = explain_uneven_batches([[[0, 1], [2, 3]], [[4, 5], [6]]])
    assert text.startswith("batch 2 has 2, 1 samples by rank.")


def test_the_picture_shows_the_first_400_of_more_samples():
    [panel, *_] = draw([reads_by_hand(500, 2)]).axes
    assert panel.get_title(loc="left") == "by hand (the first 400 of 500 samples)"
    parts, *_ = panel.collections
    assert len(parts.get_paths()) == 401  # both ranks have read sample 0
