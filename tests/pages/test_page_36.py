"""Page 36: who reads a stream, how training on it ends, and what Accelerate does with it."""

import multiprocessing
import os
from functools import partial
from itertools import islice

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import IterableDatasetShard, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from accel_demo.lab.course.exercises import all_exercises
from tests.pages.pages import TUTORIALS, load_module, rows_below, transcript

PAGE = TUTORIALS / "36_streams.md"
LENGTHS, GLOBAL_BATCH = (17, 3, 41, 11), 12


def test_only_readers_that_know_rank_and_worker_read_each_sample_once():
    rows = {tuple(row[:2]): row[2:] for row in rows_below(PAGE, "loader")}
    times = {name: row[0].strip("`") for name, row in rows.items()}
    assert times["not prepared", "nothing"] == "4" * 17
    assert times["not prepared", "by worker"] == times["not prepared", "by rank"] == "2" * 17
    assert times["not prepared", "by both"] == times["not prepared", "by both, files"] == "1" * 17
    assert rows["not prepared", "nothing"][1] == "4 times"
    assert rows["not prepared", "by both"][1:] == ["once", "5, 4"]
    assert rows["not prepared", "by both, files"][1:] == ["once", "3, 7"]


def test_accelerate_needs_a_stream_that_is_divided_by_worker_only():
    rows = {tuple(row[:2]): row[2:] for row in rows_below(PAGE, "loader")}
    for name in ("prepared", "`dispatch_batches=False`"):
        times = {how: rows[name, how][0].strip("`") for how in ("nothing", "by worker", "by both")}
        assert "0" not in times["nothing"] + times["by worker"] and set(times["nothing"]) <= {*"24"}
        assert times["by both"].count("0") == 8  # almost half of them
        assert rows[name, "by both"][1] == "8 lost"
    assert rows["prepared", "by worker"] == ["`2" + "1" * 16 + "`", "once, 1 repeated", "5, 5"]
    assert rows["prepared, `drop_last=True`", "by worker"][1:] == ["1 lost", "4, 4"]
    [digits, *others] = rows["prepared", "by worker, files"]
    assert digits.strip("`").index("0") == 10 and others == ["1 lost", "5, 5"]
    assert rows["`dispatch_batches=False`", "by both"][2] == "3, 2"


def test_each_remedy_ends_and_costs_what_the_page_says():
    rows = {row[0]: row[1:] for row in rows_below(PAGE, "remedy")}
    assert rows == {
        "nothing: rank 1 waits": ["3, 3", "11 of 17", "0"],
        "nothing, 2 epochs": ["6, 6", "17 of 17", "5"],  # the second epoch of rank 0
        "stop together": ["3, 3", "11 of 17", "0"],
        "repeat, 5 steps": ["5, 5", "15 of 17", "5"],
        "`Join`": ["3, 6", "17 of 17", "0"],
        "Accelerate, rank 0 reads": ["5, 5", "17 of 17", "1"],
    }


def test_a_list_is_copied_into_each_worker_and_a_mapped_file_is_shared_by_all():
    rows = {row[0]: row[1:] for row in rows_below(PAGE, "data")}
    [output] = transcript("data_memory").values()
    assert all(f"| {name}" in output for name in rows)
    listed, array, file, path = ([int(cell.split()[0]) for cell in row] for row in rows.values())
    assert listed[1] > 2.5 * listed[0]
    assert array[1] <= array[0] + 20 and 60 <= array[0] <= 100
    assert max(*file[:2], *path[:2]) <= 60
    assert listed[2] >= 40 and array[2] == file[2] == 40 and path[2] == 0  # pickled


def test_the_order_changes_unless_a_persistent_worker_keeps_its_copy():
    rows = [row[1:] for row in rows_below(PAGE, "loader with one worker")]
    assert [first != second for first, second in rows] == [False, True, False, True]
    assert all(sorted(map(int, order.split())) == [*range(12)] for row in rows for order in row)


def answer():
    return load_module(all_exercises()["36"].answer)


