"""`accel-demo shards` says which sample each rank has read, and what a metric counts."""

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from accel_demo.errors import one_line_errors
from accel_demo.lab.shards import command as shards
from accel_demo.lab.shards.picture import draw
from accel_demo.lab.shards.reading import (
    ACCELERATE,
    MARKS,
    TORCH,
    Dealing,
    make_loader,
    read_all,
    reading_table,
    what_would_hang,
)

SIZES = [(samples, batch_size) for samples in (1, 4, 22, 30, 36) for batch_size in (3, 6)]
OPTIONS = [
    {"way": TORCH},
    {"way": TORCH, "set_epoch": False},
    {"way": TORCH, "drop_last": True},
    {"way": TORCH, "shuffle": False},
    {"way": ACCELERATE},
    {"way": ACCELERATE, "set_epoch": False},
    {"way": ACCELERATE, "drop_last": True},
    {"way": ACCELERATE, "shuffle": False},
    {"way": ACCELERATE, "even_batches": False},
    {"way": ACCELERATE, "split_batches": True},
    {"way": ACCELERATE, "split_batches": True, "drop_last": True},
    {"way": ACCELERATE, "split_batches": True, "even_batches": False},
    {"way": ACCELERATE, "dispatch_batches": True},
    {"way": ACCELERATE, "dispatch_batches": True, "drop_last": True},
    {"way": ACCELERATE, "dispatch_batches": True, "split_batches": True},
]
DEALINGS = [
    Dealing(samples=samples, batch_size=batch_size, epochs=2, **options)
    for options in OPTIONS
    for samples, batch_size in SIZES
    if not options.get("drop_last") or samples >= 3 * batch_size  # a batch for each of three
]


def read_here(device, dealings):
    found, loader = read_all(device, dealings), make_loader(Dealing(ACCELERATE, 22, 5, 2))
    first_batches = [next(iter(loader)).tolist() for _ in range(2)]  # leaves each epoch at once
    return {**found, "after_a_break": first_batches}


@pytest.fixture(scope="module")
def ways(together):
    """What three processes have found under each of `DEALINGS`."""
    ranks = together(read_here, 3, timeout=220, dealings=DEALINGS)
    for rank in ranks:  # page 08 says so: an epoch that was left early is not counted
        first, second = rank["after_a_break"]
        assert first == second
    found = shards.merge(ranks)
    assert found["processes"] == 3 and len(found["ways"]) == len(DEALINGS)
    return dict(zip(DEALINGS, found["ways"], strict=True))


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """What the verb printed, its JSON, and its picture."""
    from tests.conftest import run_to_end

    folder = tmp_path_factory.mktemp("verb")
    command = "accel-demo shards --quick --samples 10 --no-set-epoch".split()
    files = ["--json", folder / "found.json", "--plot", folder / "found.svg"]
    result = run_to_end([*command, *files], timeout=220)
    assert result.returncode == 0, result.stderr
    found = json.loads((folder / "found.json").read_text())
    return result.stdout, found, (folder / "found.svg").read_text()


def reads(epoch):
    """All sample ids that were read, in the order of the ranks."""
    return list(chain.from_iterable(chain.from_iterable(epoch["batches"])))


def epochs_of(ways, **fields):
    """Each epoch under the dealings with these fields."""
    found = [
        (dealing, epoch)
        for dealing, way in ways.items()
        if all(getattr(dealing, name) == value for name, value in fields.items())
        for epoch in way["epochs"]
    ]
    assert found
    return found


def test_padding_reads_every_sample_and_drop_last_reads_none_twice(ways):
    for dealing, epoch in epochs_of(ways):
        ids, every = reads(epoch), set(range(dealing.samples))
        again = {sample for sample in ids if ids.count(sample) > 1}
        assert epoch["more_than_once"] == sorted(again)
        assert epoch["never"] == sorted(every - set(ids))
        assert not (again if dealing.drop_last or not dealing.even_batches else every - set(ids))


def test_all_ranks_have_equally_many_batches_unless_they_are_not_evened(ways):
    for dealing, epoch in epochs_of(ways):
        sizes = [[len(batch) for batch in batches] for batches in epoch["batches"]]
        are_even = sizes[0] == sizes[1] == sizes[2]
        assert ("gather" in ways[dealing]) == are_even
        # Rank 0 pads with what it has read first: one sample is not enough for three ranks.
        is_short = dealing.dispatch_batches and dealing.samples == 1
        if dealing.even_batches:
            assert are_even == (not is_short)
    assert sum("gather" not in way for way in ways.values()) > 10


