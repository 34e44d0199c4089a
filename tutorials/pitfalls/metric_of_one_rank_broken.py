"""Report the accuracy of rank 0's own samples.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/metric_of_one_rank_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    data = torch.arange(32.0)[:, None]
    loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, *loaders)
    for batch in loader:
        accelerator.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    correct = []
    model.eval()
    with torch.no_grad():
        for batch in test_loader:
            model(batch)
            is_correct = batch[:, 0] < 10  # samples 0 to 9 are correct
            correct.append(is_correct)
    correct = torch.cat(correct)
    share = f"{int(correct.sum())} of {len(correct)} samples"
    accelerator.print(f"{accelerator.num_processes} processes: {share} are correct")
    accelerator.end_training()


if __name__ == "__main__":
    main()
