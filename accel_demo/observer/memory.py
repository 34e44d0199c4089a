"""Measure the memory of some optimizer steps of a script.

On a CPU, it is the resident memory that belongs to the process alone, in Linux, and on a GPU what
PyTorch has allocated. The hooks are those of tracing.py.
"""

import ctypes
import gc
import sys
from contextlib import suppress

from . import ends, tracing
from .events import emit, guarded, path_of
from .tracing import Tracer

STEPS_BEFORE = 3  # DDP rebuilds its buckets, and the optimizer creates its state
MMAP_BYTES = 64 * 1024  # larger allocations are returned to the system as soon as they are freed
STATUS, CLEAR = "/proc/self/status", "/proc/self/clear_refs"
MOST_EVENTS = 100_000  # allocations in the snapshot of a GPU
MOST_NODES = 100_000  # of autograd's graph, which are counted after a step


class Meter(Tracer):
    """Records the memory at the beginning and the end of the phases of each step."""

    def __init__(self, path: str, steps: int):
        super().__init__(path, steps, ends_run=True)
        self.base: int | None = None  # bytes before the first forward pass of a step
        self.before_forward = self.activations = self.backwards = 0
        self.of_files: int | None = None  # resident bytes of files, which the peak contains
        self.parameters: list = []  # of the optimizers, and of all modules that contain one of them
        self.gradients = self.all_gradients = 0  # bytes before an optimizer step: here, of all

    def after_fork(self) -> "Meter":
        return Meter(path_of("memory"), self.steps)

    @tracing.safely
    def mark(self, phase: str | None) -> str | None:
        """Record the bytes at the beginning of a phase, without those of the gradients."""
        before, self.name = self.name, phase
        if self.steps_ended < STEPS_BEFORE or phase not in ("forward", "backward", "optimizer"):
            return before
        if not self.parameters:  # not in each step, because it is slow
            self.parameters = self.models_and_parameters()[1]
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        if phase == "optimizer":  # `zero_grad` may follow, of one optimizer after the other
            self.gradients = max(self.gradients, bytes_of(gradients))
            self.all_gradients = max(self.all_gradients, whole_bytes_of(gradients))
            return before
        used = self.used() - bytes_of(gradients)
        if phase == "forward" and before != "forward":
            self.before_forward = used
            if self.base is None:
                self.base = used
                self.reset_peak()
                if self.on_cuda and not self.steps_profiled:
                    sys.modules["torch"].cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        elif phase == "backward" and self.base is not None:
            self.backwards += 1
            self.activations = max(self.activations, used - self.before_forward)
        return before

    def advance(self, torch) -> None:
        """Record the bytes of a step: those before it, and how many more it needs."""
        if self.base is not None:
            peak = self.peak()
            emit(
                "memory",
                step=self.steps_ended,
                base=self.base,
                activations=self.activations,
                backwards=self.backwards,
                graph=graph_nodes(),
                peak=None if peak is None else peak - self.base,
            )
            self.steps_profiled += 1
        self.base, self.activations, self.backwards = None, 0, 0
        if self.steps_profiled == self.steps:
            self.is_complete = True
            self.finish()

    def finish(self) -> None:
        if self.steps_profiled and not self.result:
            self.result = self.describe() | self.state() | {"snapshot": self.snapshot()}
            emit("state", **self.result)

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def snapshot(self) -> str:
        """Write the allocations of a GPU, for https://pytorch.org/memory_viz, or return ""."""
        if not self.on_cuda:
            return ""
        cuda = sys.modules["torch"].cuda
        cuda.memory._dump_snapshot(path_of("snapshot"))
        cuda.memory._record_memory_history(enabled=None)
        return path_of("snapshot")

    def used(self) -> int:
        """Return the bytes that this process uses now."""
        torch = sys.modules["torch"]
        if self.on_cuda:
            return torch.cuda.memory_allocated()
        return _status("RssAnon")

    def peak(self) -> int | None:
        """Return the most bytes since the last call of `reset_peak`, or None if it is unknown."""
        torch = sys.modules["torch"]
        if self.on_cuda:
            return torch.cuda.max_memory_allocated()
        return _status("VmHWM") - self.of_files if self.of_files is not None else None

    def reset_peak(self) -> None:
        torch = sys.modules["torch"]
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        self.of_files = None
        with suppress(OSError):  # not Linux, or not permitted
            with open(CLEAR, "w", encoding="utf-8") as file:
                file.write("5")  # https://docs.kernel.org/filesystems/proc.html
            self.of_files = _status("VmRSS") - _status("RssAnon")

    def models_and_parameters(self) -> tuple[list, list]:
        """Return the outermost modules with a parameter of an optimizer, and all parameters."""
        trained = parameters_of(self.optimizers.values())
        models = models_of(trained)
        each_once = {id(p): p for model in models for p in model.parameters()}
        return models, list((each_once | {id(p): p for p in trained}).values())

    def state(self) -> dict:
        """Return the bytes of the tensors that stay between steps: on this rank, and of all."""
        trained = parameters_of(self.optimizers.values())
        models, parameters = self.models_and_parameters()
        states = self.optimizer_states()
        return {
            "parameters": bytes_of(parameters),
            "all_parameters": whole_bytes_of(parameters),
            "elements": sum(each.numel() for each in parameters),
            "gradients": self.gradients,
            "all_gradients": self.all_gradients,
            "trained": whole_bytes_of(trained),
            "optimizer_state": bytes_of(each for own in states.values() for each in own),
            "whole_states": [whole_bytes_of(own) for own in states.values()],
            "other_models": self.bytes_of_other_models(models),
            "blocks": [block_sizes(model) for model in models],
            "is_sharded": any(hasattr(each, "to_local") for each in parameters),
            "view_of_buckets": any(model.gradient_as_bucket_view for model in tracing.models()),
            "optimizers": [type(each).__name__ for each in self.optimizers.values()],
        }

    def optimizer_states(self) -> dict[int, list]:
        """Return the state tensors of each parameter by its ID, in the optimizers' order."""
        tensor = sys.modules["torch"].Tensor
        found: dict[int, dict] = {id(each): {} for each in parameters_of(self.optimizers.values())}
        for optimizer in self.optimizers.values():
            for parameter, values in optimizer.state.items():
                own = values.values() if isinstance(values, dict) else ()
                tensors = {id(each): each for each in own if isinstance(each, tensor)}
                found.setdefault(id(parameter), {}).update(tensors)
        return {key: list(tensors.values()) for key, tensors in found.items()}

    def bytes_of_other_models(self, models: list) -> int:
        """Return the bytes of all other modules, such as a teacher or averaged weights."""

        def tensors_of(modules) -> list:
            tensors = (each for m in modules for each in (*m.parameters(), *m.buffers()))
            return [each for each in tensors if each.device.type == self.device]

        own = {id(model) for model in models}
        others = [each for each in outermost_modules() if id(each) not in own]
        known = storages_of(tensors_of(models))
        found = storages_of(tensors_of(others))
        return sum(size for key, size in found.items() if key not in known)


