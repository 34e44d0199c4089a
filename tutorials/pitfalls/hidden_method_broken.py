"""Call a method of a model that Accelerate has wrapped.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/hidden_method_broken.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


class Model(nn.Linear):
    def generate(self, inputs, steps):
        for _ in range(steps):
            inputs = self(inputs)
        return inputs


def main():
    accelerator = Accelerator(cpu=True)
    model = Model(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(torch.arange(16.0)[:, None], batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"{accelerator.num_processes} processes have trained", flush=True)
    with torch.no_grad():
        outputs = model.generate(torch.ones(3, 1), steps=2)
    accelerator.print(f"generated {len(outputs)} outputs")
    accelerator.end_training()


if __name__ == "__main__":
    main()
