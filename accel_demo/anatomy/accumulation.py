"""Compare the all-reduces, optimizer steps and gradients of several gradient accumulation methods.

python -m accel_demo.anatomy.accumulation
torchrun --standalone --nproc-per-node 2 -m accel_demo.anatomy.accumulation --plot lanes.svg

A window is the group of micro-batches whose gradients are accumulated for one optimizer step. The
program compares the gradient used in each step with the expected gradient: the gradient of the mean
loss over the window's samples on all processes.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from string import ascii_uppercase as LETTERS
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import COLORS, new_figure, save, table
from accel_demo.wording import counted

WINDOW, BATCH = 4, 8  # micro-batches per optimizer step; samples per micro-batch on each process
LENGTHS = [1, 2, 12, 3]  # tokens per sequence in each micro-batch of a window
MAX_NORM = 0.1
TOLERANCE, EQUAL = 1e-6, "equal within 1e-6"


@dataclass(frozen=True)
class AccumulationRecord:
    """The events and gradients recorded while one method trains for one epoch."""

    method: str
    samples: str  # on each process: micro-batches × batch size, for example "4 × 8"
    events: list[str]  # "forward", "all-reduce" and "step", in the order in which they happened
    bytes_shared: int  # total bytes that each process passes to all-reduce
    gradients: list[str]  # for each optimizer step, how its gradient differs from the expected one

    @property
    def is_right(self) -> bool:
        return set(self.gradients) == {EQUAL}


def by_hand(accelerator, model, optimizer, loader, window=WINDOW, no_sync=True, divide=True):
    """Accumulate gradients with plain PyTorch. `model` is a DDP model; `accelerator` is unused."""
    for index, micro_batch in enumerate(loader):
        is_last = (index + 1) % window == 0
        with model.no_sync() if no_sync and not is_last else nullcontext():
            loss = all_losses(model, *micro_batch).mean()
            (loss / window if divide else loss).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def accumulate(
    accelerator,
    model,
    optimizer,
    loader,
    divide=True,
    prepare=True,
    scale=True,
    clip="never",
    zero_grad_first=False,
):
    """Accumulate gradients with Accelerate, with or without one of the usual mistakes.

    At the end of the loader, Accelerate performs a step even if the window is incomplete.
    """
    if prepare:
        optimizer = accelerator.prepare(optimizer)
    for index, (inputs, targets) in enumerate(loader):
        window_start = index - index % WINDOW
        window = min(WINDOW, len(loader) - window_start)  # the last window may be shorter
        with accelerator.accumulate(model):
            if zero_grad_first:
                optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            if scale:
                loss = loss * (WINDOW / window)  # accelerator.backward divides by WINDOW
            accelerator.backward(loss) if divide else loss.backward()
            if clip == "always" or (clip == "once" and accelerator.sync_gradients):
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if not zero_grad_first:
                optimizer.zero_grad()


def tokens(accelerator, model, optimizer, loader):
    """Accumulate gradients over sequences, giving every token the same weight."""
    micro_batches = iter(loader)
    while window := list(islice(micro_batches, WINDOW)):  # the last window may be shorter
        count = accelerator.reduce(sum(is_token.sum() for *_, is_token in window))
        # DDP divides by the number of processes, accelerator.backward by the accumulation steps.
        scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / count
        with accelerator.no_sync(model):  # all micro-batches but the last
            for micro_batch in window[:-1]:
                accelerator.backward(all_losses(model, *micro_batch).sum() * scale)
        accelerator.backward(all_losses(model, *window[-1]).sum() * scale)
        optimizer.step()
        optimizer.zero_grad()


def all_losses(model, inputs, targets, is_token=None) -> torch.Tensor:
    """Return the loss of each sample, or of each token if the samples are sequences."""
    losses = mse_loss(model(inputs), targets, reduction="none").squeeze(-1)
    return losses if is_token is None else losses[is_token]  # without the padding


ONE, FULL, TOKENS = f"1 × {WINDOW * BATCH}", f"{WINDOW} × {BATCH}", f"{WINDOW} × {BATCH} sequences"
SHORT = f"{FULL}, then 2 × {BATCH}"
# (samples per process, name of the method, function)
METHODS = [
    (ONE, "one batch", partial(by_hand, window=1)),
    (FULL, "DDP, `no_sync` before the last", by_hand),
    (FULL, "DDP, without `no_sync`", partial(by_hand, no_sync=False)),
    (FULL, f"DDP, loss not divided by {WINDOW}", partial(by_hand, divide=False)),
    (FULL, "`accumulate`", accumulate),
    (FULL, "`accumulate`, but `loss.backward()`", partial(accumulate, divide=False)),
    (FULL, "`accumulate`, optimizer not prepared", partial(accumulate, prepare=False)),
    (FULL, "`accumulate`, `zero_grad()` first", partial(accumulate, zero_grad_first=True)),
    (FULL, "clip if `sync_gradients`", partial(accumulate, clip="once")),
    (FULL, "clip after every backward", partial(accumulate, clip="always")),
    (SHORT, "`accumulate` alone", partial(accumulate, scale=False)),
    (SHORT, f"loss × {WINDOW} / true length", accumulate),
    (TOKENS, "mean of each micro-batch", by_hand),
    (TOKENS, "sum / tokens of all processes", tokens),
]


def observe(
    accelerator: Accelerator, samples: str, name: str, method: Callable
) -> AccumulationRecord:
    """Train for one epoch with one method, and record its events and gradients.

    The learning rate is 0, so that all gradients are computed with the same weights. All-reduces
    are counted in a communication hook, which DDP calls instead of its own all-reduce:
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    accelerator.free_memory()  # drop the previous method's objects, and reset the step count
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = accelerator.prepare(torch.nn.Sequential(*layers))  # a DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = make_data(samples, accelerator.num_processes)
    batch_size = WINDOW * BATCH if samples == ONE else BATCH
    loader = accelerator.prepare(DataLoader(data, batch_size))
    events, bucket_bytes, used = [], [], []

    def share(group, bucket):
        events.append("all-reduce")
        bucket_bytes.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    def note_step(*_):
        gradient = parameters_to_vector(weight.grad for weight in model.parameters())
        used.append((events.count("forward") - 1, gradient))
        events.append("step")

    model.register_comm_hook(None, share)
    model.register_forward_pre_hook(lambda *_: events.append("forward"))
    optimizer.register_step_pre_hook(note_step)
    method(accelerator, model, optimizer, loader)

    window_samples = WINDOW * BATCH * accelerator.num_processes
    gradients = []
    for index, gradient in used:
        start = index // WINDOW * window_samples
        window = data[start : start + window_samples]
        right = right_gradient(model.module, window, accelerator.device)
        if "clip" in name:
            right *= min(1, MAX_NORM / right.norm())
        gradients.append(compare(accelerator.gather(gradient[None]), right))
    return AccumulationRecord(name, samples, events, sum(bucket_bytes), gradients)


