"""Train a generator and a critic in one `accumulate` context.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/two_accumulates_fixed.py
"""

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import Adam


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    generator, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [Adam(model.parameters(), 0.01) for model in (generator, critic)]
    generator, critic, *optimizers = accelerator.prepare(generator, critic, *optimizers)
    set_seed(0, device_specific=True)  # each rank draws its own samples
    for _ in range(8):
        noise, real = torch.rand(8, 1), torch.rand(8, 1) + 1
        with accelerator.accumulate(critic, generator):
            with torch.no_grad():
                fake = generator(noise)
            accelerator.backward((critic(fake) - critic(real)).mean())
            optimizers[1].step()
            optimizers[1].zero_grad()
            accelerator.backward(-critic(generator(noise)).mean())
            optimizers[0].step()
            optimizers[0].zero_grad()
    states = optimizers[0].state.values(), optimizers[1].state.values()
    steps = [sum(int(state["step"]) for state in each) // 2 for each in states]  # of 2 parameters
    accelerator.print(f"{accelerator.num_processes} processes and 8 micro-batches:", end=" ")
    accelerator.print(f"{steps[0]} steps of the generator, {steps[1]} of the critic")
    accelerator.end_training()


if __name__ == "__main__":
    main()
