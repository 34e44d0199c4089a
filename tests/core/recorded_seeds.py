"""Run train.py or train_ddp.py, and record the seed of each loader worker.

RECORDED_SEEDS=FOLDER torchrun … tests/core/recorded_seeds.py train FLAGS…

FLAGS must contain --num-workers and --augment. Each worker creates an empty file in FOLDER. Its
name consists of the rank, "train" or "test", and the seed of the worker's random numbers.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

import torch

from accel_demo.config import CommandLine
from accel_demo.data import ImageSet

get_items = ImageSet.__getitems__


def record_seed(self, indices):
    if torch.utils.data.get_worker_info():
        split = "train" if self.augment else "test"
        name = f"{os.environ['RANK']} {split} {torch.initial_seed()}"
        Path(os.environ["RECORDED_SEEDS"], name).touch()
    return get_items(self, indices)


ImageSet.__getitems__ = record_seed  # also in a worker, which imports this file again

if __name__ == "__main__":
    train = import_module(f"accel_demo.{sys.argv.pop(1)}")
    config, _ = CommandLine("").read()
    train.main(config)
