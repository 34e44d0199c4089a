"""Grade exercise 02: train with the four steps, and compare the weights with a reference.

python tutorials/exercises/graders/02.py FILE
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
from accel_demo.wording import counted

TIME_LIMIT = 60  # seconds for one launch; without a mistake it takes under ten
LAUNCHERS = {
    1: "accelerate launch --config_file accelerate_configs/cpu.yaml",
    2: "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml",
}
TELLINGS = {
    1: ("plain_step", "data_parallel_step", "ddp_step", "accelerate_step"),
    2: ("ddp_step", "accelerate_step"),
}
STEPS, WINDOW, BATCH, MAX_NORM = 4, 2, 8, 0.1
TOLERANCE = 1e-6


def main(answer: Path) -> int:
    """Say what is wrong with the first telling that is; 0 where all are right."""
    with ThreadPoolExecutor(2) as pool:  # both launches at once
        for mistake in pool.map(lambda processes: grade(answer, processes), LAUNCHERS):
            if mistake:
                print(f"wrong: {mistake}")
                return 1
    print("right: all four tellings clip, and end with the same weights, on one process and on two")
    return 0


def grade(answer: Path, processes: int) -> str:
    """Train in this many processes; the sentence that says what is wrong there, or nothing."""
    where = f"on {counted(processes, 'process')}"
    with tempfile.TemporaryDirectory() as folder:
        files = f"{shlex.quote(str(answer))} --report {shlex.quote(folder)}"
        program = f"tutorials/exercises/graders/02.py {files}"
        result = run_to_end(f"{LAUNCHERS[processes]} {program}", TIME_LIMIT)
        reports = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    if result.returncode is None:
        return f"{where} the training did not end within {TIME_LIMIT} s"
    if len(reports) != processes or result.returncode != 0:
        return f"{where} the training broke off\n{result.stderr}"
    for report in reports:
        if report["processes"] != processes:
            raise RuntimeError(f"{report['processes']} connected processes, not {processes}")
        if report["broken"]:
            return f"{where} {report['broken']}"
        for telling in TELLINGS[processes]:
            if mistake := judge(report["distances"][telling]):
                return f"{telling} {where} {mistake}"
    return ""


def judge(distances: dict[str, float]) -> str:
    """What the largest distance of a weight to each reference says of the step."""
    if distances["window"] <= TOLERANCE:
        return ""
    if distances["never"] <= TOLERANCE:
        return "does not clip: its weights are those of training without clipping"
    if distances["every micro-batch"] <= TOLERANCE:
        return (
            "clips on every micro-batch: clip once per optimizer step, when the gradients of the "
            "whole window are there"
        )
    return (
        f"gives other weights than clipping once per optimizer step does: they differ by up to "
        f"{distances['window']:.1e}, and {TOLERANCE:.0e} is allowed"
    )


def train(answer: Path, folder: Path) -> None:
    """One process of a launch: train with each step, and write down how far off its weights are."""
    import torch
    from accelerate import Accelerator

    from accel_demo.processes.connect import use_cpu

    accelerator = Accelerator(cpu=use_cpu(), gradient_accumulation_steps=WINDOW)
    rank, processes = accelerator.process_index, accelerator.num_processes
    if processes == 1:  # DistributedDataParallel wants a group even then
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    report = {"processes": processes, "distances": {}, "broken": ""}
    telling = "the file"
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        times = ("never", "window", "every micro-batch")
        references = {when: reference(when, processes) for when in times}
        for telling in TELLINGS[processes]:
            step = getattr(module, telling)
            weights = train_with(step, telling, accelerator)
            report["distances"][telling] = {
                when: max(
                    (mine - other).abs().max().item()
                    for mine, other in zip(weights, other_weights, strict=True)
                )
                for when, other_weights in references.items()
            }
    except Exception as error:
        report["broken"] = f"{telling} cannot be used: {type(error).__name__}: {error}"
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    accelerator.end_training()


def train_with(step, telling: str, accelerator) -> list:
    """The weights after `STEPS` calls of the learner's step."""
    import torch

    model, optimizer = model_and_optimizer()
    arguments = ()
    if telling == "data_parallel_step":
        model = torch.nn.DataParallel(model, device_ids=[])
    elif telling == "ddp_step":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif telling == "accelerate_step":
        model, optimizer = accelerator.prepare(model, optimizer)
        arguments = (accelerator,)
    for number in range(STEPS):
        window = make_window(number, accelerator.process_index)
        step(*arguments, model, optimizer, window, MAX_NORM)
    return [weight.detach() for weight in model.parameters()]


def reference(clip: str, processes: int) -> list:
    """The weights of all processes' training in one, with gradients added up by hand.

    `clip` is when: "never", once per "window", or (wrongly) on "every micro-batch", where each
    process clips its own gradients before they are shared.
    """
    import torch
    import torch.nn.functional as F

    model, optimizer = model_and_optimizer()
    weights = list(model.parameters())
    for number in range(STEPS):
        shares = []
        for rank in range(processes):
            optimizer.zero_grad()
            for index, (inputs, labels) in enumerate(make_window(number, rank)):
                (F.cross_entropy(model(inputs), labels) / WINDOW).backward()
                if clip == "every micro-batch" and index + 1 < WINDOW:
                    torch.nn.utils.clip_grad_norm_(weights, MAX_NORM)
            shares.append([weight.grad.clone() for weight in weights])
        for weight, *gradients in zip(weights, *shares, strict=True):
            weight.grad = torch.stack(gradients).mean(dim=0)
        if clip != "never":
            torch.nn.utils.clip_grad_norm_(weights, MAX_NORM)
        optimizer.step()
    return [weight.detach() for weight in weights]


def model_and_optimizer():
    """The same small problem for everyone."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def make_window(number: int, rank: int) -> list:
    """The micro-batches of one process in one optimizer step."""
    import torch

    generator = torch.Generator().manual_seed(100 * number + rank)
    inputs = torch.randn(WINDOW, BATCH, 12, generator=generator)
    labels = torch.randint(0, 5, (WINDOW, BATCH), generator=generator)
    return list(zip(inputs, labels, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="be one process of a launch, and write here")
    options = parser.parse_args()
    if options.report:
        train(options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))
