import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

a = Accelerator(cpu=True)
data = list(range(9))  # 9 samples, 2 ranks, batches of 5
loader = a.prepare(DataLoader(data, batch_size=5))
per_sample, scalars, shapes = [], [], []
for b in loader:
    per_sample.append(a.gather_for_metrics(b.float()))
for b in loader:
    s = a.gather_for_metrics(b.float().mean())
    shapes.append(tuple(s.shape))
    scalars.append(s)
if a.is_main_process:
    print("true mean", sum(data) / 9, "per-sample", torch.cat(per_sample).mean().item())
    print("scalars", torch.cat(scalars).mean().item(), shapes, flush=True)
a.end_training()
