"""Test that the launch configs contain no default values and start the expected processes."""

import json
import sys

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from tests.conftest import GPUS, REPOSITORY, VISIBLE_GPUS

FOLDER = REPOSITORY / "accelerate_configs"
FILES = {path.name: path for path in sorted(FOLDER.glob("*.yaml"))}
TINY = "--max-steps 4 --train-samples 512 --test-samples 200".split()
SEVERAL_MACHINES = ("multi_node.yaml", "multi_node_cpu.yaml")  # launched in test_doctor_machines.py
EXPECTED = {  # (GPUs that the test needs, device, processes, mixed_precision)
    "cpu.yaml": (1, "cpu", 1, "no"),
    "cpu_two_processes.yaml": (2, "cpu", 2, "no"),
    "single_gpu.yaml": (1, "cuda", 1, "no"),
    "single_gpu_bf16.yaml": (1, "cuda", 1, "bf16"),
    "multi_gpu.yaml": (2, "cuda", 2, "no"),
    "multi_gpu_bf16.yaml": (2, "cuda", 2, "bf16"),
    "fsdp2.yaml": (2, "cuda", 2, "no"),
    "multi_node.yaml": (2, "cuda", 4, "no"),
    "multi_node_cpu.yaml": (2, "cpu", 4, "no"),
}
CPU_PROCESSES = {"cpu.yaml": 1, "cpu_two_processes.yaml": 2}


def test_every_config_file_has_expected_values():
    assert set(FILES) == set(EXPECTED)


@pytest.mark.parametrize("name", SEVERAL_MACHINES)
def test_a_config_for_several_machines_begins_with_the_command_for_one(name):
    first_line = FILES[name].read_text().splitlines()[0]
    assert first_line.startswith("# Two machines") and first_line.endswith(": `accel-demo nodes`")


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_the_config_and_no_key_repeats_a_default(name):
    read = load_config_from_file(str(FILES[name]))
    assert read.num_processes == EXPECTED[name][2]
    assert (read.mixed_precision or "no") == EXPECTED[name][3]
    config = yaml.safe_load(FILES[name].read_text())
    kind = config.pop("distributed_type")
    default = ClusterConfig(**ClusterConfig.process_config({"distributed_type": kind}))
    default.mixed_precision = "no"  # the launcher treats None as "no"
    for key, value in config.items():
        assert value != getattr(default, key), key


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(GPUS < gpus, reason=f"needs {gpus} GPU(s)"))
        for name, (gpus, *_) in EXPECTED.items()
        if name not in SEVERAL_MACHINES
    ],
)
def test_on_a_machine_with_gpus_each_config_trains_on_the_expected_device(start, tmp_path, name):
    command = ["accelerate", "launch", "--config_file", FILES[name], "accel_demo/train.py", *TINY]
    result = start([*command, "--run-dir", tmp_path / "run"], **VISIBLE_GPUS)
    assert result.returncode == 0, result.stdout + result.stderr
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    obtained = tuple(environment[key] for key in ("device", "processes", "mixed_precision"))
    assert obtained == EXPECTED[name][1:]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
def test_the_two_cpu_processes_see_no_gpu(start):
    # Do not run train.py: with fewer GPUs than processes, it uses the CPU even if GPUs are visible.
    count = "import torch; print(f'GPUs={torch.cuda.device_count()};')"
    command = ["accelerate", "launch", "--config_file", FILES["cpu_two_processes.yaml"]]
    result = start([*command, "--no_python", sys.executable, "-c", count], **VISIBLE_GPUS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("GPUs=0;") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CPU_PROCESSES)
def test_accelerates_own_test_passes_with_every_process_connected(start, name):
    command = ["accelerate", "test", "--config_file", FILES[name]]
    result = start(command, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Test is a success!" in result.stdout
    processes = CPU_PROCESSES[name]  # each process prints the world size
    assert result.stdout.count("Num processes: ") == processes
    assert result.stdout.count(f"Num processes: {processes}\n") == processes


@pytest.mark.slow
@pytest.mark.parametrize("name", CPU_PROCESSES)
def test_accelerates_own_test_of_gradient_synchronization_passes(start, name):
    command = ["accelerate", "launch", "--config_file", FILES[name]]
    command += ["-m", "accelerate.test_utils.scripts.test_sync"]
    result = start(command, ACCELERATE_USE_CPU="true")
    assert result.returncode == 0, result.stdout + result.stderr
    # The script does not print the world size, but runs a different test in a single process.
    is_connected = CPU_PROCESSES[name] > 1
    assert ("**Test Distributed `no_sync` context manager**" in result.stdout) == is_connected
    assert ("**Test NOOP `no_sync` context manager**" in result.stdout) != is_connected
