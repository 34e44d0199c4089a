"""Grade exercise 13: the number and its gradient on two and on three ranks, against one process.

python tutorials/exercises/graders/13.py FILE
"""

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_demo.processes.launch import run_to_end

TIME_LIMIT = 100  # seconds for one launch; without a mistake it takes under ten
PROCESSES = (2, 3)
ROWS, SIZE = 4, 6  # kernels per rank, and elements of a kernel


def main(answer: Path) -> int:
    """Say what is wrong on the smallest number of processes; 0 where all is right."""
    with ThreadPoolExecutor(2) as pool:  # both launches at once
        for mistake in pool.map(lambda processes: grade(answer, processes), PROCESSES):
            if mistake:
                print(f"wrong: {mistake}")
                return 1
    print("right: on two and on three processes every rank has the number and its rows' gradient")
    return 0


def grade(answer: Path, processes: int) -> str:
    """The sentence that says what is wrong in this many processes, or nothing."""
    where = f"on {processes} processes"
    with tempfile.TemporaryDirectory() as folder:
        files = f"{shlex.quote(str(answer))} --report {shlex.quote(folder)}"
        program = f"tutorials/exercises/graders/13.py {files} --processes {processes}"
        result = run_to_end(f"python {program}", TIME_LIMIT)
        reports = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    if result.returncode is None:
        return f"{where} it did not end within {TIME_LIMIT} s; do all ranks call the same?"
    if len(reports) != processes or result.returncode != 0:
        return f"{where} the run broke off\n{result.stderr}"
    mistakes = [report["mistake"] for report in reports]
    return next((f"{where} {mistake}" for mistake in mistakes if mistake), "")


def run(device, answer: Path, folder: Path) -> None:
    """One of the connected processes: use the learner's functions, and write down what is wrong."""
    import torch
    import torch.distributed as dist

    rank, processes = dist.get_rank(), dist.get_world_size()
    everything = torch.randn(processes * ROWS, SIZE, generator=torch.Generator().manual_seed(0))
    everything = everything.double().to(device)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        rows = everything[mine].clone().requires_grad_()
        total = module.total_distance(rows)
        if isinstance(total, torch.Tensor) and total.requires_grad:
            total.backward()
        mistake = judge(total, rows.grad, everything, mine, processes)
    except (Exception, SystemExit) as error:
        mistake = f"total_distance cannot be used: {type(error).__name__}: {error}"
    Path(folder, f"{rank}.json").write_text(json.dumps({"mistake": mistake}))


def judge(total, gradient, everything, mine: slice, processes: int) -> str:
    """What is wrong with this rank's number and gradient, or nothing."""
    import torch

    expected, gradients = references(everything, mine)
    if not isinstance(total, torch.Tensor) or total.shape != ():
        return f"total_distance must give a tensor with one number, got {total!r:.60}"
    if not is_close(total.detach(), expected):
        return f"the number is {total.item():.4f}, and of all kernels it is {expected.item():.4f}"
    if gradient is None or not gradient.any():
        return "the number is right, but its gradient is missing: all_gather has cut the graph"
    if is_close(gradient, gradients["whole"]):
        return ""
    if is_close(gradient, processes * gradients["whole"]):
        return (
            f"the gradient is {processes} times too large: every rank computes the whole number, "
            "and backward adds up the gradients of all of them"
        )
    if any(is_close(gradient, gradients[name]) for name in ("first of a pair", "own share")):
        return (
            "the gradient is that of the rank's own rows only: the same kernels are also the "
            "other side of pairs whose first kernel is on another rank"
        )
    distance = (gradient - gradients["whole"]).abs().max().item()
    return f"the number is right, but its gradient is off by up to {distance:.1e}"


def references(everything, mine: slice) -> tuple:
    """The number, and the gradients of these rows: the right one, and what mistakes give."""
    import torch

    rows = everything[mine].clone().requires_grad_()
    attached = torch.cat([everything[: mine.start], rows, everything[mine.stop :]])
    sums = {
        "whole": (attached[:, None] - attached).abs().sum(),
        "first of a pair": (rows[:, None] - everything).abs().sum(),
        "own share": (rows[:, None] - attached).abs().sum(),
    }
    gradients = {name: torch.autograd.grad(total, rows)[0] for name, total in sums.items()}
    return sums["whole"].detach(), gradients


def is_close(one, other) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-9 * other.abs().max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--processes", type=int, help="with --report: how many")
    parser.add_argument("--report", type=Path, help="run the answer, and write here what is wrong")
    options = parser.parse_args()
    if options.report:
        from accel_demo.processes.group import run_in_group

        run_in_group(run, options.processes, options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))
