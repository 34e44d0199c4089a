"""Grade exercise 06: train with it on 2 and on 3 processes, and compare the bits with DDP's.

python tutorials/exercises/graders/06.py FILE
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

TIME_LIMIT = 120  # seconds; without a mistake it takes about ten
PROCESSES = (2, 3)


def main(answer: Path) -> int:
    """Say on which rung the answer stands; 0 where it is DDP's."""
    with tempfile.TemporaryDirectory() as folder:
        program = ["python", "tutorials/exercises/graders/06.py", str(answer), "--report", folder]
        result = run_to_end(shlex.join(program), TIME_LIMIT)
        reports = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    mistake = judge(reports, result)
    if mistake:
        print(f"wrong: {mistake}")
        return 1
    print("right: on 2 processes and on 3 the weights are those of DDP, to the last bit")
    return 0


def judge(reports: list[dict], result) -> str:
    """What is wrong, in a sentence, or nothing."""
    reports.sort(key=lambda report: report["at"])
    for report in reports:  # the first that broke: others may only have lost their partner
        if report["broken"]:
            return f"on {report['processes']} processes {report['broken']}"
    if result.returncode is None:
        return f"the training did not end within {TIME_LIMIT} s: does every rank call the same?"
    if result.returncode != 0 or len(reports) != sum(PROCESSES):
        return f"the training broke off\n{result.stderr}"
    for report in sorted(reports, key=lambda report: (report["processes"], report["rank"])):
        where = f"on {report['processes']} processes"
        if "DDP" in report["same as"]:
            continue
        if not report["same on all ranks"]:
            return f"{where} the ranks end with different weights: the gradients are not shared"
        if report["same as"]:
            return f"{where} the weights are not DDP's: this is {report['same as'][0]}"
        return (
            f"{where} the weights are not DDP's, and on none of the rungs we know; they differ by "
            f"up to {report['distance']:.1e}"
        )
    return ""


def train_in_groups(answer: Path, folder: Path) -> None:
    """Train in groups of 2 and 3 processes, which all write down what they have found."""
    from accel_demo.processes.group import run_in_group

    for processes in PROCESSES:
        run_in_group(compare, processes, answer, folder)


def compare(device, answer: Path, folder: Path) -> None:
    """One process of a group: train with the answer, with DDP and on each rung below it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from accel_demo.anatomy.ddp.comparison import train_with

    rank, processes = dist.get_rank(), dist.get_world_size()
    report = {"rank": rank, "processes": processes, "broken": ""}
    file = folder / f"{processes}-{rank}.json"
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        mine = train_with(device, share=module.share_gradients)
    except BaseException as error:
        report |= {"broken": f"it cannot be used: {type(error).__name__}: {error}"}
        file.write_text(json.dumps(report | {"at": time.time()}))
        os._exit(1)  # the others are waiting: let them know
    weights = {"DDP": train_with(device, wrap=DistributedDataParallel)}
    weights |= {name: train_with(device, share=share) for name, share in rungs().items()}
    everyone = [torch.empty_like(mine) for _ in range(processes)]
    dist.all_gather(everyone, mine)
    report["same on all ranks"] = all(torch.equal(mine, other) for other in everyone)
    report["same as"] = [name for name, other in weights.items() if torch.equal(mine, other)]
    report["distance"] = (mine - weights["DDP"]).abs().max().item()
    file.write_text(json.dumps(report | {"at": time.time()}))


def rungs() -> dict:
    """What an answer may do, by what the grader calls it: functions of (parameters, step)."""
    import torch
    import torch.distributed as dist

    from accel_demo.anatomy.ddp.by_hand import average_each, average_flat

    def add_up(parameters, step):
        for parameter in parameters:
            dist.all_reduce(parameter.grad)

    def multiply_each(parameters, step):
        for parameter in parameters:
            parameter.grad *= 1 / dist.get_world_size()
            dist.all_reduce(parameter.grad)

    def divide_first(parameters, step):
        ordered = list(parameters) if step == 0 else list(parameters)[::-1]
        summed = torch.cat([parameter.grad.flatten() for parameter in ordered])
        summed /= dist.get_world_size()
        dist.all_reduce(summed)
        sizes = [parameter.numel() for parameter in ordered]
        for parameter, part in zip(ordered, summed.split(sizes), strict=True):
            parameter.grad.copy_(part.view_as(parameter))

    def flat(multiply, is_reversed):
        return lambda parameters, step: average_flat(parameters, multiply, is_reversed(step))

    return {
        "the sum of the gradients, not their mean": add_up,
        "rung 1, one all-reduce per parameter, then a division": lambda parameters, step: (
            average_each(parameters)
        ),
        "rung 1, one all-reduce per parameter, though you multiply by 1/N": multiply_each,
        "rung 2, one flat buffer, but divided by N": flat(False, lambda step: False),
        "rung 2, one flat buffer in the right order, but divided by N": flat(
            False, lambda step: step > 0
        ),
        "rung 2, one flat buffer in the right order, but divided by N before": divide_first,
        "rung 2, one flat buffer in reverse, but divided by N": flat(False, lambda step: True),
        "rung 3, multiplied by 1/N, but never in reverse": flat(True, lambda step: False),
        "rung 4, in reverse, but from the first step on": flat(True, lambda step: True),
        "rung 4, in reverse, but in the first step alone": flat(True, lambda step: step == 0),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="train, and write what was found here")
    options = parser.parse_args()
    if options.report:
        train_in_groups(options.answer, options.report)
    else:
        sys.exit(main(options.answer.resolve()))
