"""Pack text into blocks of tokens, and resume twice in the middle of the stream.

python tutorials/36_blocks.py
"""

import multiprocessing
from functools import partial
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_demo.processes.group import run_in_group

DOCUMENTS = [" ".join(map(str, range(number))) for number in range(1, 17)]
BLOCK, BATCH, WORKERS, STEPS = 8, 2, 2, 2
END = ord("|")  # follows each document; here, a token is a byte


class Blocks(IterableDataset):
    """Pack a reader's documents into blocks, each with the reader's number and next position.

    `positions` has, by reader, the document and the token to start with.
    """

    def __init__(self, documents, rank, ranks, positions):
        self.documents, self.rank, self.ranks = documents, rank, ranks
        self.positions = positions

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = worker * self.ranks + self.rank, workers * self.ranks
        first, token = self.positions.get(reader, (reader, 0))
        block = []
        for document in range(first, len(self.documents), readers):
            tokens = [*self.documents[document].encode(), END]
            while token < len(tokens):
                taken = tokens[token : token + BLOCK - len(block)]
                block, token = block + taken, token + len(taken)
                if len(block) == BLOCK:
                    yield torch.tensor(block), reader, (document, token)
                    block = []
            token = 0


def main(device):
    multiprocessing.set_forkserver_preload(["torch"])  # workers start in milliseconds
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stream = partial(Blocks, DOCUMENTS, rank, ranks)

    whole = [batch[0] for batch in loader(stream({}))]
    saved = {}
    for _ in range(2):
        saved = positions_after(STEPS, loader(stream(saved)), saved)
    rest = [batch[0] for batch in loader(stream(saved))]

    tokens = torch.tensor(sum(batch.numel() for batch in whole))
    dist.all_reduce(tokens)
    done = 2 * STEPS
    is_same = all(map(torch.equal, whole[done:], rest)) and len(whole) == done + len(rest)
    parts = [None] * ranks
    dist.all_gather_object(parts, (whole[0], is_same))
    if rank == 0:
        print("first two blocks of rank 0:")
        for block in parts[0][0]:
            print(repr(bytes(block.tolist()).decode()))
        total = sum(len(document) + 1 for document in DOCUMENTS)
        print(f"{tokens} of {total} tokens are in blocks")
        print(f"saved after {done} steps: {dict(sorted(saved.items()))}")
        print(f"resumed twice: {'the same' if all(part[1] for part in parts) else 'other'} blocks")


def positions_after(steps, batches, saved):
    """Train for some steps. Return what a checkpoint has to contain: each reader's position."""
    positions = dict(saved)  # a reader that has ended keeps its position
    for _, readers, (documents, tokens) in islice(batches, steps):
        positions[int(readers[-1])] = int(documents[-1]), int(tokens[-1])
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, positions)
    changed = (own.items() - saved.items() for own in of_ranks)
    return saved | dict(chain.from_iterable(changed))


def loader(stream):
    return DataLoader(stream, BATCH, num_workers=WORKERS, multiprocessing_context="forkserver")


if __name__ == "__main__":
    run_in_group(main, 2)
