"""Map the file into memory, and load the share of each process.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/memory_times_processes_fixed.py
"""

import tempfile
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # that of rank 0
        path = Path(folders[0], "samples.npy")
        if rank == 0:
            numpy.save(path, numpy.random.rand(64, 1000).astype("float32"))
        dist.barrier()
        share = numpy.load(path, mmap_mode="r")[rank::world_size]
        data = torch.from_numpy(numpy.array(share))
        file_size = path.stat().st_size
        dist.barrier()  # rank 0 removes the folder when all have read the file
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = DistributedDataParallel(nn.Linear(1000, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    size = torch.tensor(data.nbytes)
    dist.all_reduce(size)
    if rank == 0:
        files = size / file_size
        print(f"{world_size} processes: {files:.1f} times the file's size is in memory")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
