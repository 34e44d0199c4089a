"""Evaluate a part of the data with a `Subset`, and drop the samples that fill up.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/subset_sampler_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Subset


def main():
    accelerator = Accelerator(cpu=True)
    data = torch.arange(100.0)[:, None]
    held_out = range(0, 100, 10)  # 10 samples
    loader = DataLoader(Subset(data, held_out), batch_size=4)
    model, loader = accelerator.prepare(nn.Linear(1, 1), loader)
    samples = []
    model.eval()
    with torch.no_grad():
        for batch in loader:
            model(batch)
            samples.append(accelerator.gather_for_metrics(batch))
    samples = torch.cat(samples)
    accelerator.print(f"{accelerator.num_processes} processes: {len(samples)} results", end=" ")
    accelerator.print(f"of {len(samples.unique())} samples")
    accelerator.end_training()


if __name__ == "__main__":
    main()
