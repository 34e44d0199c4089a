"""Install the observer in this process, or in the processes of a command."""

import os

from . import events, processes
from .imports import when_imported

INJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
# Environment variables: how many optimizer steps are profiled, or have their memory measured
TRACED_STEPS, MEASURED_STEPS = "ACCEL_DEMO_TRACE", "ACCEL_DEMO_MEMORY"
TIMED = "ACCEL_DEMO_TIME"  # environment variable: if set, the steps are only timed
GROUPS = "torch.distributed.distributed_c10d"


def start() -> None:
    """Observe this process and all processes that it forks.

    The environment variable ACCEL_DEMO_AUDIT contains the folder for all events. If only
    ACCEL_DEMO_NODE is set, the observer records which processes connect and train, and nothing that
    takes time or creates other files.
    """
    folder = os.environ.get(events.FOLDER)
    events.begin(folder or os.environ[events.NODE_FOLDER])
    when_imported(GROUPS, processes.observe_groups)
    when_imported("accelerate", processes.observe_accelerate)
    if folder and {TRACED_STEPS, MEASURED_STEPS, TIMED} & set(os.environ):
        _observe_steps()
    elif folder:
        _observe_all()
    else:
        when_imported("torch", processes.observe_first_step)


def _observe_steps() -> None:
    """Observe only where time or memory goes. All that takes time itself is left out."""
    from . import answers, ends, files, memory, timing, tracing

    ends.watch()
    files.watch()
    steps = timing if TIMED in os.environ else tracing
    if TRACED_STEPS in os.environ:
        tracing.begin(int(os.environ[TRACED_STEPS]))
    elif MEASURED_STEPS in os.environ:
        memory.begin(int(os.environ[MEASURED_STEPS]))
    when_imported(GROUPS, answers.observe_groups)
    for module in (files, steps):
        when_imported("torch", module.observe_torch)
    when_imported("safetensors.torch", files.observe_safetensors)


def _observe_all() -> None:
    from . import (  # slow: only an audit needs them
        answers,
        clipping,
        ends,
        files,
        loaders,
        metrics,
        models,
        parity,
        randomness,
        saves,
        schedules,
        streams,
        training,
        weights,
    )

    ends.watch()
    files.watch()
    metrics.observe_output()
    for module in (answers, metrics, training):
        when_imported(GROUPS, module.observe_groups)
    when_imported("multiprocessing.process", metrics.observe_processes)
    for module in (
        loaders,
        models,
        training,
        clipping,
        schedules,
        files,
        saves,
        metrics,
        randomness,
    ):
        when_imported("torch", module.observe_torch)
    for module in (training, schedules, metrics):
        when_imported("accelerate", module.observe_accelerate)
    if parity.FACTOR in os.environ:
        when_imported("torch", parity.observe_torch)
    for module in (loaders, streams):
        when_imported("accelerate.data_loader", module.observe_accelerate)
    when_imported("accelerate.local_sgd", training.observe_local_sgd)
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", weights.observe_fsdp)
    when_imported("torch.distributed.fsdp.sharded_grad_scaler", clipping.observe_sharded_scaler)
    when_imported("torch.distributed.tensor.parallel.api", weights.observe_tensor_parallel)
    for module in (files, saves):
        when_imported("safetensors.torch", module.observe_safetensors)


def inject(environment: dict[str, str], variable: str, folder: str) -> dict[str, str]:
    """Return an environment in which Python processes write their events to `folder`.

    `variable` is `events.FOLDER` for all events, or `events.NODE_FOLDER`.
    """
    paths = filter(None, [INJECT, environment.get("PYTHONPATH")])
    return environment | {variable: folder, "PYTHONPATH": os.pathsep.join(paths)}
