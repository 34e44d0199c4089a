"""Compute an accuracy as the mean of the batches' accuracies.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/mean_of_means_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    data = torch.arange(10.0)[:, None]
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(data, batch_size=4))
    correct = []
    model.eval()
    with torch.no_grad():
        for batch in loader:
            model(batch)
            is_correct = (batch[:, 0] < 3).float()  # samples 0, 1 and 2 are correct
            correct.append(accelerator.gather_for_metrics(is_correct.mean()))
    accuracy = torch.cat(correct).mean()
    accelerator.print(f"{accelerator.num_processes} processes: the accuracy is {accuracy:.3f}")
    accelerator.print(f"3 of {len(data)} samples are correct: {3 / len(data):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
