"""Grade exercise 10: call assert_distributed in every process of several launches."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grading
from grading import NotFinished, Wrong, dist, prefixed, torch


@dataclass(frozen=True)
class Launch:
    name: str
    processes: int  # how many processes the launcher starts
    connected: int  # how many processes Accelerate connects
    n_values: tuple[int, ...]  # of assert_distributed(n)
    launcher: str = "python"
    flags: str = ""  # passed to this program


TIME_LIMIT = 60  # seconds for one launch; it usually takes less than ten
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
MULTI_CPU = "accelerate launch --config_file tutorials/10_multi_cpu.yaml"
CONNECTED = "accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml"
LAUNCHES = [
    Launch("python alone", 1, 1, (1, 2)),
    Launch("two clones from torchrun", 2, 1, (1, 2), TORCHRUN, "--plain"),
    Launch("a MULTI_CPU config that starts one process", 1, 1, (1, 2), MULTI_CPU),
    Launch("two connected processes", 2, 2, (1, 2, 3), CONNECTED),
    Launch("debug_launcher with two processes", 2, 2, (1, 2, 3), flags="--debug-launcher"),
]
if sys.platform == "darwin":  # debug_launcher needs a network interface that macOS does not have
    LAUNCHES.pop()


def judge_all(answer: Path) -> str:
    judge_launch(answer, LAUNCHES[0])  # fail fast if the file is unusable
    with ThreadPoolExecutor(2) as pool:  # two launches at a time
        list(pool.map(lambda launch: judge_launch(answer, launch), LAUNCHES[1:]))
    return f"assert_distributed is correct in all {len(LAUNCHES)} launches"


def judge_launch(answer: Path, launch: Launch) -> None:
    def judge(number: int, seen: list[dict]) -> None:
        connected = {observation["connected"] for observation in seen}
        if connected != {launch.connected}:
            raise RuntimeError(f"unexpected: {connected} connected processes under {launch.name}")
        for n in launch.n_values:
            judge_calls(n, launch, [observation["calls"][str(n)] for observation in seen])

    outcome = grading.run_answer(
        __file__, answer, launch.launcher, launch.flags, time_limit=TIME_LIMIT
    )
    has_mistake = any(report["mistake"] for report in outcome.reports.values())
    with prefixed(f"with {launch.name}, "):
        if outcome.exit_code is None and launch.connected > 1 and not has_mistake:
            raise NotFinished(
                f"it did not finish within {outcome.time_limit:g} s. Does only one process make a "
                "call, such as gather, that every process must make?"
            )
        grading.check(outcome, (launch.processes,), judge)


def judge_calls(n: int, launch: Launch, calls: list[dict]) -> None:
    """Check the results of assert_distributed(n). `calls` has one result per process."""
    call, connected = f"assert_distributed({n})", launch.connected
    is_or_are = "process is" if connected == 1 else "processes are"
    is_right = n == connected == launch.processes
    for result in calls:
        if is_right and result["raised"]:
            raise Wrong(f"{call} raises {result['raised']}, although {n} {is_or_are} connected")
        if result["raised"] and not result["is_runtime_error"]:
            raise Wrong(f"{call} should raise a RuntimeError, but raises {result['raised']}")
    returns = [result for result in calls if not result["raised"]]
    if is_right or not returns:
        return
    if len(returns) < len(calls):
        raise Wrong(f"{call} raises on one process only: every process should raise a RuntimeError")
    why = f"{connected} {is_or_are} connected"
    if launch.processes > connected:
        why = "the launcher has started two processes and Accelerate has not connected them"
    raise Wrong(f"{call} returns, although {why}: it should raise a RuntimeError")


def report(answer: Path, folder: Path, is_plain: bool) -> None:
    """Call assert_distributed in this process, and write a report for the grader."""
    from accelerate import Accelerator

    from accel_demo.processes.devices import use_cpu

    launched_rank = os.environ.get("RANK")  # Accelerate changes RANK under debug_launcher
    accelerator = Accelerator() if is_plain else Accelerator(cpu=use_cpu())
    rank = accelerator.process_index if launched_rank is None else launched_rank
    name = f"{os.environ.get('WORLD_SIZE', 1)}-{rank}"
    # Clones also have a group: no process may exit while another is connecting.
    if dist.is_initialized():
        dist.barrier()
    grading.write_report(folder, name, grading.fill_in({}, observe, answer, accelerator))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def observe(answer: Path, accelerator) -> Iterator[dict]:
    ranks = torch.tensor([accelerator.process_index], device=accelerator.device)
    connected = len(accelerator.gather(ranks))
    # Close inherited files in processes that the answer forks: debug_launcher would wait for them.
    os.register_at_fork(after_in_child=lambda: os.closerange(3, os.sysconf("SC_OPEN_MAX")))
    function, calls = grading.import_answer(answer).assert_distributed, {}
    for n in (1, 2, 3):
        raised, is_runtime_error = "", False
        try:
            function(n)
        except NotImplementedError:  # a RuntimeError, but the function is not implemented yet
            raise
        except (Exception, SystemExit) as error:
            raised = grading.describe_error(error)
            is_runtime_error = isinstance(error, RuntimeError)
        calls[str(n)] = {"raised": raised, "is_runtime_error": is_runtime_error}
    yield {"connected": connected, "calls": calls}


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--plain", action="store_true", help="omit cpu=use_cpu()")
    parser.add_argument("--debug-launcher", action="store_true", help="start two processes")
    options = grading.read(parser)
    arguments = (options.answer, options.report, options.plain)
    if not options.report:
        sys.exit(grading.verdict(__file__, lambda: judge_all(options.answer)))
    if options.debug_launcher:
        from accelerate import debug_launcher

        debug_launcher(report, arguments, num_processes=2)
    else:
        report(*arguments)
