"""Train as train.py does, and write down which training images this process was given.

accelerate launch --config_file FILE tests/core/recorded_samples.py FLAGS…

The augmented set is the training set. RUN/samples-RANK.json maps each epoch to its images.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

from accel_demo import train
from accel_demo.config import CommandLine
from accel_demo.data import ImageSet

given = defaultdict(list)
give, set_epoch = ImageSet.__getitems__, ImageSet.set_epoch


def note_epoch(self, epoch):
    self.epoch = epoch
    set_epoch(self, epoch)


def note_samples(self, indices):
    if self.augment:
        given[self.epoch].extend(indices)
    return give(self, indices)


if __name__ == "__main__":
    ImageSet.__getitems__, ImageSet.set_epoch = note_samples, note_epoch
    config, _ = CommandLine("").read()
    train.main(config)
    path = Path(config.run_dir, f"samples-{os.environ.get('RANK', 0)}.json")
    path.write_text(json.dumps(given))
