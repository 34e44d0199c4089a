"""Keep an exponential moving average (EMA) of a model's weights, in several ways, and resume it.

python tutorials/32_ema.py
"""

import shutil
import tempfile
from itertools import islice

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from accel_demo.anatomy.batch_norm import convert
from accel_demo.processes.devices import use_cpu
from accel_demo.processes.group import run_in_group
from accel_demo.show import table

WINDOW, STEPS, DECAY = 2, 20, 0.9  # micro-batches per step, optimizer steps, weight of the past


def prepare(synchronize=True):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
    inputs = torch.randn(STEPS * WINDOW * accelerator.num_processes * 8, 4) + 2
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model = convert(model) if synchronize else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def make_average(model, use_buffers=True):
    function = get_ema_multi_avg_fn(DECAY)
    return AveragedModel(model, multi_avg_fn=function, use_buffers=use_buffers)


def train(accelerator, model, optimizer, batches, average, of, each_micro_batch=False):
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients or each_micro_batch:
            average.update_parameters(of)


def run(synchronize=True, unwrap=True, use_buffers=True, each_micro_batch=False, is_eval=True):
    """Return the average after a run and an evaluation."""
    accelerator, model, optimizer, loader = prepare(synchronize)
    of = accelerator.unwrap_model(model) if unwrap else model
    average = make_average(of, use_buffers)
    train(accelerator, model, optimizer, loader, average, of, each_micro_batch)
    if is_eval:
        average.eval()  # it is a copy of a model in training
    with torch.no_grad():
        average(torch.randn(8, 4, device=accelerator.device))
    return average


def resume(is_registered: bool):
    """Return the average after a run that is interrupted halfway, and resumed."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    for is_resumed in (False, True):
        accelerator, model, optimizer, loader = prepare()
        of = accelerator.unwrap_model(model)
        average = make_average(of)
        if is_registered:
            accelerator.register_for_checkpointing(average)
        half = len(loader) // 2
        if is_resumed:
            accelerator.load_state(folder[0])
            rest = accelerator.skip_first_batches(loader, half)
            train(accelerator, model, optimizer, rest, average, of)
        else:
            train(accelerator, model, optimizer, islice(loader, half), average, of)
            accelerator.save_state(folder[0])
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return average


RUNS = {
    "`unwrap_model(model)`, after each step": run,
    "after each micro-batch": lambda: run(each_micro_batch=True),
    "`use_buffers=False`": lambda: run(use_buffers=False),
    "plain BatchNorm": lambda: run(synchronize=False),
    "evaluated without `eval()`": lambda: run(is_eval=False),
    "the wrapped model": lambda: run(unwrap=False),
    "resumed, registered": lambda: resume(is_registered=True),
    "resumed, not registered": lambda: resume(is_registered=False),
}


def join(tensors) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in tensors])


def is_equal_on_all_ranks(values: torch.Tensor) -> bool:
    of_ranks = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, values)
    return all(torch.equal(each, values) for each in of_ranks)


def main(device: torch.device) -> None:
    rows, first = [], None
    for name, make in RUNS.items():
        average = make()
        state = average.module.state_dict()
        values, weights = join(state.values()), join(average.module.parameters())
        first = values if first is None else first
        different = "**buffers differ**" if is_equal_on_all_ranks(weights) else "**different**"
        ranks = "equal" if is_equal_on_all_ranks(values) else different
        bits = "equal" if torch.equal(values, first) else "different"
        rows.append([name, int(average.n_averaged), ranks, f"`{next(iter(state))}`", bits])
    if dist.get_rank() == 0:
        head = ["average", "updates", "the ranks' averages", "first name", "compared with row 1"]
        print(table(head, rows))


if __name__ == "__main__":
    run_in_group(main, 2)
