"""Evaluate 22 samples on three ranks with nine methods, and check which methods are exact."""

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, DistributedSampler

from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import table

SAMPLES, BATCH = range(22), 5
MISTAKES = torch.tensor([0, 1, 2, 20])  # samples that the model misclassifies: 18 of 22 are correct


def main(device: torch.device) -> None:
    no_pads = DataLoaderConfiguration(even_batches=False)
    uneven, accelerator = (Accelerator(cpu=use_cpu(), dataloader_config=d) for d in (no_pads, None))
    gather, gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics
    plain = DataLoader(SAMPLES, BATCH)  # every rank loads all samples
    by_sampler = DataLoader(SAMPLES, BATCH, sampler=DistributedSampler(SAMPLES, shuffle=False))
    prepared = accelerator.prepare(plain)
    twice = accelerator.prepare(by_sampler)  # split by the sampler, and again by Accelerate

    def collect(gather, loader):
        return torch.cat([gather(samples.to(device)) for samples in loader]).cpu()

    padded = collect(gather, prepared)
    scalars = [gather_for_metrics(accuracy(samples.cpu()).to(device)) for samples in prepared]
    own = torch.cat([samples.cpu() for samples in uneven.prepare(plain)])
    all_own = torch.tensor(gather_object(own.tolist()))
    mean_of_ranks = accelerator.reduce(accuracy(own).to(device), "mean")
    batches = [gather_for_metrics(samples).cpu() for samples in prepared]
    mean_of_batches = torch.stack([accuracy(samples) for samples in batches]).mean()
    rows = [
        row("one process, one sum", torch.tensor(SAMPLES)),
        row("mean of the ranks' accuracies", all_own, mean_of_ranks),
        row("mean of the batches' accuracies", torch.cat(batches), mean_of_batches),
        row("`gather`", padded),
        row("`gather_for_metrics`, loader not prepared", collect(gather_for_metrics, plain)),
        row("`gather_for_metrics`, `DistributedSampler`", collect(gather_for_metrics, by_sampler)),
        row("`DistributedSampler` and prepared", collect(gather_for_metrics, twice)),
        row("`gather_for_metrics`, loader prepared", collect(gather_for_metrics, prepared)),
        row("`gather_for_metrics`, each rank's accuracy", padded, torch.cat(scalars).mean()),
    ]
    if dist.get_rank() == 0:
        numbered = [[number, *cells] for number, cells in enumerate(rows, start=1)]
        print(table(["row", "method", "counted", "unique", "accuracy", "exact"], numbered))
        right = [name for name, counted, _, _, exact in rows[1:] if (counted, exact) == (22, "yes")]
        print(
            f"\nExact methods for several processes that count each sample once: {', '.join(right)}"
        )


def row(name: str, samples: torch.Tensor, result: torch.Tensor | None = None) -> list:
    result = accuracy(samples) if result is None else result
    is_exact = abs(float(result) - 18 / 22) < 1e-6
    return [name, len(samples), len(samples.unique()), f"{result:.1%}", "yes" if is_exact else "no"]


def accuracy(samples: torch.Tensor) -> torch.Tensor:
    return 1 - torch.isin(samples, MISTAKES).float().mean()


if __name__ == "__main__":
    run_in_group(main, 3)
