"""Install the observer in this process."""

import os

from . import ends, events, files, loaders, processes, training
from .imports import when_imported


def start(folder: str | None = None) -> None:
    """Observe this process and all processes that it forks. The events go into `folder`.

    Its default is the environment variable ACCEL_DEMO_AUDIT.
    """
    events.begin(folder or os.environ[events.FOLDER])
    ends.watch()
    files.watch()
    when_imported("torch", _observe_torch)
    when_imported("accelerate", _observe_accelerate)
    when_imported("safetensors.torch", files.observe_safetensors)


@events.guarded
def _observe_torch(torch) -> None:
    for module in (processes, loaders, training, files):
        module.observe_torch(torch)


@events.guarded
def _observe_accelerate(accelerate) -> None:
    processes.observe_accelerate(accelerate)
    training.observe_accelerate(accelerate)
