"""Gather the results of a loader that isn't prepared, so that each process reads all samples.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/gather_unprepared_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    data = torch.arange(10.0)[:, None]
    loader = DataLoader(data, batch_size=4)
    model = accelerator.prepare(nn.Linear(1, 1))
    correct = []
    model.eval()
    with torch.no_grad():
        for batch in loader:
            model(batch)
            correct.append(accelerator.gather_for_metrics(batch[:, 0] < 3))  # samples 0, 1 and 2
    correct = torch.cat(correct)
    share = f"{int(correct.sum())} of {len(correct)} samples"
    accelerator.print(f"{accelerator.num_processes} processes: {share} are correct")
    accelerator.end_training()


if __name__ == "__main__":
    main()
