"""Grade exercise 00: run assert_distributed under five launches.

python tutorials/exercises/graders/00.py FILE
"""

import argparse
import importlib.util
import json
import os
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accel_demo.processes.launch import run_to_end

TIME_LIMIT = 60  # seconds for one launch; without a mistake it takes under ten
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
# (what is started, the command before this file, the flags after it, how many processes start, how
# many of them Accelerate connects, the values of n to try)
CASES = [
    ("python alone", "python", "", 1, 1, (1, 2)),
    ("two clones from torchrun", TORCHRUN, "--plain", 2, 1, (2,)),
    (
        "a MULTI_CPU config that starts one process",
        "accelerate launch --config_file tutorials/00_multi_cpu.yaml",
        "",
        1,
        1,
        (1, 2),
    ),
    (
        "two connected processes",
        "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml",
        "",
        2,
        2,
        (1, 2, 3),
    ),
    ("debug_launcher with two processes", "python", "--debug-launcher", 2, 2, (1, 2, 3)),
]


def main(answer: Path) -> int:
    """Say what the answer does in the first case it gets wrong; 0 where there is none."""
    if mistake := grade(answer, CASES[0]):  # the quickest one says whether it runs at all
        print(mistake)
        return 1
    with ThreadPoolExecutor(2) as pool:  # two launches at a time
        for mistake in pool.map(lambda case: grade(answer, case), CASES[1:]):
            if mistake:
                pool.shutdown(cancel_futures=True)
                print(mistake)
                return 1
    print(f"right: assert_distributed is right under all {len(CASES)} launches")
    return 0


def grade(answer: Path, case: tuple) -> str:
    """Start one case; the sentence that says what is wrong with the answer there, or nothing."""
    name, command, flags, started, connected, asked = case
    with tempfile.TemporaryDirectory() as folder:
        files = f"{shlex.quote(str(answer))} --report {shlex.quote(folder)}"
        program = f"tutorials/exercises/graders/00.py {files} {flags}"
        result = run_to_end(f"{command} {program}", TIME_LIMIT)
        reports = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    if result.returncode is None:
        return f"wrong: under {name} it did not end within {TIME_LIMIT} s: is every rank asked?"
    if len(reports) != started or result.returncode != 0:
        return (
            f"wrong: under {name} the program did not come to its end ({len(reports)} of "
            f"{started} processes did, exit code {result.returncode})\n{result.stderr}"
        )
    for report in reports:
        if report["connected"] != connected:
            raise RuntimeError(f"{command} gave groups of {report['connected']}, not {connected}")
        if report["broken"]:
            return f"wrong: under {name} the file cannot be used: {report['broken']}"
        for n in asked:
            seen = report["seen"][str(n)]
            wanted = "return" if n == connected else "raise RuntimeError"
            if not seen.startswith(wanted.removeprefix("raise ")):
                truth = {(1, 1): "one process", (2, 1): "two processes, each alone"}
                truth = truth.get((started, connected), "two connected processes")
                return (
                    f"wrong: under {name} ({truth}) assert_distributed({n}) should {wanted}; "
                    f"seen: {seen}"
                )
    return ""


def try_out(answer: Path, folder: Path, plain: bool) -> None:
    """One process of a launch: call assert_distributed, and write down what it does."""
    import torch
    from accelerate import Accelerator

    from accel_demo.processes.connect import use_cpu

    accelerator = Accelerator() if plain else Accelerator(cpu=use_cpu())
    ranks = torch.tensor([accelerator.process_index], device=accelerator.device)
    report = {"connected": len(accelerator.gather(ranks)), "seen": {}, "broken": ""}
    try:
        spec = importlib.util.spec_from_file_location("answer", answer)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = module.assert_distributed
    except Exception as error:
        report["broken"] = f"{type(error).__name__}: {error}"
    else:
        for n in (1, 2, 3):
            try:
                function(n)
                report["seen"][n] = "returns"
            except Exception as error:
                report["seen"][n] = f"{type(error).__name__}: {error}"
    accelerator.wait_for_everyone()
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path, metavar="FILE")
    parser.add_argument("--report", type=Path, help="be one process of a launch, and write here")
    parser.add_argument("--plain", action="store_true", help="build a plain Accelerator()")
    parser.add_argument("--debug-launcher", action="store_true", help="start two processes")
    options = parser.parse_args()
    if not options.report:
        sys.exit(main(options.answer.resolve()))
    call = (options.answer, options.report, options.plain)
    if options.debug_launcher:
        from accelerate import debug_launcher

        debug_launcher(try_out, call, num_processes=2)
    else:
        try_out(*call)
