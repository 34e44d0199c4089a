"""Test which command `accel-demo nodes` starts on each node, without starting it."""

from dataclasses import replace
from pathlib import Path

import pytest

from accel_demo.lab.nodes import launches
from accel_demo.processes.environment import environment_for
from tests.conftest import REPOSITORY

PLAN = launches.Plan(2, processes_per_node=3, addresses=["10.0.0.1", "10.0.0.2"], port=2000)
TORCHRUN_FLAGS = (
    "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 2000 --rdzv-conf timeout=60 "
    "--nproc-per-node 3"
)
ACCELERATE_FLAGS = (
    "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 2000 "
    "--num_processes 6 --rdzv_conf timeout=60"
)


def command_for_node_1(command: str) -> str:
    [(words, variables)] = launches.commands_for(command.split(), PLAN, 1)
    assert variables["NODE_RANK"] == "1" and "RANK" not in variables
    return " ".join(words)


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        "/venv/bin/torchrun",
        "python -m torch.distributed.run",
        "python3 -mtorch.distributed.run",
        "python -m torch.distributed.launch",
        "env X=1 torchrun",
        "uv run torchrun",
    ],
)
def test_torchrun_gets_the_flags_of_its_node_before_the_readers_own(launcher):
    expected = f"{launcher} {TORCHRUN_FLAGS} --tee 3 x.py"
    assert command_for_node_1(f"{launcher} --tee 3 x.py") == expected


@pytest.mark.parametrize(
    "launcher",
    [
        "accelerate launch",
        "accelerate-launch",
        "python -m accelerate.commands.launch",
        "uv run accelerate launch",
    ],
)
def test_accelerate_launch_gets_a_config_unless_it_has_one(launcher):
    ours = f"--config_file {launches.OWN_CONFIG}"
    for script in ("x.py", "x.py --config_file y.yaml", "-m x --config_file y.yaml"):
        expected = f"{launcher} {ours} {ACCELERATE_FLAGS} {script}"
        assert command_for_node_1(f"{launcher} {script}") == expected
    for flag in ("--config_file y.yaml", "--config-file y.yaml", "--tee 3 --config-file=y.yaml"):
        expected = f"{launcher} {ACCELERATE_FLAGS} {flag} x.py"
        assert command_for_node_1(f"{launcher} {flag} x.py") == expected


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("", "multi_gpu"),
        ("--use_fsdp", "use_fsdp"),
        ("--cpu", "cpu"),
        ("--config-file accelerate_configs/fsdp2.yaml", "use_fsdp"),
        ("--config_file accelerate_configs/multi_node_cpu.yaml", "multi_gpu"),
    ],
)
def test_accelerate_launch_accepts_the_flags_and_chooses_the_readers_kind(flags, config):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    for plan in (PLAN, launches.Plan(1, 1, ["127.0.0.1"], 2000)):
        command = f"accelerate launch {flags} {REPOSITORY}/x.py --config_file y".split()
        [(words, _)] = launches.commands_for(command, plan, plan.nodes - 1)
        options, *_ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        assert getattr(options, config)
        assert options.use_fsdp == (config == "use_fsdp")
        assert (options.num_machines, options.num_processes) == (plan.nodes, plan.processes)


def test_a_python_script_is_started_once_per_process_with_its_ranks():
    commands = launches.commands_for(["python", "x.py", "--log", "{node}.txt"], PLAN, 1)
    assert [words for words, _ in commands] == [["python", "x.py", "--log", "1.txt"]] * 3
    assert [variables["RANK"] for _, variables in commands] == ["3", "4", "5"]
    assert [variables["LOCAL_RANK"] for _, variables in commands] == ["0", "1", "2"]
    assert {variables["WORLD_SIZE"] for _, variables in commands} == {"6"}


def test_only_a_torchrun_inside_another_command_reads_the_flags_of_its_node(monkeypatch):
    from torch.distributed.run import parse_args

    [(words, variables)] = launches.commands_for(["bash", "-c", "torchrun x.py"], PLAN, 1)
    assert words == ["bash", "-c", "torchrun x.py"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = parse_args(["x.py"])
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == ("2", 1, "3")
    assert (options.master_addr, options.master_port) == ("10.0.0.1", 2000)
    # A launch that accel-demo starts on the node is a different one.
    passed_on = environment_for({})
    assert variables["NODE_RANK"] == "1" == passed_on["NODE_RANK"]
    assert not [name for name in passed_on if name.startswith("PET_")]


def test_an_elastic_launch_accepts_one_node_or_two():
    plan = launches.Plan(2, 1, ["10.0.0.1", "10.0.0.2"], 2000, elastic=True)
    for node in (0, 1):
        [(words, variables)] = launches.commands_for(["torchrun", "x.py"], plan, node)
        flags = " ".join(words)
        assert "--nnodes 1:2" in flags and "--rdzv-endpoint 10.0.0.1:2000 " in flags
        assert f"--local-addr 10.0.0.{node + 1} --rdzv-conf is_host={1 - node}," in flags
        assert words[-1] == "x.py" and variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_default_command_continues_an_interrupted_run_or_starts_a_new_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for elastic in (False, True):
        assert launches.default_command(elastic)[-1] == "runs/nodes-1"
    Path("runs/nodes-1/checkpoints").mkdir(parents=True)
    assert launches.default_command(False)[-1] == "runs/nodes-1"
    Path("runs/nodes-1/summary.json").touch()
    assert launches.default_command(False)[-1] == "runs/nodes-2"


def test_slurm_variables_replace_those_of_a_launcher_for_each_process_of_a_script():
    plan = replace(PLAN, slurm=True)
    commands = launches.commands_for(["python", "x.py"], plan, 1)
    variables = [variables for _, variables in commands]
    assert [each["SLURM_PROCID"] for each in variables] == ["3", "4", "5"]
    assert [each["SLURM_LOCALID"] for each in variables] == ["0", "1", "2"]
    for each in variables:
        assert "RANK" not in each and "WORLD_SIZE" not in each
        assert each["SLURM_NTASKS"] == "6" and each["SLURM_TASKS_PER_NODE"] == "3(x2)"
        assert each["SLURM_NODEID"] == "1" and each["SLURMD_NODENAME"] == "10.0.0.2"


def test_each_task_gets_only_what_srun_sets():
    plan = replace(PLAN, slurm=True)
    for command in (["python", "x.py"], ["bash", "-c", "RANK=$SLURM_PROCID python x.py"]):
        commands = launches.commands_for(command, plan, 1)
        assert len(commands) == 3
        assert all(name.startswith("SLURM") for _, given in commands for name in given)


@pytest.mark.parametrize("command", ["torchrun x.py", "accelerate launch x.py"])
def test_a_launcher_is_the_only_task_of_its_node(command):
    [(_, variables)] = launches.commands_for(command.split(), replace(PLAN, slurm=True), 1)
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")
    assert [variables[name] for name in names] == ["1", "1", "2", "1(x2)"]
