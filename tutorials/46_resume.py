"""Continue runs that send less from a checkpoint, and compare their bits with uninterrupted runs.

torchrun --standalone --nproc-per-node 2 tutorials/46_resume.py
"""

import logging
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from send_less import BATCH, DiLoCo, make_model
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.utils import parameters_to_vector

from accel_demo.processes.devices import use_cpu
from accel_demo.show import table

EVERY = 4  # steps between two averages, and before the checkpoint
METHODS = ["PowerSGD", "LocalSGD", "DiLoCo"]


def save(path, model, optimizer, extra=None):
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}
    torch.save(parts, f"{path}.{dist.get_rank()}")


def load(path, model, optimizer):
    parts = torch.load(f"{path}.{dist.get_rank()}", weights_only=False)  # only your own files
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    return parts["extra"]


def add_power_sgd(model, total_steps):
    start = max(2, total_steps // 10)  # and not before the end of a warm-up
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=start)
    model.register_comm_hook(state, powerSGD_hook)
    return state


def resume_power_sgd(path, model, optimizer, state, batch):
    backward(model, batch)  # after its first backward pass, DDP rearranges its buckets
    optimizer.zero_grad()
    state.__setstate__(load(path, model, optimizer))


def main():
    accelerator = Accelerator(cpu=use_cpu())
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # a note about process groups
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(BATCH, 1, 28, 28, generator=draw), torch.randint(10, (BATCH,), generator=draw))
        for _ in range(3 * EVERY)
    ]
    batches = [[tensor.to(accelerator.device) for tensor in batch] for batch in batches]
    rows = []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            own, first = Path(folder, "own"), Path(folder, "first")
            expected, size = train(accelerator, method, batches, own)
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, Path(f"{own}.{dist.get_rank()}").read_bytes())
            Path(f"{first}.{dist.get_rank()}").write_bytes(everyone[0])
            cells = []
            cases = (own, True, True), (own, False, True), (own, True, False), (first, True, True)
            for path, has_extra, has_pass in cases:
                if method != "PowerSGD" and not has_pass:
                    cells.append("–")
                    continue
                resumed, _ = train(accelerator, method, batches, path, EVERY, has_extra, has_pass)
                difference = (resumed - expected).abs().max()
                dist.all_reduce(difference, dist.ReduceOp.MAX)
                cells.append("the same bits" if difference == 0 else "different")
        rows.append([method, f"{size:,}", *cells])
    if accelerator.is_main_process:
        print(f"{dist.get_world_size()} connected processes\n")
        head = ["method", "bytes in its own state", "resumed", "without that state"]
        print(table([*head, "without the pass", "all from rank 0's file"], rows))
    accelerator.end_training()


def train(accelerator, method, batches, path, start=0, has_extra=True, has_pass=True):
    """Return the last weights, and the bytes of what the method keeps besides the optimizer.

    With `start`, resume from the checkpoint of that step; otherwise, write it. `has_pass`: PowerSGD
    makes a backward pass before its state is loaded.
    """
    model = make_model().to(accelerator.device)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    local = make_local(accelerator, method, model)
    state = add_power_sgd(model, len(batches)) if method == "PowerSGD" else None
    if start and state and has_extra and has_pass:
        resume_power_sgd(path, model, optimizer, state, batches[0])
    elif start:
        extra = load(path, model, optimizer)
        if state and has_extra:
            state.__setstate__(extra)
        elif method == "DiLoCo" and has_extra:
            local.load_state_dict(extra)
    with local:
        for step, batch in enumerate(batches[start:], start):
            if step == EVERY and not start:
                save(path, model, optimizer, extra_of(method, state, local))
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    kept = bytes_in(extra_of(method, state, local))
    return parameters_to_vector(model.parameters()).detach(), kept


def backward(model, batch):
    images, labels = batch
    F.cross_entropy(model(images), labels).backward()


def make_local(accelerator, method, model):
    if method == "DiLoCo":
        return DiLoCo(model, EVERY)
    return LocalSGD(accelerator, model, EVERY, enabled=method == "LocalSGD")


def extra_of(method, state, local):
    if state:
        return state.__getstate__()
    return local.state_dict() if method == "DiLoCo" else None


def bytes_in(extra) -> int:
    """Return the bytes of all tensors in nested dictionaries and lists."""
    if isinstance(extra, torch.Tensor):
        return extra.nbytes
    if isinstance(extra, dict):
        return sum(map(bytes_in, extra.values()))
    return sum(map(bytes_in, extra)) if isinstance(extra, list | tuple) else 0


if __name__ == "__main__":
    main()
