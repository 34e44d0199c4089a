"""Profile some optimizer steps of a script, and mark the phases of each step in the trace.

A step lasts from the end of one optimizer step to the end of the next one. If a script has several
optimizers, the one that makes the first step counts. The marks are

- data wait: until a DataLoader returns a batch,
- forward: from the call of the model to the backward pass, so it includes the loss. The beginning
  is only known with DistributedDataParallel. Without it, forward begins when there is a batch, and
  without a DataLoader, too, when the step begins.
- backward, and
- optimizer: the optimizer's step, `zero_grad`, and clipping.

The time between them is not marked. If a script uses a profiler, ours gives way to it, because only
one can be active in a process.
"""

import contextlib
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from . import ends, loaders, own_profilers
from .events import emit, guarded, line_of_script, path_of
from .step_counts import Averages, Reads

STEPS_BEFORE = 3  # before the profile, while DDP rebuilds its buckets and torch allocates memory
READS = "item", "tolist", "cpu", "__float__"  # on a GPU, they wait until it has finished
_tracer: list["Tracer"] = []  # the tracer of this process, if any
_models: weakref.WeakSet = weakref.WeakSet()  # the models wrapped in DistributedDataParallel
_stepping: list = []  # optimizers whose `step` is running, the outermost first
safely = functools.partial(guarded, also_if_muted=True)


