"""Average a loss over the tokens of a window in 1, 2 and 3 processes, in float64.

python tutorials/23_tokens.py
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import results_by_rank
from accel_demo.show import table

WINDOW = 2  # micro-batches per optimizer step
LENGTHS = [3, 9, 1, 12, 5, 8, 2, 1, 4, 11, 2, 6]  # tokens of each sequence in a global batch
TOLERANCE = 1e-12  # far above the rounding errors of float64, and far below a wrong average


def mean_of_each(accelerator, model, window):
    for micro_batch in window:
        with accelerator.accumulate(model):
            accelerator.backward(token_losses(model, *micro_batch).mean())


def mean_of_all(accelerator, model, window):
    count = accelerator.reduce(sum(tokens.new_tensor(len(tokens)) for _, tokens in window))
    # DDP divides by the number of processes, accelerator.backward by the accumulation steps.
    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / count
    with accelerator.no_sync(model):  # all micro-batches but the last
        for micro_batch in window[:-1]:
            accelerator.backward(token_losses(model, *micro_batch).sum() * scale)
    accelerator.backward(token_losses(model, *window[-1]).sum() * scale)


def token_losses(model, inputs, tokens):
    return cross_entropy(model(inputs), tokens, reduction="none")


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 5, dtype=torch.float64)  # 5 different tokens


def make_window(rank: int, processes: int):
    """Return the micro-batches of a rank. Each has the inputs and the tokens of its sequences."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(LENGTHS), 8, dtype=torch.float64, generator=generator)
    tokens = torch.randint(5, (sum(LENGTHS),), generator=generator)
    parts = (part.split(LENGTHS) for part in (inputs, tokens))
    sequences = list(zip(*parts, strict=True))
    size = len(LENGTHS) // (WINDOW * processes)
    starts = range(rank * size, len(LENGTHS), size * processes)
    micro_batches = (sequences[start : start + size] for start in starts)
    return [[torch.cat(part) for part in zip(*each, strict=True)] for each in micro_batches]


def gradients(device: torch.device):
    """Return the number of processes, the tokens of each micro-batch, and both gradients."""
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
    window = make_window(accelerator.process_index, accelerator.num_processes)
    window = [[part.to(device) for part in micro_batch] for micro_batch in window]
    found = []
    for average in (mean_of_each, mean_of_all):
        model = accelerator.prepare(make_model())
        average(accelerator, model, window)
        found.append(parameters_to_vector(weight.grad for weight in model.parameters()).cpu())
    return accelerator.num_processes, [len(tokens) for _, tokens in window], found


def compared(gradient: torch.Tensor, right: torch.Tensor) -> str:
    difference = ((gradient - right).norm() / right.norm()).item()
    return f"equal within {TOLERANCE:g}" if difference <= TOLERANCE else f"off by {difference:.0%}"


def main() -> None:
    model = make_model()
    inputs, tokens = (torch.cat(part) for part in zip(*make_window(0, 1), strict=True))
    token_losses(model, inputs, tokens).mean().backward()
    right = parameters_to_vector(weight.grad for weight in model.parameters())
    rows = []
    for processes in (1, 2, 3):
        ranks = results_by_rank(gradients, processes)
        assert [connected for connected, *_ in ranks] == [processes] * processes
        counts = "; ".join(" + ".join(map(str, tokens)) for _, tokens, _ in ranks)
        rows.append([processes, counts, *(compared(each, right) for each in ranks[0][2])])
    head = ["connected processes", "tokens of each rank", "mean of each micro-batch"]
    print(table([*head, "sum / tokens of all"], rows))


if __name__ == "__main__":
    main()
