"""Ways to accumulate gradients: what each shares, how often it steps, and which gradient it uses.

python -m accel_demo.anatomy.accumulation
python -m accel_demo.anatomy.accumulation --processes 3 --plot accumulation.svg
torchrun --standalone --nproc-per-node 2 -m accel_demo.anatomy.accumulation
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.anatomy.flags import command_line, read
from accel_demo.errors import UserError, one_line_errors
from accel_demo.processes.connect import use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLOURS, new_figure, save, table

WINDOW, BATCH = 4, 8  # micro-batches per optimizer step; samples per process and micro-batch
LENGTHS = [1, 2, 12, 3]  # tokens of each sequence in the micro-batches of a window
MAX_NORM = 0.1
TOLERANCE, EQUAL = 1e-6, "equal within 1e-6"


@dataclass(frozen=True)
class Seen:
    """What one way did with an epoch of micro-batches."""

    way: str
    windows: str  # the samples of each process
    events: list[str]  # "forward", "all-reduce" and "step", in their order
    bytes_shared: int  # that DDP handed to all-reduce, of each process
    gradients: list[str]  # that the optimizer used in each step, against the right one


def by_hand(accelerator, model, optimizer, loader, window=WINDOW, no_sync=True, divide=True):
    """Torch alone: `model` is a `DistributedDataParallel`, and `accelerator` has nothing to do."""
    for index, (inputs, targets) in enumerate(loader):
        is_last = (index + 1) % window == 0
        with model.no_sync() if no_sync and not is_last else nullcontext():
            loss = mse_loss(model(inputs), targets)
            (loss / window if divide else loss).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def accumulate(
    accelerator, model, optimizer, loader, divide=True, prepare=True, scale=True, clip="never"
):
    """Accelerate: its `sync_gradients` is also true for the last batch of a loader it prepared."""
    if prepare:
        optimizer = accelerator.prepare(optimizer)
    for index, (inputs, targets) in enumerate(loader):
        first = index - index % WINDOW  # of its window; the last may be short
        window = min(WINDOW, len(loader) - first)
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs), targets)
            if scale:
                loss = loss * (WINDOW / window)  # backward divides by WINDOW
            accelerator.backward(loss) if divide else loss.backward()
            if clip == "always" or (clip == "once" and accelerator.sync_gradients):
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


def tokens(accelerator, model, optimizer, loader, global_count=True):
    """Each token counts the same only where the sum is divided by the tokens of all processes."""
    window = list(loader)
    count = accelerator.reduce(sum(is_token.sum() for *_, is_token in window))
    for index, (inputs, targets, is_token) in enumerate(window):
        with model.no_sync() if index + 1 < WINDOW else nullcontext():
            losses = mse_loss(model(inputs), targets, reduction="none").squeeze(-1)[is_token]
            if global_count:  # DDP divides by the number of processes: take that back
                loss = losses.sum() / count * accelerator.num_processes
            else:
                loss = losses.mean() / WINDOW
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


ONE, FULL, TOKENS = f"1 × {WINDOW * BATCH}", f"{WINDOW} × {BATCH}", f"{WINDOW} × {BATCH} sequences"
SHORT = f"{FULL}, then 2 × {BATCH}"
# (samples of each process, the way in words, the way)
WAYS = [
    (ONE, "one batch", partial(by_hand, window=1)),
    (FULL, "DDP, `no_sync` before the last", by_hand),
    (FULL, "DDP, without `no_sync`", partial(by_hand, no_sync=False)),
    (FULL, f"DDP, loss not divided by {WINDOW}", partial(by_hand, divide=False)),
    (FULL, "`accumulate`", accumulate),
    (FULL, "`accumulate`, but `loss.backward()`", partial(accumulate, divide=False)),
    (FULL, "`accumulate`, optimizer not prepared", partial(accumulate, prepare=False)),
    (FULL, "clip where `sync_gradients`", partial(accumulate, clip="once")),
    (FULL, "clip after every backward", partial(accumulate, clip="always")),
    (SHORT, "`accumulate` alone", partial(accumulate, scale=False)),
    (SHORT, f"loss × {WINDOW} / true length", accumulate),
    (TOKENS, "mean of each micro-batch", partial(tokens, global_count=False)),
    (TOKENS, "sum / tokens of all processes", tokens),
]


def observe(accelerator: Accelerator, windows: str, name: str, way: Callable) -> Seen:
    """Let `way` train for an epoch with a learning rate of 0, and note all it does.

    So every gradient is one of the same weights. A hook that DDP calls in place of its all-reduce
    counts. https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    accelerator.free_memory()  # of the way before, and of its place in the window
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = accelerator.prepare(torch.nn.Sequential(*layers))  # a DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = make_data(windows, accelerator.num_processes)
    size = WINDOW * BATCH if windows == ONE else BATCH
    loader = accelerator.prepare(DataLoader(data, size))
    events, sizes, used = [], [], []

    def share(group, bucket):
        events.append("all-reduce")
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    def note_step(*_):
        used.append((events.count("forward") - 1, _flat(w.grad for w in model.parameters())))
        events.append("step")

    model.register_comm_hook(None, share)
    model.register_forward_pre_hook(lambda *_: events.append("forward"))
    optimizer.register_step_pre_hook(note_step)
    way(accelerator, model, optimizer, loader)

    samples = WINDOW * BATCH * accelerator.num_processes  # of a window
    found = []
    for index, gradient in used:
        first = index // WINDOW * samples
        right = right_gradient(model.module, data[first : first + samples], accelerator.device)
        if "clip" in name:  # the right one is cut to the same norm, in one piece
            right *= min(1, MAX_NORM / right.norm())
        found.append(compare(accelerator.gather(gradient[None]), right))
    return Seen(name, windows, events, sum(sizes), found)


