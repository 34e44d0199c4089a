"""Train a plain script that has the fault of exercise 40, and profile it on both ranks.

torchrun --standalone --nproc-per-node 2 tutorials/exercises/graders/traced_40.py
python tutorials/40_compare.py runs/exercise_40
cp runs/exercise_40/all_ranks.json.gz tutorials/exercises/40_traces/e.json.gz
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FOLDER = Path("runs/exercise_40")
STEPS = schedule(skip_first=3, wait=0, warmup=1, active=4, repeat=1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2048, 3, 32, 32), torch.randint(0, 10, (2048,)))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    layers = nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 15 * 15, 256)
    network = DistributedDataParallel(nn.Sequential(*layers, nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    medians = []
    FOLDER.mkdir(parents=True, exist_ok=True)

    def save(profiler):
        profiler.export_chrome_trace(str(FOLDER / f"{rank}.json"))

    with profile(schedule=STEPS, on_trace_ready=save) as profiler:
        for images, labels in loader:
            loss = F.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:  # for a log of the weights
                medians.append(network.module[3].weight.detach().median())
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
