"""Grade exercise 10: call assert_distributed in every process of five launches.

python tutorials/exercises/graders/10.py FILE
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from accel_demo.lab import grading
from accel_demo.lab.grading import Wrong


@dataclass(frozen=True)
class Launch:
    name: str
    processes: int  # how many processes the launcher starts
    connected: int  # how many processes Accelerate connects
    asked: tuple[int, ...]  # values of n for assert_distributed(n)
    launcher: str = "python"
    flags: str = ""  # passed to this program


TORCHRUN = "torchrun --standalone --nproc-per-node 2"
MULTI_CPU = "accelerate launch --config_file tutorials/10_multi_cpu.yaml"
CONNECTED = "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml"
LAUNCHES = [
    Launch("python alone", 1, 1, (1, 2)),
    Launch("two clones from torchrun", 2, 1, (2,), TORCHRUN, "--plain"),
    Launch("a MULTI_CPU config that starts one process", 1, 1, (1, 2), MULTI_CPU),
    Launch("two connected processes", 2, 2, (1, 2, 3), CONNECTED),
    Launch("debug_launcher with two processes", 2, 2, (1, 2, 3), flags="--debug-launcher"),
]


def judge_all(answer: Path) -> str:
    judge_launch(answer, LAUNCHES[0])  # fail fast if the file is unusable
    with ThreadPoolExecutor(2) as pool:  # two launches at a time
        list(pool.map(lambda launch: judge_launch(answer, launch), LAUNCHES[1:]))
    return f"assert_distributed is correct in all {len(LAUNCHES)} launches"


def judge_launch(answer: Path, launch: Launch) -> None:
    def judge(number: int, seen: list[dict]) -> None:
        for observation in seen:
            connected, calls = observation["connected"], observation["calls"]
            if connected != launch.connected:
                raise RuntimeError(
                    f"unexpected: {connected} connected processes under {launch.name}"
                )
            for n in launch.asked:
                wanted = "return" if n == connected else "raise RuntimeError"
                if not calls[str(n)].startswith(wanted.removeprefix("raise ")):
                    raise Wrong(
                        f"({in_words(launch)}) assert_distributed({n}) should {wanted}; "
                        f"seen: {calls[str(n)]}"
                    )

    outcome = grading.run_answer(__file__, answer, launch.launcher, launch.flags)
    try:
        grading.check(outcome, (launch.processes,), judge)
    except Wrong as mistake:
        raise Wrong(f"under {launch.name} {mistake}", mistake.read) from None


def in_words(launch: Launch) -> str:
    if launch.connected == 2:
        return "two connected processes"
    return "one process" if launch.processes == 1 else "two processes, each alone"


def report(answer: Path, folder: Path, is_plain: bool) -> None:
    """Call assert_distributed in this process, and write a report for the grader."""
    from accelerate import Accelerator

    from accel_demo.processes.connect import use_cpu

    launched_rank = os.environ.get("RANK")  # Accelerate changes RANK under debug_launcher
    accelerator = Accelerator() if is_plain else Accelerator(cpu=use_cpu())
    rank = accelerator.process_index if launched_rank is None else launched_rank
    name = f"{os.environ.get('WORLD_SIZE', 1)}-{rank}"
    grading.write_report(folder, name, grading.fill_in({}, observe, answer, accelerator))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def observe(answer: Path, accelerator) -> Iterator[dict]:
    import torch

    ranks = torch.tensor([accelerator.process_index], device=accelerator.device)
    connected = len(accelerator.gather(ranks))
    function, calls = grading.import_answer(answer).assert_distributed, {}
    for n in (1, 2, 3):
        try:
            function(n)
            calls[str(n)] = "returns"
        except (Exception, SystemExit) as error:
            calls[str(n)] = grading.described(error)
    yield {"connected": connected, "calls": calls}


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--plain", action="store_true", help="omit cpu=use_cpu()")
    parser.add_argument("--debug-launcher", action="store_true", help="start two processes")
    options = parser.parse_args()
    arguments = (options.answer, options.report, options.plain)
    if not options.report:
        sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))
    if options.debug_launcher:
        from accelerate import debug_launcher

        debug_launcher(report, arguments, num_processes=2)
    else:
        report(*arguments)
