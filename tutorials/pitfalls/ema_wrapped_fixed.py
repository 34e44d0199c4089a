"""Average the weights of the model inside the wrapper.

torchrun --standalone --nproc-per-node 2 tutorials/pitfalls/ema_wrapped_fixed.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1, 1))
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.rand(16, 1)
    for batch in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model.module)
    if dist.get_rank() == 0:
        plain = nn.Linear(1, 1)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(averaged.module.state_dict(), f"{folder}/averaged.pt")
            result = plain.load_state_dict(torch.load(f"{folder}/averaged.pt"), strict=False)
        tensors = len(plain.state_dict())
        loaded = f"{tensors - len(result.missing_keys)} of {tensors} averaged tensors"
        print(f"{dist.get_world_size()} processes: a plain model loads {loaded}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
