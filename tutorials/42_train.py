"""A training script without accel-demo. Page 42 measures its memory.

torchrun --nproc-per-node 2 tutorials/42_train.py
torchrun --nproc-per-node 2 tutorials/42_train.py --checkpointing
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
import torch.nn.functional as F
from encoder import Encoder
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOKENS, WIDTH, BATCH_SIZE = 64, 256, 16


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, TOKENS, WIDTH))
    loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data))
    model = DistributedDataParallel(Encoder(4, WIDTH, checkpointing="--checkpointing" in sys.argv))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for (batch,) in loader:
        loss = F.mse_loss(model(batch), batch.mean(1, keepdim=True).expand_as(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
