"""Grade exercise 07: train in two processes, and watch what is shared and what is used.

python tutorials/exercises/graders/07.py FILE
"""

import argparse
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from accel_demo.processes.launch import run_to_end

TIME_LIMIT = 90  # seconds; it takes under ten, and no collective waits longer than 60
PROCESSES, BATCHES, WINDOW, BATCH = 2, 10, 4, 3
WINDOWS = 3  # the last has two micro-batches


def main(answer: Path) -> int:
    """Say what is wrong with the answer; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        files = f"{shlex.quote(str(answer))} --report {shlex.quote(folder)}"
        result = run_to_end(f"python tutorials/exercises/graders/07.py {files}", TIME_LIMIT)
        reports = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    if mistake := judge(reports, result):
        print(f"wrong: {mistake}")
        return 1
    print("right: every step uses the gradient of its window, shared in one all-reduce")
    return 0


def judge(reports: list[dict], result) -> str:
    """What is wrong, in a sentence, or nothing."""
    for report in sorted(reports, key=lambda report: report["at"]):
        if report["mistake"]:  # the first: others may only have lost their partner
            return report["mistake"]
    if result.returncode is None:
        return f"the training did not end within {TIME_LIMIT} s: do all ranks share?"
    if result.returncode != 0 or len(reports) != PROCESSES:
        return f"the training broke off\n{result.stderr}"
    return ""


def watch(answer: Path) -> str:
    """Train with the answer in each process of the group; the sentence that says what is wrong."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from accel_demo.anatomy.accumulation import compare, right_gradient

    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # all gradients of the same weights
    inputs = torch.randn(PROCESSES, BATCHES, BATCH, 5)
    targets = torch.randn(PROCESSES, BATCHES, BATCH, 1)
    all_reduces, used = [], []

    def share(group, bucket):
        all_reduces.append(len(used))  # the step it is for
        return allreduce_hook(group, bucket)

    def note(*_):
        weights = list(model.parameters())
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        used.append(torch.cat([gradient.flatten() for gradient in gradients]))

    model.register_comm_hook(None, share)
    optimizer.register_step_pre_hook(note)
    rank = dist.get_rank()
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        batches = list(zip(inputs[rank], targets[rank], strict=True))
        module.train(model, optimizer, batches, WINDOW)
    except (Exception, SystemExit) as error:
        return f"the file cannot be used: {type(error).__name__}: {error}"
    if mistake := judge_steps(len(used)):
        return mistake
    rights, words = [], []
    for number in range(WINDOWS):
        part = slice(number * WINDOW, (number + 1) * WINDOW)
        samples = inputs[:, part].flatten(0, 2), targets[:, part].flatten(0, 2)
        rights.append(right_gradient(model.module, samples, torch.device("cpu")))
        gathered = [torch.empty_like(used[number]) for _ in range(PROCESSES)]
        dist.all_gather(gathered, used[number])
        words.append(compare(torch.stack(gathered), rights[number]))
    is_left_over = torch.allclose(used[1], rights[0] + rights[1], rtol=0, atol=1e-6)
    return judge_gradients(words, is_left_over) or judge_sharing(all_reduces)


def judge_steps(steps: int) -> str:
    if steps > WINDOWS:
        return (
            f"the optimizer steps too often: {steps} times for {BATCHES} micro-batches and a "
            f"window of {WINDOW}, instead of {WINDOWS} times"
        )
    if steps == WINDOWS - 1:
        return "the last window, which is short, never reaches the optimizer: step for it too"
    if steps < WINDOWS:
        return f"the optimizer steps {steps} times, instead of {WINDOWS} times"
    return ""


def judge_gradients(words: list[str], is_left_over: bool) -> str:
    """`words` are those of `accumulation.compare`, for each window."""
    full, short = set(words[:-1]), words[-1]
    if "another on each rank" in words:
        return (
            "each rank uses a gradient of its own: the last backward of a window has to share, so "
            "it must not be under no_sync"
        )
    if is_left_over:
        return "the gradients of the window before are still there: call zero_grad after a step"
    if full == {f"×{WINDOW}"}:
        return f"the gradient is {WINDOW} times too large: divide each loss by the window's length"
    if full == {"equal within 1e-6"} and short != "equal within 1e-6":
        return (
            f"the short window is wrongly scaled ({short}): divide by the number of micro-batches "
            "it really has"
        )
    if full != {"equal within 1e-6"}:
        return f"the gradients are not those of their windows: {', '.join(words)}"
    return ""


def judge_sharing(all_reduces: list[int]) -> str:
    """`all_reduces` has the number of the step each was for."""
    times = [all_reduces.count(step) for step in range(WINDOWS)]
    if times == [1] * WINDOWS and len(all_reduces) == WINDOWS:
        return ""
    return (
        f"gradients are shared {', '.join(map(str, times))} times for the {WINDOWS} steps, instead "
        "of once each: put forward and backward of all but the last micro-batch under no_sync"
    )


def one_process(device, answer: Path, folder: Path) -> None:
    """One process of the group: write down what it has seen."""
    import torch.distributed as dist

    report = {"mistake": watch(answer), "at": time.time()}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(report))
    if report["mistake"]:
        os._exit(1)  # the other may be waiting: let it know


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="train, and write what was seen here")
    options = parser.parse_args()
    if options.report:
        from accel_demo.processes.group import run_in_group

        run_in_group(one_process, PROCESSES, options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))