def make_data(windows: str, processes: int) -> TensorDataset:
    """What all processes together train on in an epoch; `Accelerator.prepare` deals it out."""
    count = BATCH * processes * (WINDOW + 2 if windows == SHORT else WINDOW)
    generator = torch.Generator().manual_seed(0)
    shape = (count, max(LENGTHS), 8) if windows == TOKENS else (count, 8)
    inputs = torch.randn(shape, generator=generator)
    targets = inputs.sum(dim=-1, keepdim=True).sin()
    if windows != TOKENS:
        return TensorDataset(inputs, targets)
    lengths = torch.tensor(LENGTHS).repeat_interleave(BATCH * processes)
    is_token = torch.arange(max(LENGTHS)) < lengths[:, None]  # the rest of a sequence is padding
    return TensorDataset(inputs, targets, is_token)


def right_gradient(model: torch.nn.Module, samples: tuple, device: torch.device) -> torch.Tensor:
    """The gradient of the mean loss over these samples (or tokens), in one go and in one piece."""
    inputs, targets, *is_token = (tensor.to(device) for tensor in samples)
    losses = mse_loss(model(inputs), targets, reduction="none").squeeze(-1)
    loss = losses[is_token[0]].mean() if is_token else losses.mean()
    return _flat(torch.autograd.grad(loss, list(model.parameters())))


def compare(gradients: Any, right: torch.Tensor) -> str:
    """In words: the gradients [ranks, numbers] that were used, against the right one."""
    if (gradients - gradients[0]).abs().max() > TOLERANCE:
        return "another on each rank"
    gradient = gradients[0]
    if (gradient - right).abs().max() <= TOLERANCE:
        return EQUAL
    factor = float(gradient @ right / (right @ right))
    if (gradient - factor * right).abs().max() <= TOLERANCE * max(1, abs(factor)):
        return f"×{round(factor, 4):g}"
    return f"off by {(gradient - right).norm() / right.norm():.0%}"


def main(device: torch.device, options) -> None:
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
    if accelerator.num_processes < 2:
        raise UserError("--processes must be at least 2: one process has nobody to share with")
    seen = [observe(accelerator, *way) for way in WAYS]
    if not accelerator.is_main_process:
        return
    rows = []
    for one in seen:
        counts = [one.events.count(event) for event in ("step", "all-reduce")]
        rows.append([one.windows, one.way, *counts, one.bytes_shared, in_words(one)])
    head = ["per process", "way", "optimizer steps", "all-reduces", "bytes", "gradient used"]
    print(table(head, rows))
    if options.plot:
        save(draw(seen), options.plot)


def in_words(seen: Seen) -> str:
    """The gradients of all steps, those that are alike together."""
    counts = {words: seen.gradients.count(words) for words in seen.gradients}
    times = {words: f"{n} × " if 1 < n < len(seen.gradients) else "" for words, n in counts.items()}
    return ", then ".join(f"{times[words]}{words}" for words in counts)


def draw(seen: list[Seen]):
    """A lane for each way: a box for each forward and backward, with what happened in it."""
    figure = new_figure(10, 0.4 * len(seen) + 0.8)
    axes = figure.subplots()
    blue, orange = COLOURS[:2]
    box: dict[str, Any] = {"color": "#dddddd", "edgecolor": "#777777"}
    for lane, one in enumerate(seen):
        x, width = 0, 1
        for event in one.events:
            if event == "forward":
                x += width
                width = 4 if one.windows == ONE else 1
                axes.barh(lane, width - 0.12, 0.6, left=x, **box)
            elif event == "all-reduce":
                axes.plot(x + width - 0.5, lane, "D", color=blue, markersize=8)
            else:
                axes.plot(x + width - 0.12, lane, "|", color=orange, markersize=19, mew=4)
        colour = "#00664b" if set(one.gradients) == {EQUAL} else "#a34700"
        axes.text(7.2, lane, in_words(one), va="center", fontsize=8.5, color=colour)
    axes.text(7.2, -0.9, "the gradient that the optimizer used", fontsize=8.5)
    names = [f"{one.way.replace('`', '')}  ({one.windows})" for one in seen]
    axes.set_yticks(range(len(seen)), names, fontsize=8.5)
    axes.set(xlim=(0.9, 11.7), ylim=(len(seen) - 0.5, -1.2), xticks=[])
    axes.set_frame_on(False)
    axes.tick_params(left=False)
    legend = [
        axes.bar([0], [0], **box, label="forward and backward of a micro-batch"),
        *axes.plot([], [], "D", color=blue, markersize=8, label="all-reduce, in the backward"),
        *axes.plot([], [], "|", color=orange, markersize=14, mew=4, label="optimizer step"),
    ]
    figure.legend(handles=legend, loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


if __name__ == "__main__":
    with one_line_errors():
        options = read(command_line(__doc__, processes=2))
        run_in_group(main, options.processes, options)
