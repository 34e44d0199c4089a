"""Gather the values of a dict that contains strings one by one.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/dict_with_strings_fixed.py
"""

from accelerate import Accelerator
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    data = [{"name": f"image-{number}", "label": number % 2} for number in range(5)]
    loader = accelerator.prepare(DataLoader(data, batch_size=3))
    names = []
    for batch in loader:
        names += accelerator.gather_for_metrics(batch["name"])
    accelerator.print(f"{accelerator.num_processes} processes: {names}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
