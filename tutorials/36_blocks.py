"""Pack text into blocks of tokens, and resume in the middle of the stream.

python tutorials/36_blocks.py
"""

import multiprocessing
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_demo.processes.group import run_in_group

DOCUMENTS = [" ".join(map(str, range(number))) for number in range(1, 17)]
BLOCK, BATCH, WORKERS, STEPS = 16, 2, 2, 2
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
    positions = {}  # what a checkpoint has to contain
    for step, (_, readers, (documents, tokens)) in enumerate(loader(stream({})), start=1):
        positions[int(readers[-1])] = int(documents[-1]), int(tokens[-1])
        if step == STEPS:  # a multiple of num_workers
            break
    rest = [batch[0] for batch in loader(stream(positions))]

    tokens = torch.tensor(sum(batch.numel() for batch in whole))
    dist.all_reduce(tokens)
    is_same = all(map(torch.equal, whole[STEPS:], rest)) and len(whole) == STEPS + len(rest)
    parts = [None] * ranks
    dist.all_gather_object(parts, (whole[0], positions, is_same))
    if rank == 0:
        print("first two blocks of rank 0:")
        for block in parts[0][0]:
            print(repr(bytes(block.tolist()).decode()))
        total = sum(len(document) + 1 for document in DOCUMENTS)
        print(f"{tokens} of {total} tokens are in blocks")
        print(f"positions after {STEPS} steps: {parts[0][1]} on rank 0, {parts[1][1]} on rank 1")
        print(f"resumed: {'the same' if all(part[2] for part in parts) else 'other'} blocks")


def loader(stream):
    return DataLoader(stream, BATCH, num_workers=WORKERS, multiprocessing_context="forkserver")


if __name__ == "__main__":
    run_in_group(main, 2)
