"""Gather results that are no tensors of equal shape, in two processes.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml tutorials/12_gather.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

NAMES = [f"image-{number}" for number in range(5)]


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    loader = accelerator.prepare(DataLoader(NAMES, batch_size=3))
    for names in loader:  # rank 0: images 0 to 2; rank 1: images 3 and 4, and image 0 again
        gathered = accelerator.gather_for_metrics(names)
        accelerator.print("a list of strings:", gathered)
        gathered = accelerator.gather_for_metrics({"name": names, "score": [0.5] * len(names)})
        accelerator.print("a dict with strings:", gathered)

        words = torch.full((len(names), 2 + accelerator.process_index), 7)  # [3, 2], [3, 3]
        padded = accelerator.pad_across_processes(words, dim=1, pad_index=-1)
        gathered = accelerator.gather_for_metrics(padded)
        accelerator.print("padded to equal lengths:", gathered.tolist())
    accelerator.end_training()


if __name__ == "__main__":
    main()