def test_accelerate_pads_to_whole_batches_and_torch_only_to_equal_parts(ways):
    for dealing, epoch in epochs_of(ways, drop_last=False, even_batches=True):
        padding = len(reads(epoch)) - dealing.samples
        if dealing.way == TORCH or dealing.dispatch_batches:
            assert 0 <= padding < 3
        else:
            a_round = dealing.batch_size * (1 if dealing.split_batches else 3)
            assert padding == -dealing.samples % a_round


def test_without_set_epoch_torch_repeats_its_order_and_accelerate_does_not(ways):
    for dealing, (first, second) in [(d, way["epochs"]) for d, way in ways.items()]:
        assert first["same_order_as_epoch_1"] is None
        if dealing.samples > 4:
            repeats = not dealing.shuffle or (dealing.way == TORCH and not dealing.set_epoch)
            assert second["same_order_as_epoch_1"] is repeats
    for dealing, epoch in epochs_of(ways, way=ACCELERATE, set_epoch=False):
        told = ways[replace(dealing, set_epoch=True)]["epochs"]
        assert epoch in told  # Accelerate counts the epochs itself


def test_the_order_that_is_repeated_is_a_shuffled_one(ways):
    for _, epoch in epochs_of(ways, way=TORCH, set_epoch=False, samples=30):
        by_rank = [list(chain.from_iterable(batches)) for batches in epoch["batches"]]
        order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
        assert by_rank == [order[rank::3] for rank in range(3)]
        assert order != sorted(order)


def test_gather_counts_what_was_read_and_gather_for_metrics_each_sample_once(ways):
    for dealing, way in ways.items():
        if "gather" not in way:
            continue
        everything = sorted(reads(way["epochs"][0]))
        assert sorted(way["gather"]) == everything
        counted = sorted(way["gather_for_metrics"])
        if dealing.way == TORCH:
            assert counted == everything  # nobody has told it what was padding
        else:
            assert counted == sorted(set(everything))


def test_split_batches_deals_a_global_batch_where_others_deal_one_for_each(ways):
    for dealing, epoch in epochs_of(ways, split_batches=True, drop_last=True):
        order = torch.randperm(dealing.samples, generator=torch.Generator().manual_seed(0))
        if epoch["epoch"] == 1:
            for number, batch in enumerate(order.split(dealing.batch_size)):
                parts = [batches[number : number + 1] for batches in epoch["batches"]]
                whole = list(chain.from_iterable(chain.from_iterable(parts)))
                assert whole == (batch.tolist() if len(batch) == dealing.batch_size else [])


def test_the_map_and_the_picture_show_what_was_read(ways):
    some = [way for way in ways.values() if way["samples"] == 22 and way["batch_size"] == 6]
    for way in some:
        rows = [line for line in reading_table([way]).splitlines() if "`" in line]
        frames = [set(frame) for frame in marked(draw([way]))]
        for row, epoch in enumerate(way["epochs"]):
            shown = rows[row].split("`")[1]
            who = [[] for _ in range(22)]
            for rank, batches in enumerate(epoch["batches"]):
                for sample in chain.from_iterable(batches):
                    who[sample].append(MARKS[rank])
            assert list(shown) == ["*" if w[1:] else w[0] if w else "-" for w in who]
            assert frames[row] == set(epoch["more_than_once"])


def marked(figure):
    """The samples in frames, by epoch, of a picture with one panel."""
    found = []
    for frames in figure.axes[0].collections[1::3]:  # an epoch has cells, frames and crosses
        assert isinstance(frames, PolyCollection)
        ends = [(p.vertices.min(axis=0), p.vertices.max(axis=0)) for p in frames.get_paths()]
        found.append([round((low[0] + high[0]) / 2) for low, high in ends])
    return found


def dealt_by_hand(samples, ranks):
    """A way as `merge` gives it: samples in turn to each rank, the first one to all of them."""
    batches = [[[0, *range(1 + rank, samples, ranks)]] for rank in range(ranks)]
    epoch = {"same_order_as_epoch_1": True, "batches": batches, **shards.readings(batches, samples)}
    epochs = [{"epoch": number, **epoch} for number in (1, 2)]
    return {"name": "by hand", "samples": samples, "epochs": epochs}


