"""Grade exercise 36: collect what all readers read, with 1, 2 and 3 ranks and 0 and 2 workers."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from grading import Wrong, grade, import_answer, naming_errors, shorten, torch

LENGTHS = (7, 1, 12, 4, 9)  # of the files
BATCH, SEED = 2, 5
RANKS, WORKERS = (1, 2, 3), (0, 2)
RIGHT = "each sample at most once, equal numbers of batches, and a new order in each epoch"
DIVIDE = "When each sample is read once"


def observe(answer: Path) -> None:
    module = import_answer(answer)
    with tempfile.TemporaryDirectory() as folder:
        paths, first = [], 0
        for number, length in enumerate(LENGTHS):
            paths.append(Path(folder, f"{number}.txt"))
            paths[-1].write_text(
                "".join(f"{first + line}\n" for line in range(length)), encoding="utf-8"
            )
            first += length
        for ranks in RANKS:
            for workers in WORKERS:
                judge_epochs(module.Stream, [str(path) for path in paths], ranks, workers)


def judge_epochs(make_stream, paths: list[str], ranks: int, workers: int) -> None:
    where = f"with {ranks} rank{'s' * (ranks > 1)} and {workers} workers"
    orders = []
    for epoch in (0, 1, 0):
        state = torch.get_rng_state()
        torch.manual_seed(100 + len(orders))  # the order may not depend on it
        batches = [read(make_stream, paths, rank, ranks, workers, epoch) for rank in range(ranks)]
        torch.set_rng_state(state)
        judge(batches, workers, where)
        orders.append(batches)
    if orders[0] == orders[1]:
        raise Wrong(f"{where}, epoch 1 has the same order as epoch 0", read="Shuffling")
    if orders[0] != orders[2]:
        raise Wrong(f"{where}, epoch 0 has another order when it is read again", read="Shuffling")


def read(make_stream, paths, rank: int, ranks: int, workers: int, epoch: int) -> list[list[int]]:
    """Return the batches of a rank. Its workers are forked, because the answer is no module."""
    stream = make_stream(list(paths), BATCH, rank, ranks, SEED)
    stream.set_epoch(epoch)
    context = "fork" if workers else None
    loader = torch.utils.data.DataLoader(
        stream, BATCH, num_workers=workers, multiprocessing_context=context
    )
    with naming_errors("Stream raises"):
        return [[int(sample) for sample in batch] for batch in loader]


def judge(batches: list[list[list[int]]], workers: int, where: str) -> None:
    """Judge an epoch: the batches of each rank."""
    total, readers = sum(LENGTHS), len(batches) * max(workers, 1)
    by_rank = [Counter(sample for batch in own for sample in batch) for own in batches]
    read = sum(by_rank, Counter())
    if not read:
        raise Wrong(f"{where}, no sample is read")
    if strange := sorted(set(read) - set(range(total))):
        raise Wrong(f"{where}, {shorten(strange[0])} is read, which is in no file")
    if max(read.values()) > 1:
        again = next(sample for sample, times in read.items() if times > 1)
        raise Wrong(f"{where}, {explain(again, by_rank, workers)}", read=DIVIDE)
    missing = total - len(read)
    if missing >= readers * BATCH:
        most = f"one batch of each of {readers} readers has {readers * BATCH}"
        raise Wrong(
            f"{where}, {missing} of {total} samples are never read, but {most}", read=DIVIDE
        )
    numbers = [len(own) for own in batches]
    if len(set(numbers)) > 1:
        text = ", ".join(map(str, numbers))
        raise Wrong(f"{where}, the ranks have {text} batches", read="When a rank has no batch left")
    if short := [batch for own in batches for batch in own if len(batch) < BATCH]:
        sizes = f"a batch has {len(short[0])} sample instead of {BATCH}"
        raise Wrong(f"{where}, {sizes}", read="When a rank has no batch left")


def explain(sample: int, by_rank: list[Counter], workers: int) -> str:
    times = [counter[sample] for counter in by_rank]
    again = f"sample {sample} is read {sum(times)} times"
    if max(times) == 1:
        return f"{again}, by {sum(times)} ranks"
    if workers:
        return f"{again}, by {max(times)} workers of a rank"
    return f"{again} by one rank"


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right=RIGHT))