class Tracer:
    """The profile of one training run in this process.

    `at_first_step` is called right before the first profiled step. The run ends with exit code 0
    after the last one if `ends_run` is True.
    """

    def __init__(
        self,
        path: str,
        steps: int,
        at_first_step: Callable[[], None] = lambda: None,
        ends_run: bool = False,
    ):
        self.path, self.steps = path, steps
        self.at_first_step, self.ends_run = at_first_step, ends_run
        self.optimizer: weakref.ref | None = None  # the one whose steps are counted
        self.optimizers: dict[int, Any] = {}  # all of them, by ID
        self.pid = os.getpid()
        self.steps_ended = self.steps_profiled = 0
        self.own_profilers = self.own_traces = 0  # that the script has begun, and written
        self.own_is_active = self.is_changing = self.is_complete = self.is_over = False
        self.done_after: int | None = None  # steps, after which nothing else is to be profiled
        self.profiler = None
        self.phase = self.step = contextlib.ExitStack()  # `record_function` of the current ones
        self.name: str | None = None  # of the current phase
        self.started_at = 0.0
        self.wall_ms: dict[int, float] = {}  # of all steps but the first
        self.reads, self.averages = Reads(), Averages()
        self.has_loader = False
        self.device = "cpu"  # the type of the device
        self.result: dict = {}  # once the profile is complete

    def after_fork(self) -> "Tracer":
        return Tracer(path_of("trace"), self.steps, ends_run=True)

    @safely
    def mark(self, phase: str | None) -> str | None:
        """End the current phase, begin `phase` unless it is None, and return the one before."""
        before, self.name = self.name, phase
        self.phase.close()
        if phase:
            self.phase = contextlib.ExitStack()
            self.phase.enter_context(sys.modules["torch"].profiler.record_function(phase))
        return before

    @safely
    def step_ended(self, optimizer) -> None:
        """End a step, and begin the next one."""
        torch = sys.modules["torch"]
        if self.optimizer is None:
            self.optimizer = weakref.ref(optimizer)
            self.device = optimizer.param_groups[0]["params"][0].device.type
        if self.optimizer() is not optimizer:
            return
        self.mark(None)
        if self.device != "cpu":
            torch.accelerator.synchronize()  # so that the step includes all its kernels
        self.step.close()
        self.reads.end_step(is_counted=self.started_at > 0)
        if self.started_at:
            self.wall_ms[self.steps_ended + 1] = 1000 * (time.perf_counter() - self.started_at)
        self.steps_ended += 1
        self.advance(torch)
        emit("step", optimizer=0, number=self.steps_ended - 1)
        self.step = contextlib.ExitStack()
        self.started_at = time.perf_counter()
        name = f"step {self.steps_ended + 1}"
        self.step.enter_context(torch.profiler.record_function(name))
        if not _models and not self.has_loader:
            self.mark("forward")

    def advance(self, torch) -> None:
        """Start the profiler, or let it go on to the next step."""
        if self.profiler is not None:
            self.profiler.step()
            if self.profiler is not None:  # not complete yet
                self.steps_profiled += 1
                if self.steps_profiled == 1:
                    self.at_first_step()
        elif self.steps_ended >= STEPS_BEFORE and not self.is_complete and not self.own_is_active:
            profiler = torch.profiler
            self.steps_profiled, self.is_changing = 0, True
            self.profiler = profiler.profile(
                activities=profiler.supported_activities(),
                schedule=profiler.schedule(wait=0, warmup=1, active=self.steps, repeat=1),
                on_trace_ready=self.complete,
                record_shapes=True,  # needed to compute how many bytes are sent
            )
            self.profiler.start()
            self.is_changing = False

    def complete(self, profiler) -> None:
        profiler.export_chrome_trace(self.path)
        self.is_complete, self.profiler = True, None
        self.result = self.describe()
        emit("traced", **self.result)

    def give_way(self) -> None:
        """Stop the profiler, because the script starts its own."""
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.on_trace_ready = None
            self.is_changing = True
            profiler.stop()
            self.is_changing = False
        self.own_is_active = True

    def finish(self) -> None:
        """End the profile of a script that has made fewer steps."""
        self.mark(None)
        self.step.close()
        if self.profiler is not None:
            self.profiler.stop()

    def may_end_run(self) -> bool:
        """Return True if nothing else is to be profiled, neither on this rank nor on others."""
        if self.done_after is None and self.ends_run and self.is_done():
            self.done_after = self.steps_ended
        if self.done_after is None:
            return False
        return bool(own_profilers.may_end(self.steps_ended, self.done_after, processes()))

    def is_done(self) -> bool:
        """Return True if nothing else is to be profiled, neither here nor by the script."""
        if self.own_is_active:  # if it has written two traces, it may repeat this without end
            return self.own_traces > 1 and self.steps_ended > STEPS_BEFORE + self.steps
        return self.is_complete and (self.own_profilers <= 0 or self.own_traces > 0)

    def describe(self) -> dict:
        """Return what the analysis needs besides the trace."""
        dist = sys.modules["torch"].distributed
        is_connected = dist.is_available() and dist.is_initialized()
        return {
            "trace": self.path,
            "wall_ms": self.wall_ms,
            "device": self.device,
            "processes": processes(),
            "backend": dist.get_backend() if is_connected else "",
            "bucket_bytes": bucket_bytes() if is_connected else [],
            "steps": self.steps_ended,
            "averages": self.averages.of_steps,
            "reads": [[*key, steps] for key, steps in self.reads.steps.items()],
        }


def processes() -> int:
    """Return the number of connected processes."""
    dist = sys.modules["torch"].distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def bucket_bytes() -> list[list[int]]:
    """Return the sizes of DDP's buckets, one list per model. Without others, nothing is sent."""
    found = []
    for model in _models:
        if model.process_group.size() > 1:
            data = model._get_ddp_logging_data()
            sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", "")
            found.append([int(size) for size in sizes.split(",") if size])
    return found


@contextlib.contextmanager
def used(tracer: Tracer):
    """Use this tracer for the marks inside the context."""
    _tracer[:] = [tracer]
    try:
        yield
    finally:
        tracer.finish()
        _tracer.clear()
        _models.clear()


def use(tracer: Tracer) -> None:
    """Use this tracer in this process from now on."""
    _tracer[:] = [tracer]


def models() -> list:
    """Return the models wrapped in DistributedDataParallel that have been called."""
    return list(_models)


def begin(steps: int) -> None:
    """Profile as many steps of this process."""
    use(Tracer(path_of("trace"), steps, ends_run=True))
    ends.before_end.append(finish)