def make_data(samples: str, processes: int) -> TensorDataset:
    """Return the dataset for one epoch. `Accelerator.prepare` shards it among the processes."""
    count = BATCH * processes * (WINDOW + 2 if samples == SHORT else WINDOW)
    generator = torch.Generator().manual_seed(0)
    shape = (count, max(LENGTHS), 8) if samples == TOKENS else (count, 8)
    inputs = torch.randn(shape, generator=generator)
    targets = inputs.sum(dim=-1, keepdim=True).sin()
    if samples != TOKENS:
        return TensorDataset(inputs, targets)
    lengths = torch.tensor(LENGTHS).repeat_interleave(BATCH * processes)
    is_token = torch.arange(max(LENGTHS)) < lengths[:, None]  # False for padding
    return TensorDataset(inputs, targets, is_token)


def right_gradient(
    model: torch.nn.Module, samples: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the gradient of the mean loss over `samples` (or over their tokens), as one vector."""
    loss = all_losses(model, *(tensor.to(device) for tensor in samples)).mean()
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


def compare(gradients: Any, right: torch.Tensor) -> str:
    """Describe how `gradients`, of shape [ranks, elements], differ from the expected gradient."""
    if (gradients - gradients[0]).abs().max() > TOLERANCE:
        return "different on each rank"
    gradient = gradients[0]
    if (gradient - right).abs().max() <= TOLERANCE:
        return EQUAL
    factor = float(gradient @ right / (right @ right))
    if (gradient - factor * right).abs().max() <= TOLERANCE * max(1, abs(factor)):
        return f"×{round(factor, 4):g}"
    return f"off by {(gradient - right).norm() / right.norm():.0%}"


def main(device: torch.device, options) -> None:
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
    records = [observe(accelerator, *method) for method in METHODS]
    if not accelerator.is_main_process:
        return
    rows, lanes = [], list(group_by_events(records))
    for record in records:
        counts = [record.events.count(event) for event in ("step", "all-reduce")]
        lane, gradient = LETTERS[lanes.index(tuple(record.events))], gradient_summary(record)
        rows.append([lane, record.samples, record.method, *counts, record.bytes_shared, gradient])
    head = ["lane", "per process", "method", "optimizer steps", "all-reduces", "bytes"]
    print(table([*head, "gradient used"], rows))
    if options.plot:
        save(draw(records), options.plot)


def gradient_summary(record: AccumulationRecord) -> str:
    """Summarize how the gradients of all steps differ from the expected gradients.

    For example, the descriptions "a", "a", "a" and "b" become "a in 3 steps, then b".
    """
    counts = {words: record.gradients.count(words) for words in record.gradients}
    steps = len(record.gradients)
    parts = [f"{words} in {n} steps" if 1 < n < steps else words for words, n in counts.items()]
    return ", then ".join(parts)


def group_by_events(
    records: list[AccumulationRecord],
) -> dict[tuple[str, ...], list[AccumulationRecord]]:
    """Return the records of each sequence of events, in the order in which it first occurs."""
    groups: dict[tuple[str, ...], list[AccumulationRecord]] = {}
    for record in records:
        groups.setdefault(tuple(record.events), []).append(record)
    return groups


def draw(records: list[AccumulationRecord]):
    """Draw a lane for each sequence of events, and count its right and wrong methods."""
    lanes = group_by_events(records)
    figure = new_figure(6.5, 0.45 * len(lanes) + 1)
    figure.set_layout_engine("constrained", w_pad=0.12)
    axes = figure.subplots()
    orange, green = COLORS[1:3]  # orange for all-reduces, as in the picture of ddp/timeline.py
    box: dict[str, Any] = {"color": "#dddddd", "edgecolor": "#777777"}
    names = []
    for lane, (events, sharing) in enumerate(lanes.items()):
        right = [record.is_right for record in sharing].count(True)
        marks = [(right, "right", green), (len(sharing) - right, "wrong", COLORS[3])]
        marks = [mark for mark in marks if mark[0]]
        heights = [lane - 0.2, lane + 0.2] if len(marks) == 2 else [lane]
        for (count, word, color), y in zip(marks, heights, strict=True):
            text = f"{count} {word}"
            axes.text(7.2, y, text, color=color, weight="bold", fontsize=9, va="center")
        first, *others = sharing
        method = counted(len(sharing), "method") if others else first.method.replace("`", "")
        names.append(f"{LETTERS[lane]} · {first.samples}: {method}")
        x, width = 0, 1
        for event in events:
            if event == "forward":
                x += width
                width = 4 if first.samples == ONE else 1
                axes.barh(lane, width - 0.12, 0.6, left=x, **box)
            elif event == "all-reduce":
                axes.plot(x + width - 0.38, lane, "D", color=orange, markersize=8)
            else:
                axes.plot(x + width - 0.12, lane, "|", color=green, markersize=19, mew=4)
    axes.set_yticks(range(len(lanes)), names, fontsize=9)
    axes.set(xlim=(0.9, 7.9), ylim=(len(lanes) - 0.5, -0.5), xticks=[])
    axes.set_xlabel("time → (not to scale)", fontsize=9)
    axes.set_frame_on(False)
    axes.tick_params(left=False)
    legend = [
        axes.bar([0], [0], **box, label="forward and backward of a micro-batch"),
        *axes.plot([], [], "D", color=orange, markersize=8, label="all-reduce, during backward"),
        *axes.plot([], [], "|", color=green, markersize=14, mew=4, label="optimizer step"),
    ]
    figure.legend(handles=legend, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    with one_line_errors():
        options = Parser(__doc__, plot=True, processes=2, least=2).parse_args()
        run_in_group(main, options.processes, options)
