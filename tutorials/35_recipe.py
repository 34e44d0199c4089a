"""Train so that a run can be killed at any moment, or stopped by a signal, and resumed.

torchrun --standalone --nproc-per-node 3 --max-restarts 3 tutorials/35_recipe.py --run-dir runs/c
"""

import argparse
import hashlib
import os
import shutil
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


def save(accelerator, folder, step):
    """Save a checkpoint that is complete or absent, and keep the newest two."""
    unfinished, checkpoint = folder / ".unfinished", folder / f"step-{step:06}"
    if checkpoint.exists():
        return
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)  # what a killed save has left
    accelerator.wait_for_everyone()
    accelerator.save_state(unfinished)
    accelerator.wait_for_everyone()  # all ranks have written
    if accelerator.is_main_process:
        for path in (*unfinished.rglob("*"), unfinished):
            flush(path)
        unfinished.rename(checkpoint)  # atomic, and never onto an existing folder
        flush(folder)
        for old in checkpoints(folder)[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def flush(path):
    """Wait until a file, or a folder's list of files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checkpoints(folder):
    return sorted(folder.glob("step-*"))


def ignore_signals(worker):
    """Let a loader worker survive a SIGTERM that a scheduler sends to all processes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(options):
    signals = []  # the handler only notes the signal
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),  # 1
    )
    set_seed(SEED, device_specific=True)  # different dropout masks on each rank
    dataset, position = Points(), Position()
    own = torch.Generator().manual_seed(accelerator.process_index)  # 2
    sampler = RandomSampler(dataset)  # 2
    loader = DataLoader(
        dataset,
        BATCH_SIZE,
        sampler=sampler,
        generator=own,
        num_workers=1,
        worker_init_fn=ignore_signals,
    )
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(position)  # 4

    if found := checkpoints(options.run_dir):
        model(torch.ones(BATCH_SIZE, 2, device=accelerator.device)).sum().backward()  # 6
        optimizer.zero_grad()
        accelerator.load_state(found[-1])
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
                if signals:
                    accelerator.set_trigger()
                is_last = accelerator.check_trigger()  # on all ranks: has any rank got a signal?
                if is_last or position.steps % SAVE_EVERY == 0:
                    save(accelerator, options.run_dir, position.steps)
                if is_last:
                    accelerator.print(f"stopped after step {position.steps}")
                    accelerator.end_training()
                    return
        position.epoch, position.batches = epoch + 1, 0
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    accelerator.print(f"{accelerator.num_processes} processes, {position.steps} steps: {digest}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    main(parser.parse_args())
