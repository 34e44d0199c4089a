"""Run train.py, and record which training images this process reads.

accelerate launch --config_file FILE tests/core/recorded_samples.py FLAGS…

FLAGS must contain --augment, because this program identifies the training set by its augmentation.
RUN/samples-RANK.json lists the indices of the images that were read in each epoch.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

from accel_demo import train
from accel_demo.config import CommandLine
from accel_demo.data import ImageSet

recorded = defaultdict(list)
get_items, set_epoch = ImageSet.__getitems__, ImageSet.set_epoch


def record_epoch(self, epoch):
    self.epoch = epoch
    set_epoch(self, epoch)


def record_samples(self, indices):
    if self.augment:
        recorded[self.epoch].extend(indices)
    return get_items(self, indices)


if __name__ == "__main__":
    ImageSet.__getitems__, ImageSet.set_epoch = record_samples, record_epoch
    config, _ = CommandLine("").read()
    train.main(config)
    path = Path(config.run_dir, f"samples-{os.environ.get('RANK', 0)}.json")
    path.write_text(json.dumps(recorded))
