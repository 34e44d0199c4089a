"""Run train.py, and record which training images this process reads after each start.

torchrun … tests/core/recorded_samples.py FLAGS…

FLAGS must contain --augment, because this program identifies the training set by its augmentation.
Each process writes a file to RUN/samples/. The first line describes the start: its time, the rank,
the world size, the position, and the position of the checkpoint as `manifest.position` returns it.
Each further line is [epoch, indices] of one micro-batch. With SLOWNESS=SECONDS, each micro-batch
takes that much longer, so that a test can interrupt the run.
"""

import json
import os
import time
import uuid
from pathlib import Path

from accel_demo import train
from accel_demo.config import CommandLine
from accel_demo.data import ImageSet
from accel_demo.errors import one_line_errors
from accel_demo.processes.connect import gather_objects
from accel_demo.processes.lost_processes import report_lost_processes
from accel_demo.run.manifest import position
from accel_demo.run.run import Run

claim_run, get_items, set_epoch = train.claim_run, ImageSet.__getitems__, ImageSet.set_epoch
records: list[Path] = []


def record(line) -> None:
    with open(records[0], "a") as file:
        file.write(json.dumps(line) + "\n")


def record_start(*arguments) -> Run:
    run = claim_run(*arguments)
    start = run.start
    header = {
        "start": gather_objects(time.time())[0],
        "rank": int(os.environ.get("RANK", 0)),
        "processes": len(gather_objects(0)),
        "epoch": start.epoch,
        "batches": start.batches,
        "checkpoint": position(start.folder) if start.folder else (0, 0),
    }
    folder = Path(run.folder, "samples")
    folder.mkdir(exist_ok=True)
    records[:] = [folder / f"{uuid.uuid4().hex}.jsonl"]
    record(header)
    return run


def record_epoch(self, epoch: int) -> None:
    # `Run.settle_buckets` reads a batch, too, but before the first epoch of a start.
    self.recorded_epoch = epoch if records else None
    set_epoch(self, epoch)


def record_samples(self, indices):
    if self.augment and self.recorded_epoch is not None:
        record([self.recorded_epoch, indices])
        time.sleep(float(os.environ.get("SLOWNESS", 0)))
    return get_items(self, indices)


def starts_of(run: Path) -> list[dict]:
    """Return what each start has recorded, in the order of the starts.

    `ranks` contains the micro-batches of each rank as [epoch, indices].
    """
    starts = {}
    for path in (run / "samples").iterdir():
        header, *batches = map(json.loads, path.read_text().splitlines())
        start = starts.setdefault(header["start"], {**header, "ranks": {}})
        start["ranks"][header["rank"]] = batches
    starts = [starts[time] for time in sorted(starts)]
    assert all(sorted(start["ranks"]) == [*range(start["processes"])] for start in starts)
    return starts


if __name__ == "__main__":
    train.claim_run = record_start
    ImageSet.__getitems__, ImageSet.set_epoch = record_samples, record_epoch
    with one_line_errors(), report_lost_processes():
        config, _ = CommandLine("").read()
        train.main(config)
