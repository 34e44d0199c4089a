"""Describe this machine, or check that a launch config starts the processes that it promises.

accel-demo doctor
accel-demo doctor --config accelerate_configs/cpu_two_processes.yaml

Without --config, this command describes this machine, and shows which launch configs of the course
fit it. With --config, it launches a small test program with that config. The exit code
is 1 if the launch fails, or if the processes, devices, precision or kind of distribution differ
from the config, 2 if Accelerate would reject the config, and 3 if doctor cannot check it here.

For several machines, run the same command on each of them, with its --machine-rank. First, the
machines compare their code, versions, clocks and settings. Then they launch the test program.
"""

import time
from collections.abc import Callable
from pathlib import Path

from accel_demo.errors import UserError, say
from accel_demo.lab.course.originals import CONFIGS
from accel_demo.lab.doctor import machines
from accel_demo.lab.doctor.comparison import (
    count_of,
    failure_fix,
    fixes,
    obtained_cells,
    plain_words,
    print_comparison,
    promised_cells,
)
from accel_demo.lab.doctor.connections import problem_of_interfaces
from accel_demo.lab.doctor.launch_config import promise_of, read_config
from accel_demo.lab.doctor.launches import LaunchFailed, flags_for, launch_plain, launch_probe
from accel_demo.lab.doctor.notes import cannot_check, has_enough_gpus, notes_on_config
from accel_demo.options import Parser
from accel_demo.show import table
from accel_demo.terminal import display
from accel_demo.wording import counted


def main(arguments: list[str], clock: Callable[[], float] = time.time) -> int:
    """Run the command, and return its exit code. `clock` is compared with the other machines'."""
    options = make_parser().parse_args(arguments)
    if not 0 < options.join_timeout <= 86_400:
        raise UserError(
            f"--join-timeout must be above 0 and at most 86400 s, got {options.join_timeout:g}"
        )
    flags = {
        "machine_rank": options.machine_rank,
        "main_process_ip": options.main_process_ip,
        "main_process_port": options.main_process_port,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if options.config is None:
        if given or options.num_processes is not None:
            raise UserError("the flags for a launch need --config FILE")
        return report_machine()
    config = read_config(options.config, machines.overrides() | given, options.num_processes)
    for note in notes_on_config(config):
        say(f"note: {note}")
    if reason := cannot_check(config):
        display(f"doctor cannot check {reason}.")
        return 3
    if config.get("num_machines", 1) > 1:
        return machines.check_launch(options.config, config, options.join_timeout, clock)
    if given:
        raise UserError(
            f"{options.config} is for one machine. Set num_machines in it, or leave the flags for "
            "several machines out."
        )
    return check_launch(options.config, config)


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="accel-demo doctor")
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="launch config to check")
    help = "number of processes, if it is not in the file"
    add("--num-processes", type=int, metavar="N", help=help)
    help = "rank of this machine, from 0 (default: NODE_RANK, or the file's machine_rank)"
    add("--machine-rank", type=int, metavar="N", help=help)
    help = "address of machine 0 (default: MASTER_ADDR, or the file's main_process_ip)"
    add("--main-process-ip", metavar="ADDRESS", help=help)
    help = "free port of machine 0 (default: MASTER_PORT, or the file's main_process_port)"
    add("--main-process-port", type=int, metavar="PORT", help=help)
    help = f"seconds to wait for the other machines (default: {machines.JOIN_TIMEOUT})"
    add("--join-timeout", type=float, metavar="S", default=machines.JOIN_TIMEOUT, help=help)
    return parser


def report_machine() -> int:
    """Print a description of this machine, and whether each launch config fits it."""
    import torch

    from accel_demo.anatomy import devices
    from accel_demo.lab import machine

    display(table(["this machine", "value"], devices.machine_rows()) + "\n")
    display(table(["package", "version"], machine.version_rows()) + "\n")
    display(table(["environment variable", "value"], machine.environment_rows()) + "\n")
    files, gpus = sorted(CONFIGS.glob("*.yaml")), torch.accelerator.device_count()
    rows = [[file.name, *fit_of(file, gpus)] for file in files]
    display(table(["launch config", "starts", "fits this machine"], rows))
    return 0


def fit_of(file: Path, gpus: int) -> tuple[str, str]:
    """Return what the config would launch, and whether that fits this machine: "yes" or "no: …"."""
    try:
        config = read_config(file)
    except UserError as error:
        return "nothing", f"no: {error}"
    if reason := cannot_check(config):
        return "unknown", f"doctor cannot check {reason}"
    promise = promise_of(config)
    starts, needed = f"{promise.processes} on {promise.device}, {promise.dtype}", promise.processes
    if promise.machines > 1:
        starts = f"{starts}, on {promise.machines} machines"
        needed //= promise.machines
    if promise.device == "cpu" or gpus >= needed:
        others = promise.machines - 1
        return starts, f"yes, and {counted(others, 'more machine')}" if others else "yes"
    return starts, f"no: it needs {count_of(needed)}, here: {count_of(gpus)}"


def check_launch(path: Path, config: dict) -> int:
    """Launch the probe with a config, and compare its processes with what the config promises."""
    promise = promise_of(config)
    uses_gloo = promise.backend == "gloo" or not has_enough_gpus(config)
    if promise.processes > 1 and uses_gloo and (problem := problem_of_interfaces()):
        raise UserError(problem)
    say(f"launching a test program with {path} (about 20 seconds) …")
    try:
        answers = launch_probe(path, flags=flags_for(config))
    except LaunchFailed as failure:
        lines = [f"the launch failed: {failure}", *failure_fix(config, promise)]
        say("\n".join(lines))
        return 1
    cells = {0: obtained_cells(answers)}
    different = print_comparison(path, ["", "promised", "obtained"], promised_cells(promise), cells)
    for names, fix in fixes(config, promise, answers, different.get(0, [])):
        display(f"Not as promised: {', '.join(names)}")
        display("\n".join(f"  {line}" for line in fix))
    if promise.kind != "DeepSpeed":  # without GPUs, it first compiles code for minutes
        plain = launch_plain(path, answers, flags_for(config))
        display("\n".join(plain_words(answers, plain)))
    return 1 if different else 0
