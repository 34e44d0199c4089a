"""Save a checkpoint within an epoch, resume from it, and compare with an uninterrupted run.

accelerate launch --config_file accelerate_configs/cpu.yaml tutorials/34_kill_and_resume.py
torchrun --standalone --nproc-per-node 3 tutorials/34_kill_and_resume.py
"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import broadcast_object_list, set_seed
from safetensors.torch import load_file
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.launch_checks import check_launch

LEVELS = {  # {key: text in the table}; each level also uses everything listed above it
    "weights": "the weights alone",
    "recipe": "`save_state`, `load_state`, `skip_first_batches`",
    "seedable": "`use_seedable_sampler=True`, `data_seed`",
    "set_epoch": "`set_epoch` in every epoch",
    "complete windows": "saving only if `sync_gradients` is true",
    "own generator": "a separate generator for the loader",
    "first backward": "one backward pass before `load_state`",
}
SEED, EPOCHS, BATCHES, BATCH_SIZE, ACCUMULATE = 7, 3, 12, 4, 2  # BATCHES is per process and epoch
SAVE_IN_EPOCH, SAVE_AFTER = 1, 5  # in the second epoch, after five batches


def main() -> None:
    Parser(__doc__).parse_args()
    accelerator = new_accelerator(set())
    check_launch(accelerator.num_processes, accelerator.device, "no")
    accelerator.print(f"Connected processes: {accelerator.num_processes}")

    names = list(LEVELS)
    print_heading(accelerator, "level", "what is added")
    for level, name in enumerate(names):
        outcome, files = compare(set(names[: level + 1]))
        accelerator.print(f"| {level} | {LEVELS[name]} | {outcome} |")

    print_heading(accelerator, "removed from the last level")
    for name in names[1:]:
        outcome, _ = compare(set(names) - {name})
        accelerator.print(f"| {LEVELS[name]} | {outcome} |")
    outcome, _ = compare({*names, "rank 0 only"})
    accelerator.print(f"| `save_state` on the other ranks (only rank 0 calls it) | {outcome} |")

    accelerator.print(f"\nFiles that `save_state` wrote: {files}")
    new_accelerator(set()).end_training()


def print_heading(accelerator: Accelerator, *first: str) -> None:
    columns = [*first, "batches with the same samples after the checkpoint", "weights at the end"]
    accelerator.print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def compare(has: set[str]) -> tuple[str, str]:
    """Train, resume, and compare the runs. Return two table cells and the saved files' names."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(*broadcast_object_list([folder]))  # every rank uses rank 0's folder
        samples, weights, saved_at = train(has, checkpoint)
        resumed_samples, resumed_weights, _ = train(has, checkpoint, saved_at)
        files = ", ".join(f"`{path.name}`" for path in sorted(checkpoint.iterdir()))

        epoch, batches = saved_at
        after = samples[epoch * BATCHES + batches :]
        same = sum(map(list.__eq__, after, resumed_samples))
        pairs = zip(weights, resumed_weights, strict=True)
        error = max(float((a - b).detach().abs().max()) for a, b in pairs)
        accelerator = new_accelerator(has)
        counts = torch.tensor([[same, len(after), error > 0, error > 1e-6]])
        all_counts = accelerator.gather(counts.to(accelerator.device))
        same, count, differ, differ_much = all_counts.sum(dim=0).tolist()
    result = "differ" if differ_much else "differ in the last bits" if differ else "**equal**"
    return f"{same} of {count} | {result}", files


def new_accelerator(has: set[str]) -> Accelerator:
    """Reset Accelerate's shared state, as in a new process, and return a new Accelerator."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    loading = DataLoaderConfiguration()
    if "seedable" in has:
        loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)
    return Accelerator(
        cpu=use_cpu(), gradient_accumulation_steps=ACCUMULATE, dataloader_config=loading
    )


def train(has: set[str], checkpoint: Path, start: tuple[int, int] | None = None):
    """Train from the beginning and save one checkpoint, or resume from it if `start` is given.

    `start` is the position of the checkpoint: (epoch, number of finished batches in this epoch).
    Return the samples of every batch, the final weights, and the position.
    """
    accelerator = new_accelerator(has)
    set_seed(SEED, device_specific=True)  # so that dropout differs between processes
    count = BATCHES * BATCH_SIZE * accelerator.num_processes
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.arange(count), inputs, inputs.sum(dim=1, keepdim=True))
    rank = accelerator.process_index
    generator = torch.Generator().manual_seed(rank) if "own generator" in has else None
    loader = DataLoader(dataset, BATCH_SIZE, sampler=RandomSampler(dataset), generator=generator)
    layers = torch.nn.Dropout(0.2), torch.nn.Linear(8, 99), torch.nn.ReLU(), torch.nn.Linear(99, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    if start and "first backward" in has:
        model(inputs[:BATCH_SIZE]).sum().backward()
        optimizer.zero_grad()
    if start and "recipe" in has:
        accelerator.load_state(checkpoint)
    elif start:
        accelerator.unwrap_model(model).load_state_dict(load_file(checkpoint / "model.safetensors"))
    samples, saved_at = [], start
    for epoch in range(start[0] if start else 0, EPOCHS):
        if "set_epoch" in has:
            loader.set_epoch(epoch)
        done = start[1] if start and epoch == start[0] and "recipe" in has else 0
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        for index, (numbers, inputs, targets) in enumerate(batches, start=done):
            samples.append(numbers.tolist())
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            is_due = epoch == SAVE_IN_EPOCH and index + 1 >= SAVE_AFTER and not saved_at
            if is_due and (accelerator.sync_gradients or "complete windows" not in has):
                if accelerator.is_main_process or "rank 0 only" not in has:
                    accelerator.save_state(checkpoint)
                saved_at = epoch, index + 1
    return samples, list(model.parameters()), saved_at


if __name__ == "__main__":
    with one_line_errors():
        main()
