"""Print the random numbers that the loader worker of each rank draws in two epochs.

torchrun --standalone --nproc-per-node 2 c23_worker_seeds.py [own]
"""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class D(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i, torch.randint(0, 1000, ())


loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
a = Accelerator(cpu=True, dataloader_config=loading)
set_seed(7, device_specific=True)
kw = dict(generator=torch.Generator()) if "own" in sys.argv else {}
loader = a.prepare(DataLoader(D(), batch_size=2, shuffle=True, num_workers=1, **kw))
out = []
for _ in range(2):
    for _, r in loader:
        out.append(r.tolist())
for r in range(a.num_processes):
    if a.process_index == r:
        print("rank", r, out, flush=True)
    a.wait_for_everyone()
a.end_training()