@guarded
def finish() -> None:
    if (tracer := current()) is not None:
        tracer.finish()
        if not tracer.is_complete and tracer.steps_ended:
            emit("traced", **tracer.describe() | {"trace": ""})


def observe_torch(torch) -> None:
    """Mark the phases from now on. It must not be called twice in a process."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    _around(iterator, "__next__", _data_wait)
    _around(torch.autograd, "backward", _backward)
    _around(torch.nn.utils, "clip_grad_norm_", _optimizer)
    _around(torch.nn.utils, "clip_grad_value_", _optimizer)
    _around(torch.optim.Optimizer, "zero_grad", _zero_grad)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    if torch.distributed.is_available():
        replica = torch.nn.parallel.DistributedDataParallel
        _around(replica, "_pre_forward", _forward)
    own_profilers.observe_torch(torch, _around)
    for name in READS:
        _around(torch.Tensor, name, functools.partial(_read, name))
    loaders.mute_workers(torch, _tracer.clear)


def current() -> Tracer | None:
    """Return the tracer of this process, a new one after a fork; None if torch is compiling."""
    if not _tracer or sys.modules["torch"].compiler.is_compiling():
        return None
    if _tracer[0].pid != os.getpid():
        _tracer[:] = [_tracer[0].after_fork()]
    return _tracer[0]


def _around(owner, name: str, hook) -> None:
    """Let `hook(call, *arguments)` make each call of a function, if there is a tracer."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def observed(*args, **kwargs):
        if (tracer := current()) is None:
            return original(*args, **kwargs)
        return hook(tracer, functools.partial(original, *args, **kwargs), *args)

    setattr(owner, name, observed)


def _data_wait(tracer, call, iterator):
    if not sys.modules["torch"].is_grad_enabled():
        tracer.mark("evaluation")  # until the next mark
        return call()
    tracer.has_loader = True
    tracer.mark("data wait")
    batch = None
    try:
        batch = call()
    finally:
        tracer.mark(None if batch is None or _models else "forward")
    return batch


def _forward(tracer, call, model, *inputs):
    is_training = model.training and sys.modules["torch"].is_grad_enabled()
    _models.add(model)
    tracer.averages.forward(model)
    tracer.mark("forward" if is_training else "evaluation")
    return call()


def _backward(tracer, call, *inputs):
    tracer.averages.backward(in_optimizer=bool(_stepping))
    tracer.reads.computed(inputs[0] if inputs else None)
    before = tracer.mark("backward")
    result = call()
    # A backward pass in the closure of an optimizer is a part of its step.
    tracer.mark("optimizer" if before == "optimizer" else None)
    return result


def _optimizer(tracer, call, *inputs):
    before = tracer.mark("optimizer")
    result = call()
    tracer.mark("optimizer" if before == "optimizer" else None)
    tracer.reads.computed(result)  # the norm of the gradients, if it clips them
    return result


def _zero_grad(tracer, call, *inputs):
    tracer.averages.zeroed()
    return _optimizer(tracer, call)


def _before_step(optimizer, args, kwargs) -> None:
    if (tracer := current()) is None:
        return
    if optimizer in _stepping:  # its last step has raised an error
        del _stepping[_stepping.index(optimizer) :]
    _stepping.append(optimizer)
    tracer.optimizers[id(optimizer)] = optimizer
    if len(_stepping) == 1:
        if tracer.may_end_run():
            tracer.is_over = True  # the script may still write a trace of some steps, as it ends
            emit("enough", steps=tracer.steps_ended, line=line_of_script(3))
            sys.exit(0)
        tracer.mark("optimizer")


def _after_step(optimizer, args, kwargs) -> None:
    if (tracer := current()) is None or optimizer not in _stepping:
        return
    del _stepping[_stepping.index(optimizer) :]
    if not _stepping:
        tracer.averages.stepped()
        tracer.mark(None)
        tracer.step_ended(optimizer)


def _read(method: str, tracer, call, tensor, *arguments):
    if tracer.name != "evaluation":
        tracer.reads.note(tensor, tracer.device, sys._getframe(2), method)
    return call()