def parameters_of(optimizers) -> list:
    """Return all parameters of the optimizers, each once."""
    found = {
        id(each): each
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }
    return list(found.values())


def bytes_of(tensors) -> int:
    """Return the bytes of the storages of these tensors on this rank, each counted once."""
    return sum(storages_of(tensors).values())


def storages_of(tensors) -> dict[int, int]:
    """Return the bytes of each storage of these tensors on this rank, by its address."""
    found = {}
    for each in tensors:
        local = each.to_local() if hasattr(each, "to_local") else each
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def whole_bytes_of(tensors) -> int:
    """Return the bytes of these tensors, also of the parts that are on other ranks."""
    return sum(each.numel() * each.element_size() for each in tensors)


def block_sizes(model) -> list[int]:
    """Return the bytes of the parameters outside of blocks, and of the three largest blocks.

    Blocks are the children of a list or sequence of modules of one class, as in a transformer. A
    model without them is made of its layers.
    """
    lists = (sys.modules["torch"].nn.ModuleList, sys.modules["torch"].nn.Sequential)
    blocks = [
        list(child.parameters())
        for module in model.modules()
        if isinstance(module, lists) and len(module) > 1 and len({type(c) for c in module}) == 1
        for child in module
    ]
    blocks = blocks or [list(each.parameters(recurse=False)) for each in model.modules()]
    in_blocks = {id(each) for block in blocks for each in block}
    outside = [each for each in model.parameters() if id(each) not in in_blocks]
    largest = sorted(map(whole_bytes_of, blocks), reverse=True)
    return [whole_bytes_of(outside), *(largest + [0, 0])[:3]]


def outermost_modules() -> list:
    """Return all modules that are not in another one."""
    modules = _objects_of(sys.modules["torch"].nn.Module)
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def models_of(parameters: list) -> list:
    """Return the outermost modules that contain one of the parameters, without wrappers' copies."""
    ids = {id(each) for each in parameters}
    return [
        module
        for module in outermost_modules()
        if any(id(each) in ids for each in module.parameters())
    ]


def graph_nodes() -> int:
    """Return how many nodes of autograd's graph are kept alive by tensors, at most MOST_NODES."""
    tensors = _objects_of(sys.modules["torch"].Tensor)
    waiting = [each.grad_fn for each in tensors if not each.is_leaf]
    seen = set(waiting)
    while waiting and len(seen) < MOST_NODES:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return len(seen)


def _objects_of(base: type) -> list:
    """Return all objects of a class, or of one derived from it, that the garbage collector tracks.

    The type is compared, because `isinstance` would run the code of a lazy object or a proxy.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, base)}
    return [each for each in objects if type(each) in kinds]


def _status(key: str) -> int:
    """Return a value of /proc/self/status in bytes, after freed memory was returned."""
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open(STATUS, encoding="utf-8") as file:
            for line in file:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def begin(steps: int) -> None:
    """Measure as many steps of this process."""
    return_freed_memory()
    tracing.use(Meter(path_of("memory"), steps))
    ends.before_end.append(finish)


@guarded
def finish() -> None:
    if (meter := tracing.current()) is not None:
        meter.finish()


def return_freed_memory() -> None:
    """Make the C library return each large allocation to the system as soon as it is freed.

    Otherwise the resident memory of a process does not shrink when its tensors are freed. Only
    glibc has this option. Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    with suppress(AttributeError, TypeError):  # no mallopt on macOS, no CDLL(None) on Windows
        for option in (-3, -1):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in malloc.h
            ctypes.CDLL(None).mallopt(option, MMAP_BYTES)
