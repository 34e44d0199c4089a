"""Grade exercise 09: train on one process and on two, and compare every step.

python tutorials/exercises/graders/09.py FILE
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
from accel_demo.wording import counted

TIME_LIMIT = 90  # seconds; it takes under ten, and no collective waits longer than 60
SAMPLES, GLOBAL_BATCH, LEARNING_RATE = 128, 16, 0.1
STEPS = SAMPLES // GLOBAL_BATCH
TOLERANCE = 1e-6  # weights are about 0.1, and a learning rate that is wrong is so by a quarter
COUNTS = (1, 2)


def main(answer: Path) -> int:
    """Say what is wrong with the answer; 0 where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"{shlex.quote(str(answer))} --report {shlex.quote(folder)}"
        result = run_to_end(f"python tutorials/exercises/graders/09.py {options}", TIME_LIMIT)
        reports = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    if mistake := judge(reports, result):
        print(f"wrong: {mistake}")
        return 1
    print("right: on one process and on two, the same learning rates and the same weights")
    return 0


def judge(reports: list[dict], result) -> str:
    """What is wrong, in a sentence, or nothing."""
    for report in sorted(reports, key=lambda report: report["at"]):
        if report["mistake"]:  # the first: others may only have lost their partner
            return f"on {counted(report['processes'], 'process')} {report['mistake']}"
    if result.returncode is None:
        return f"the training did not end within {TIME_LIMIT} s: do all ranks take as many steps?"
    if result.returncode != 0 or len(reports) != sum(COUNTS):
        return f"the training broke off\n{result.stderr}"
    return ""


def watch(answer: Path) -> str:
    """Train with the answer in each process of the group; the sentence that says what is wrong."""
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils.data import TensorDataset

    AcceleratorState._reset_state(True)  # the answer makes an Accelerator of its own
    GradientState._reset_state()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 5)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    before = flat(model)
    weights, rates = train_here(model, inputs, targets)
    put_back(model, before)
    seen, steps = [0], []  # samples in forwards since the last step; (samples, rate) of each step

    def count(module, arguments):
        seen[0] += len(arguments[0])

    def note(optimizer, *_):
        steps.append((seen[0], optimizer.param_groups[0]["lr"]))
        seen[0] = 0

    hooks = [model.register_forward_pre_hook(count), register_optimizer_step_pre_hook(note)]
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.train(model, TensorDataset(inputs, targets), GLOBAL_BATCH, LEARNING_RATE)
    except (Exception, SystemExit) as error:
        return f"the file cannot be used: {type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (steps, flat(model).cpu()))
    return (
        judge_batches([its for its, _ in everyones])
        or judge_rates([rate for _, rate in steps], rates, len(everyones))
        or judge_weights([its for _, its in everyones], weights)
    )


def judge_batches(everyones: list[list[tuple]]) -> str:
    """`everyones` has the steps of each rank: the samples behind it, and its learning rate."""
    processes, counts = len(everyones), {len(steps) for steps in everyones}
    if counts == {0}:
        return "the optimizer never steps"
    if len(counts) > 1:
        return f"the processes take {' and '.join(map(str, sorted(counts)))} steps: not as many"
    batches = [sum(samples for samples, _ in step) for step in zip(*everyones, strict=True)]
    if set(batches) == {GLOBAL_BATCH} and len(batches) == STEPS:
        return ""
    if sum(batches) == processes * SAMPLES and processes > 1:
        return "every process reads all samples: prepare the loader, so that each has its own part"
    if max(batches) == processes * GLOBAL_BATCH:
        return (
            f"a step is taken on {processes * GLOBAL_BATCH} samples instead of {GLOBAL_BATCH}: "
            "every process takes a whole global batch, so divide it by their number"
        )
    if sum(batches) != SAMPLES:
        return f"{sum(batches)} samples are seen in the epoch, instead of {SAMPLES}"
    return f"a step is taken on {batches[0]} samples, instead of {GLOBAL_BATCH}"


def judge_rates(mine: list[float], right: list[float], processes: int) -> str:
    """`right` has the learning rate of each step, as it is on one process."""

    def are(expected: list[float]) -> bool:
        pairs = zip(mine, expected, strict=True)
        return all(abs(rate - other) < TOLERANCE for rate, other in pairs)

    if are(right):
        return ""
    factor = mine[0] / LEARNING_RATE
    if abs(factor - 1) > TOLERANCE:
        return (
            f"the first learning rate is {factor:.3g} times the one asked for: the global batch is "
            "that of one process, so there is nothing to make up for"
        )
    if are([LEARNING_RATE * max(0, 1 - processes * step / STEPS) for step in range(STEPS)]):
        return (
            f"the schedule is over after {STEPS // processes} of {STEPS} steps: the prepared "
            f"scheduler steps {processes} times in each, once per process, and it is sized as if "
            "it stepped once"
        )
    if are([LEARNING_RATE * (1 - step / (processes * STEPS)) for step in range(STEPS)]):
        return (
            f"the schedule has come to 1/{processes} of its way when the epoch ends: it is sized "
            "by the loader before prepare has divided it, and steps once"
        )
    if len(set(mine)) == 1:
        return "the learning rate never changes: step the scheduler after the optimizer"
    said = [" ".join(f"{rate:.4g}" for rate in rates) for rates in (mine, right)]
    return f"the learning rates of the steps are {said[0]} instead of {said[1]}"


def judge_weights(everyones: list, right) -> str:
    if any(not (its == everyones[0]).all() for its in everyones):
        return "the processes end with other weights than each other: is the model prepared?"
    if (difference := (everyones[0] - right).abs().max().item()) > TOLERANCE:
        return (
            f"the learning rates are right, but the weights are off by {difference:.1g}: are the "
            "gradients those of the mean loss, and set to zero after each step?"
        )
    return ""


def train_here(model, inputs, targets) -> tuple:
    """The training asked for, in one process and with nothing but torch: weights and rates."""
    import torch
    from torch.nn.functional import mse_loss

    rates = [LEARNING_RATE * (1 - step / STEPS) for step in range(STEPS)]
    batches = zip(inputs.split(GLOBAL_BATCH), targets.split(GLOBAL_BATCH), strict=True)
    for rate, (some_inputs, some_targets) in zip(rates, batches, strict=True):
        parameters = list(model.parameters())
        loss = mse_loss(model(some_inputs), some_targets)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
    return flat(model), rates


def flat(model):
    import torch

    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def put_back(model, vector) -> None:
    import torch

    torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def one_process(device, answer: Path, folder: Path) -> None:
    """One process of a group: write down what it has seen."""
    import torch.distributed as dist

    processes, rank = dist.get_world_size(), dist.get_rank()
    report = {"mistake": watch(answer), "at": time.time(), "processes": processes}
    Path(folder, f"{rank} of {processes}.json").write_text(json.dumps(report))
    if report["mistake"]:
        os._exit(1)  # the other may be waiting: let it know


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="train, and write what was seen here")
    options = parser.parse_args()
    if options.report:
        from accel_demo.processes.group import run_in_group

        for processes in COUNTS:
            run_in_group(one_process, processes, options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))