@pytest.mark.parametrize(("samples", "ranks"), [(4, 2), (22, 3), (22, 9), (400, 6)])
def test_no_text_of_the_picture_is_small_or_leaves_it(samples, ranks):
    figure = draw(2 * [dealt_by_hand(samples, ranks)])
    figure.draw_without_rendering()
    paper = figure.bbox
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible():
            assert text.get_fontsize() >= 8
            box = text.get_window_extent()
            assert paper.x0 <= box.x0 and box.x1 <= paper.x1, text.get_text()
            assert paper.y0 <= box.y0 and box.y1 <= paper.y1, text.get_text()


def test_the_verb_prints_what_its_json_says(one_run):
    shown, found, _ = one_run
    assert found["processes"] == 2
    assert shown.startswith("2 connected processes on cpu (gloo): 10 samples, batches of 4 per")
    assert [(way["way"], len(way["epochs"])) for way in found["ways"]] == [
        (TORCH, 2),
        (ACCELERATE, 2),
    ]
    assert reading_table(found["ways"]) in shown
    rows = [line for line in shown.splitlines() if line.startswith("|") and "`" in line]
    assert [row.split("|")[-2].strip() for row in rows[:4]] == ["–", "yes", "–", "no"]


def test_of_ten_samples_gather_counts_sixteen(one_run):
    shown, found, _ = one_run
    accelerate = found["ways"][1]
    assert (len(accelerate["gather"]), len(accelerate["gather_for_metrics"])) == (16, 10)
    assert "16 (10 different) | 10 (10 different)" in shown


def test_the_picture_names_ways_epochs_and_ranks(one_run):
    for words in (TORCH, ACCELERATE, "epoch 1", "epoch 2", "rank 0", "rank 1", "6 twice"):
        assert f"<!-- {words} -->" in one_run[2]
    assert "as epoch 1" in one_run[2]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--dispatch-batches --drop-last", "--no-even-batches"])
def test_it_says_the_same_each_time(start, flags):
    runs = [
        start(["accel-demo", "shards", "--processes", 3, *flags.split()], timeout=200)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.startswith("3 connected processes on cpu (gloo): 22 ")
    ends = "NCCL waits for ever" in runs[0].stdout  # 4, 4 and 2 samples in the last batch
    assert ends == (flags == "--no-even-batches")


def test_it_is_said_what_would_hang():
    said = what_would_hang([[[0, 1], [2, 3]], [[4, 5]]])
    assert said.startswith("rank 0 has 2 batches, rank 1 has 1.")
    assert "all-reduce of batch 2 on rank 0 would wait for rank 1" in said
    said = what_would_hang([[[0, 1], [2, 3]], [[4, 5], [6]]])
    assert said.startswith("batch 2 has 2, 1 samples by rank.")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--processes 0", "--processes must be at least 1, got 0"),
        ("--samples 0", "--samples must be from 1 to 10000, got 0"),
        ("--batch-size -1", "--batch-size must be from 1 to 10000, got -1"),
        ("--samples 10001 --quick", "--samples must be from 1 to 10000, got 10001"),
        ("--epochs 0", "--epochs must be from 1 to 100, got 0"),
        (
            "--way DistributedSampler --dispatch-batches",
            "--dispatch-batches is Accelerate's: DistributedSampler has no such option, leave it "
            "out",
        ),
        (
            "--split-batches --batch-size 5",
            "--split-batches cuts a batch into 2 equal parts: --batch-size must be a multiple of "
            "2, got 5",
        ),
        (
            "--dispatch-batches --no-even-batches",
            "--dispatch-batches always gives every rank equally much, and Accelerate ignores "
            "even_batches=False there: leave one of the two out",
        ),
        (
            "--drop-last --samples 7",
            "--drop-last would leave nothing: a batch for every process takes 8 samples, and "
            "--samples is 7",
        ),
        (
            "--plot {}/x.svg --samples 401",
            "--plot draws at most 400 samples and 20 epochs: ask for fewer, or take --json",
        ),
        ("--json {}/no/x.json", "cannot write --json {}/no/x.json: No such file or directory"),
        ("--dispatch", "unrecognized arguments: --dispatch"),
    ],
)
def test_what_cannot_be_dealt_gets_one_line(capsys, tmp_path, flags, said):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        shards.main(flags.format(tmp_path).split())
    expected = f"error: {said.format(tmp_path)}\n"
    assert (stopped.value.code, *capsys.readouterr()) == (2, "", expected)
    assert list(tmp_path.iterdir()) == []
