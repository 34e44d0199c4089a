"""Put fourteen faults into 51_ddp.py, one at a time, and print which check finds each first.

python tutorials/51_faults.py
"""

import multiprocessing
import os
import re
import runpy
import tempfile
import textwrap
import traceback
from pathlib import Path

import checks  # with torch, once, before the processes are forked

from accel_demo import show
from accel_demo.processes.launch import free_port

HERE = Path(__file__).parent
PROCESSES = 2
WIDTH = 60  # characters of a check's message
OWN_GROUP = '("gloo", rank=0, world_size=1, store=dist.HashStore())'
CLIP = "rank or nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
FAULTS = {  # what is wrong: the right text, the wrong text
    "each process connects only with itself": ('("gloo")', OWN_GROUP),
    "other samples under the same numbers": ("(81, 4)", "(81, 4).roll(rank, 0)"),
    "other weights on each rank, and no wrapper": (
        "model = DistributedDataParallel(nn.Sequential(*layers))",
        "torch.manual_seed(rank), layers[0].reset_parameters()\n    model = nn.Sequential(*layers)",
    ),
    "one rank has more batches": (
        "sampler=sampler)",
        "sampler=range(32 + 4 * rank))",
    ),
    "each epoch begins with an equal seed on all ranks": (
        "        seen = []\n",
        "        seen = []\n        torch.manual_seed(epoch)\n",
    ),
    "the batch size of one process": ("_SIZE // world_size //", "_SIZE //"),
    "the forward pass goes around the wrapper": ("mse_loss(model(", "mse_loss(model.module("),
    "only rank 0 clips the gradients": ("optimizer.step()", f"{CLIP}\n{' ' * 16}optimizer.step()"),
    "no sampler": ("sampler=sampler)", "shuffle=False)"),
    "no `set_epoch`": ("sampler.set_epoch(epoch)", "pass"),
    "a schedule of one step per batch": (
        "math.ceil(len(train_loader) / MICRO_BATCHES)",
        "len(train_loader)",
    ),
    "each rank evaluates its own BatchNorm": ("dist.broadcast(buffer, src=0)", "pass"),
    "each rank evaluates all samples": ("range(rank, len(valid_set), world_size)", "range(17)"),
    "each rank has the score of its own samples": (
        "errors_of_all) / len(errors_of_all)",
        "errors) / len(errors)",
    ),
}


def run_rank(script: Path, rank: int, port: int, found: multiprocessing.SimpleQueue) -> None:
    """Run the script as one rank, and put the check that fails into the queue."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{PROCESSES}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    try:
        runpy.run_path(str(script), run_name="__main__")
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        name = next(frame.name for frame in frames if frame.filename == checks.__file__)
        found.put((getattr(checks, name).__doc__, str(error)))
    except RuntimeError:
        pass  # the other rank has left


def main() -> None:
    fork, text, started = multiprocessing.get_context("fork"), (HERE / "51_ddp.py").read_text(), []
    with tempfile.TemporaryDirectory() as folder:
        for number, (right, wrong) in enumerate(FAULTS.values(), start=1):
            script, port, found = Path(folder, f"{number}.py"), free_port(), fork.SimpleQueue()
            assert text.count(right) == 1, right
            script.write_text(text.replace(right, wrong))
            processes = [
                fork.Process(target=run_rank, args=(script, rank, port, found))
                for rank in range(PROCESSES)
            ]
            for process in processes:
                process.start()
            started.append((processes, found))
        rows = []
        for fault, (processes, found) in zip(FAULTS, started, strict=True):
            for process in processes:
                process.join()
            check, message = ("none", "") if found.empty() else found.get()
            message = re.sub(r"(\.\d\d)\d+", r"\1", message)
            rows.append([fault, check, f"`{textwrap.shorten(message, WIDTH, placeholder=' …')}`"])
    print(show.table(["what is wrong", "the first check that fails", "what it says"], rows))


if __name__ == "__main__":
    main()
