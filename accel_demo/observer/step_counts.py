"""Count what a script does in each step: lines that read tensors, and averages of gradients."""

import sys
import weakref
from collections import Counter, deque

from .events import guarded, is_own_file


class Averages:
    """How often each model averages its gradients between the ranks before an optimizer step.

    A backward pass averages the gradients of the DistributedDataParallel models that were called
    since the pass before, except inside `no_sync`.
    """

    def __init__(self):
        self.called: set[int] = set()  # IDs of the models
        self.passes: Counter = Counter()  # backward passes since the last step, by model
        self.of_steps: list[int] = []  # those of the model with the most

    def forward(self, model) -> None:
        is_averaged = sys.modules["torch"].is_grad_enabled() and model.require_backward_grad_sync
        if is_averaged and model.process_group.size() > 1:
            self.called.add(id(model))

    def backward(self, in_optimizer: bool) -> None:
        """Count a backward pass, unless it is in the closure of an optimizer, which needs each."""
        if not in_optimizer:
            self.passes.update(self.called)
        self.called.clear()

    def zeroed(self) -> None:
        """Begin again: these gradients are not accumulated with those of the next pass."""
        self.passes.clear()

    def stepped(self) -> None:
        if self.passes:
            self.of_steps.append(max(self.passes.values()))
        self.passes.clear()


class Reads:
    """The number of steps in which a line of the script reads the value of a tensor."""

    def __init__(self):
        self.steps: Counter = Counter()  # keys: (file, line, method)
        self.in_step: set[tuple] = set()
        self.results: deque = deque(maxlen=4)  # weak references to the last losses and norms

    def computed(self, result) -> None:
        """Remember a tensor, because a copy of it from `detach` has no gradient history."""
        if isinstance(result, sys.modules["torch"].Tensor):
            self.results.append(weakref.ref(result))

    @guarded
    def note(self, tensor, device: str, frame, method: str) -> None:
        name = frame.f_code.co_filename
        if is_own_file(name) and self._needs_gpu(tensor, device):
            self.in_step.add((name, frame.f_lineno, method))

    def _needs_gpu(self, tensor, device: str) -> bool:
        """Return True if a GPU computes this tensor, or would compute it.

        On a CPU, a tensor of a batch may be read before or after the script moves it to the device,
        which has no effect. So only what is known to be computed from parameters counts.
        """
        if device != "cpu":
            return tensor.device.type == device
        results = [reference() for reference in self.results]
        return tensor.requires_grad or any(
            each is not None and each.data_ptr() == tensor.data_ptr() for each in results
        )

    def end_step(self, is_counted: bool) -> None:
        if is_counted:
            self.steps.update(self.in_step)
        self.in_step.clear()
