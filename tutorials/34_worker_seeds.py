"""Test whether the loader workers of different ranks draw the same random numbers.

torchrun --standalone --nproc-per-node 2 tutorials/34_worker_seeds.py
"""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object, set_seed
from torch.utils.data import DataLoader, Dataset, RandomSampler  # noqa: F401 (`ARGUMENTS` uses it)

from accel_demo.batches import safe_start_of_workers
from accel_demo.errors import one_line_errors
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.launch_checks import check_launch

SEED, EPOCHS, SAMPLES = 7, 2, 24
ARGUMENTS = [  # Python code, evaluated on each rank
    "shuffle=True",
    "shuffle=True, generator=torch.Generator()",
    "shuffle=True, generator=torch.Generator().manual_seed(rank)",
    "sampler=RandomSampler(dataset), generator=torch.Generator().manual_seed(rank)",
]


class Draws(Dataset):
    """Each sample is its index and a random number that a loader worker draws."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(1_000_000, ()))


def main() -> None:
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)
    accelerator = Accelerator(cpu=use_cpu(), dataloader_config=loading)
    check_launch(accelerator.num_processes, accelerator.device, "no")
    set_seed(SEED, device_specific=True)
    accelerator.print(f"Connected processes: {accelerator.num_processes}\n")
    accelerator.print("| arguments of `DataLoader` | first epoch | second epoch |\n|---|---|---|")
    rank, start = accelerator.process_index, safe_start_of_workers()
    names = {"rank": rank, "dataset": Draws(), "start": start}
    for arguments in ARGUMENTS:
        loader = eval(f"DataLoader(dataset, num_workers=1, **start, {arguments})", globals(), names)
        loader = accelerator.prepare(loader)
        cells = [compare(list(loader)) for _ in range(EPOCHS)]
        accelerator.print(f"| `{arguments}` | {' | '.join(cells)} |")
    accelerator.end_training()


def compare(batches: list) -> str:
    """Compare the numbers that the workers of all ranks have drawn in one epoch."""
    samples, numbers = (torch.cat(part).tolist() for part in zip(*batches, strict=True))
    if sorted(gather_object(samples)) != list(range(SAMPLES)):
        raise RuntimeError("the ranks did not read every sample exactly once")
    by_rank = gather_object([numbers])
    return "**the same**" if by_rank[0] in by_rank[1:] else "different"


if __name__ == "__main__":
    with one_line_errors():
        main()