def batches_of(paths, ranks: int, workers: int) -> list[list[list[int]]]:
    """Return the batches of each rank with our answer to exercise 36."""
    by_rank = []
    for rank in range(ranks):
        size = GLOBAL_BATCH // ranks
        stream = answer().Stream(paths, size, rank, ranks)
        context = multiprocessing.get_context("fork") if workers else None
        loader = DataLoader(stream, size, num_workers=workers, multiprocessing_context=context)
        by_rank.append([batch.tolist() for batch in loader])
    return by_rank


def trained(batches: list[list[int]], wrap: bool) -> torch.Tensor:
    """Train on numbers, in float64, and return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    wrapped = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        inputs = torch.tensor(batch, dtype=torch.double)[:, None] / sum(LENGTHS)
        optimizer.zero_grad()
        (wrapped(inputs) - inputs.square()).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def trained_in_ddp(by_rank) -> torch.Tensor:
    return trained(by_rank[torch.distributed.get_rank()], wrap=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_learn_the_same_from_a_stream_as_one_process(ranks, workers, together, tmp_path):
    """The tolerance is for sums in another order, of float64."""
    paths, first = [], 0
    for length in LENGTHS:
        paths.append(tmp_path / f"{first}.txt")
        paths[-1].write_text("\n".join(map(str, range(first, first + length))))
        first += length
    [alone] = batches_of(paths, 1, workers)
    by_rank = batches_of(paths, ranks, workers)
    assert [len(own) for own in by_rank] == [len(alone)] * ranks
    for step, batch in enumerate(alone):
        assert sorted(sum((own[step] for own in by_rank), [])) == sorted(batch)
    read = sorted(sum(sum(by_rank, []), []))
    assert len(read) == len(set(read)) > first - GLOBAL_BATCH * max(workers, 1)
    expected = trained(alone, wrap=False)
    for weights in together(trained_in_ddp, ranks, by_rank=by_rank):
        assert torch.allclose(weights, expected, rtol=0, atol=1e-12)


class Numbers(IterableDataset):
    def __init__(self, numbers=range(18)):
        self.numbers, self.taken = numbers, 0

    def __iter__(self):
        for number in self.numbers:
            self.taken += 1
            yield number


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_shard_reads_everything_and_the_shards_of_a_divided_stream_lose_samples(ranks):
    whole, divided = [], []
    for rank in range(ranks):
        stream = Numbers()
        shard = IterableDatasetShard(stream, 2, num_processes=ranks, process_index=rank)
        whole += [*shard]
        assert stream.taken == 18
        own = Numbers([*islice(range(18), rank, None, ranks)])
        divided += [*IterableDatasetShard(own, 2, num_processes=ranks, process_index=rank)]
    assert set(whole) == set(range(18))
    assert len(set(divided)) < 18 or ranks == 1


def test_skipping_batches_of_a_stream_reads_them_again():
    stream = Numbers()
    try:
        loader = skip_first_batches(DataLoader(stream, 2), 3)
        batches = iter(loader)
        assert next(batches).tolist() == [6, 7] and stream.taken == 8
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def test_save_state_saves_no_position_of_a_stream(tmp_path):
    try:
        accelerator, loader = prepared(DataLoader(Numbers(), 2))
        next(iter(loader))
        accelerator.save_state(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["random_states_0.pkl"]
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def test_the_files_that_remain_go_to_different_ranks():
    files = [len(range(reader, 100, 32)) for reader in range(32)]
    by_worker_first = [sum(files[rank::8]) for rank in range(8)]  # worker * ranks + rank
    by_rank_first = [sum(files[4 * rank : 4 * rank + 4]) for rank in range(8)]
    assert by_worker_first == [13] * 4 + [12] * 4
    assert by_rank_first == [16] + [12] * 7


class AsksForRank(IterableDataset):
    def __iter__(self):
        yield torch.distributed.get_rank()


def rank_in_a_worker(start: str) -> list[int] | str:
    loader = DataLoader(AsksForRank(), None, num_workers=1, multiprocessing_context=start)
    try:
        return [*loader]
    except ValueError as error:
        return str(error)


class Growing(IterableDataset):
    def __iter__(self):
        for number in range(8):
            yield torch.ones(number // 2 + 1)


def prepared(loader: DataLoader, **configuration) -> tuple[Accelerator, DataLoader]:
    configuration = DataLoaderConfiguration(**configuration)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    return accelerator, accelerator.prepare(loader)


def padded_in_halves() -> list[tuple[int, ...]]:
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    _, loader = prepared(DataLoader(Growing(), 4, collate_fn=pad), split_batches=True)
    return [tuple(batch.shape) for batch in loader]


def read_and_gathered(dispatches: bool | None, drops: bool) -> tuple[list[int], list[int]]:
    loader = DataLoader(Numbers(range(17)), 2, drop_last=drops)
    accelerator, loader = prepared(loader, dispatch_batches=dispatches)
    read, gathered = [], []
    for batch in loader:
        read += batch.tolist()
        gathered += accelerator.gather_for_metrics(batch).tolist()
    return read, gathered


def lost_if_files_are_divided_by_worker(drops: bool) -> set[int]:
    page = load_module(TUTORIALS / "36_streams.py")
    stream = page.Stream(by_workers=True, whole_files=True)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    accelerator, loader = prepared(DataLoader(stream, 2, drop_last=drops, **workers))
    return set(range(17)) - {n for batch in loader for n in accelerator.gather(batch).tolist()}


class Epochs(IterableDataset):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from [self.epoch] * 8


def epochs_after_resuming() -> list[int]:
    accelerator, loader = prepared(DataLoader(Epochs(), 2))
    loader.set_epoch(3)
    passes = [*accelerator.skip_first_batches(loader, 1)], [*loader]
    loader.set_epoch(4)
    return [batches[0][0].item() for batches in (*passes, [*loader])]


def gradients_in_join() -> list[float]:
    """Train rank 0 on one batch, and rank 1 on two."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    gradients = []
    with Join([model]):
        for _ in range(1 + torch.distributed.get_rank()):
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            gradients.append(model.module.weight.grad.item())
    return gradients


