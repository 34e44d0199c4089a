"""Train so that a killed run can be resumed to the same bits. The numbers are those of page 34.

torchrun --standalone --nproc-per-node 3 tutorials/34_recipe.py --run-dir runs/a
torchrun --standalone --nproc-per-node 3 tutorials/34_recipe.py --run-dir runs/b --kill-after 17
torchrun --standalone --nproc-per-node 3 tutorials/34_recipe.py --run-dir runs/b --resume
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed.nn.functional  # before a group exists, so that its threads end
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

SEED, EPOCHS, BATCH_SIZE, ACCUMULATE, SAVE_EVERY = 7, 3, 8, 2, 5  # SAVE_EVERY: optimizer steps


class Points(Dataset):
    """Points in the plane, with noise; the label says if a point is in the unit circle."""

    epoch = 0

    def __init__(self):
        self.points = torch.randn(384, 2, generator=torch.Generator().manual_seed(SEED))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        seed = SEED + index + len(self) * self.epoch  # 7: not from a worker's random state
        noise = torch.randn(2, generator=torch.Generator().manual_seed(seed))
        return self.points[index] + 0.1 * noise, int(self.points[index].norm() < 1)


class Position:
    """What the run has finished: whole epochs, and batches of the next one, on all ranks."""

    def __init__(self):
        self.epoch = self.batches = self.steps = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def main(options):
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),  # 1
    )
    set_seed(SEED, device_specific=True)  # different dropout masks on each rank
    dataset, position = Points(), Position()
    own = torch.Generator().manual_seed(accelerator.process_index)  # 2
    sampler = RandomSampler(dataset)  # 2
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, generator=own, num_workers=1)  # 2
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(position)  # 4

    if options.resume:
        model(torch.ones(BATCH_SIZE, 2, device=accelerator.device)).sum().backward()  # 6
        optimizer.zero_grad()
        accelerator.load_state(options.run_dir)
        accelerator.print(f"resumed after step {position.steps}")
    for epoch in range(position.epoch, EPOCHS):
        loader.set_epoch(epoch)  # 3
        dataset.epoch = epoch  # 7
        done = position.batches // accelerator.num_processes
        batches = accelerator.skip_first_batches(loader, done)
        for points, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(points), labels))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            position.batches += accelerator.num_processes
            if accelerator.sync_gradients:  # 5: not inside an accumulation window
                position.steps += 1
                if position.steps % SAVE_EVERY == 0:
                    accelerator.save_state(options.run_dir)  # 5: on all ranks
                if position.steps == options.kill_after:
                    os.kill(os.getpid(), signal.SIGKILL)
        position.epoch, position.batches = epoch + 1, 0
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    accelerator.print(f"{accelerator.num_processes} processes, {position.steps} steps: {digest}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kill-after", type=int, metavar="STEPS")
    main(parser.parse_args())