def steps_of_accumulation(prepares: bool) -> list[bool]:
    """Accumulate over two batches. Return in which of three batches the optimizer would step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(Numbers(range(12 if prepares else 6)), 2)
    steps = []
    for _ in accelerator.prepare(loader) if prepares else loader:
        with accelerator.accumulate():
            steps.append(accelerator.sync_gradients)
    return steps


def seen_by_a_rank() -> tuple:
    cases = [(dispatches, drops) for dispatches in (None, False) for drops in (False, True)]
    read = {case: read_and_gathered(*case) for case in cases}
    ranks = {start: rank_in_a_worker(start) for start in ("fork", "forkserver")}
    lost = [lost_if_files_are_divided_by_worker(drops) for drops in (False, True)]
    others = lost, epochs_after_resuming(), gradients_in_join()
    steps = [steps_of_accumulation(prepares) for prepares in (True, False)]
    return padded_in_halves(), read, ranks, *others, steps


def test_padding_losses_epochs_and_ranks_are_what_the_page_says(together):
    padded, read, asked, *others = zip(*together(seen_by_a_rank, 2), strict=True)
    lost, epochs, gradients, steps = others
    assert lost == ([{10}, {9}],) * 2  # with drop_last, only worker 0's incomplete batch
    assert epochs == ([3, 3, 4],) * 2  # a copy has finished the first pass
    assert gradients == ([1], [1, 0.5])  # the last step is divided by two ranks, too
    assert steps == ([[False, True, True], [False, True, False]],) * 2
    assert padded == ([(2, 2), (2, 4)],) * 2  # batches that are split may be padded one by one
    assert [each["fork"] for each in asked] == [[0], [1]]  # a forked worker inherits the group
    for each in asked:
        assert "Default process group has not been initialized" in each["forkserver"]
    for dispatches in (None, False):
        assert sum(len(each[dispatches, False][0]) for each in read) > 17
        for each in read:
            is_right = sorted(each[dispatches, False][1]) == [*range(17)]
            assert is_right == (dispatches is None)
            assert sorted(each[dispatches, True][1]) == [*range(16)]  # drop_last


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_resumed_blocks_keep_their_order_after_each_round_of_the_workers(ranks, workers):
    page = load_module(TUTORIALS / "36_blocks.py")
    for rank in range(ranks):

        def batches(positions, rank=rank):
            stream = page.Blocks(page.DOCUMENTS, rank, ranks, positions)
            fork = multiprocessing.get_context("fork")
            return [*DataLoader(stream, 1, num_workers=workers, multiprocessing_context=fork)]

        whole, positions = batches({}), {}
        turns = {}
        for step, (_, [reader], (document, token)) in enumerate(whole, start=1):
            positions[reader.item()] = document.item(), token.item()
            turns[reader.item()] = turns.get(reader.item(), 0) + 1
            rest = [blocks.tolist() for blocks, *_ in batches(dict(positions))]
            expected = [blocks.tolist() for blocks, *_ in whole[step:]]
            assert sorted(rest) == sorted(expected)
            if step == workers * min(turns.values()) and len(turns) == workers:
                assert rest == expected
        assert len(turns) == workers and min(turns.values()) > 1


def resume_until_the_end(device) -> tuple:
    """Stop after every two steps, and resume from the positions. Return all blocks, and the whole.

    One worker has no more blocks before the other one.
    """
    page = load_module(TUTORIALS / "36_blocks.py")
    ranks, blocks, saved = torch.distributed.get_world_size(), [], {}

    def loader(positions):
        documents = page.DOCUMENTS[:9]
        stream = page.Blocks(documents, torch.distributed.get_rank(), ranks, positions)
        fork = multiprocessing.get_context("fork")
        return DataLoader(stream, page.BATCH, num_workers=2, multiprocessing_context=fork)

    whole = [block.tolist() for batch, *_ in loader({}) for block in batch]
    stops, is_last = 0, False
    while not is_last:
        batches = [*islice(loader(saved), 2)]
        blocks += [block.tolist() for batch, *_ in batches for block in batch]
        saved = page.positions_after(2, batches, saved)
        everyone = [None] * ranks
        torch.distributed.all_gather_object(everyone, len(batches))
        stops, is_last = stops + 1, not any(everyone)
    return ranks, stops, blocks, whole


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_that_is_resumed_many_times_reads_each_block_once(ranks, together):
    for connected, stops, blocks, whole in together(resume_until_the_end, ranks):
        assert connected == ranks and stops > 2
        assert sorted(blocks) == sorted(whole) and whole


@pytest.mark.frameworks
def test_a_stream_of_datasets_is_divided_as_the_page_says(together, tmp_path):
    found = together(read_datasets, 2, cache=tmp_path)
    assert (
        found[0]
        == found[1]
        == {
            "not prepared": (2, 2),
            "split": (1, 1),
            "prepared": (1, 2),  # repeats the first sample
            "split and prepared": (0, 2),
            "dispatch_batches=False": (1, 1),
            "dispatch_batches=False, one shard": (1, 2),
        }
    )


def read_datasets(device, cache) -> dict[str, tuple[int, int]]:
    """Return how often the samples of a stream are read: the least and the most."""
    os.environ["HF_DATASETS_CACHE"] = str(cache)  # read on import
    from datasets import IterableDataset as Dataset
    from datasets.distributed import split_dataset_by_node

    group = torch.distributed
    files = load_module(TUTORIALS / "36_streams.py").FILES

    def generate(files):
        for file in files:
            for sample in file:
                yield {"sample": sample}

    def count(is_split=False, is_prepared=False, shards=files, **configuration):
        dataset = Dataset.from_generator(generate, gen_kwargs={"files": shards})
        if is_split:
            dataset = split_dataset_by_node(dataset, group.get_rank(), group.get_world_size())
        loader = DataLoader(dataset, 2)
        if is_prepared:
            _, loader = prepared(loader, **configuration)
        everyone = [None] * group.get_world_size()
        group.all_gather_object(everyone, [n for batch in loader for n in batch["sample"].tolist()])
        times = [sum(own.count(sample) for own in everyone) for sample in range(17)]
        return min(times), max(times)

    by_rank = {"is_prepared": True, "dispatch_batches": False}
    return {
        "not prepared": count(),
        "split": count(is_split=True),
        "prepared": count(is_prepared=True),
        "split and prepared": count(is_split=True, is_prepared=True),
        "dispatch_batches=False": count(**by_rank),
        "dispatch_batches=False, one shard": count(**by_rank, shards=[range(17)]),
    }
