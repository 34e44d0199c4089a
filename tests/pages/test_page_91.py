"""Page 91: how an old DDP script fails today, its silent mistakes, and two ports of it."""

import inspect
import json
import mmap
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index
from torch.distributed import distributed_c10d
from torch.distributed import launch as launch_by_torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torchvision import datasets, models

from accel_demo.data import STATISTICS
from tests.pages.pages import (
    TUTORIALS,
    bound_to,
    load_module,
    output_of,
    rows_below,
)

PAGE = TUTORIALS / "91_then_and_now.md"
TEXT = " ".join(PAGE.read_text().split())
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", 2]
OLD_LAUNCHER = ["python", "-m", "torch.distributed.launch", "--nproc_per_node=2"]

# Run a program, and then write what this process knows to a file in `folder`. Rank 0 downloads
# slowly, and each process that looks for the data records whether rank 0 had finished by then.
RECORD = """
import json, os, runpy, sys, time
from pathlib import Path
import torch, torchvision
import torch.distributed as dist

folder, program = Path(sys.argv.pop(1)), sys.argv[1]
sys.argv.pop(0)
record = {"downloaded first": []}
destroy = dist.destroy_process_group

def download(self):
    record["downloaded first"].append((folder / "downloaded").exists())
    time.sleep(0.5)
    (folder / "downloaded").touch()

def destroy_recorded(*arguments):
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    record.update(rank=dist.get_rank(), ranks=ranks)
    destroy(*arguments)

torchvision.datasets.MNIST.download = download
dist.destroy_process_group = destroy_recorded
values = runpy.run_path(program, run_name="__main__")
assert not dist.is_initialized()
record["losses"] = values["loss"].item(), values["mean_loss"].item()
rank = record["rank"]
(folder / f"{rank}.json").write_text(json.dumps(record))
torch.save(values["net"].module.state_dict(), folder / f"{rank}.pth")
"""


@cache
def program(name: str):
    return load_module(TUTORIALS / f"91_{name}.py")


def edited_script(number: int) -> str:
    """Return the script as it is in this start of the page's first output."""
    failures = program("failures")
    script = failures.edited((TUTORIALS / "91_old.py").read_text(), failures.SMALLER)
    for start in failures.REPAIRS[:number]:
        script = failures.edited(script, start.edits)
    return script


def launch(start, folder: Path, script: str, launcher: list = TORCHRUN, arguments=()):
    program("small_mnist").write(folder / "data")
    (folder / "91_old.py").write_text(script)
    return start([*launcher, "91_old.py", *arguments], cwd=folder)


def contains(library: Path, text: str) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        return content.find(text.encode()) >= 0


def resnet18() -> nn.Module:
    net = models.resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return net


def outcomes() -> list[list[str]]:
    """Return what happened at each start, from the page's first output."""
    block = output_of(PAGE.name, "python tutorials/91_failures.py")
    starts = re.split(r"^\d+\. .*\n", block, flags=re.MULTILINE)[1:]
    return [[line[5:] for line in text.splitlines() if line.startswith("   > ")] for text in starts]


def test_the_page_shows_how_each_start_ended():
    gpu_only = "DistributedDataParallel device_ids and output_device arguments only work with"
    expected = [
        "91_old.py: error: unrecognized arguments: --local-rank=…",
        'stopped at: dist.init_process_group("nccl", init_method="env://")',
        "stopped at: torch.cuda.set_device(local_rank)",
        f"ValueError: {gpu_only}",
        "rank 1 printed: epoch 0, step 0: loss …",
        "ValueError: Default process group has not been initialized",
        'Unexpected key(s) in state_dict: "module.conv1.weight"',
        "<All keys matched successfully>",
        "ValueError: sampler option is mutually exclusive with shuffle",
    ]
    shown = outcomes()
    assert len(shown) == len(expected)
    for lines, last in zip(shown, expected, strict=True):
        assert lines[-1].startswith(last)
    assert shown[0][0].startswith(
        "FutureWarning: The module torch.distributed.launch is deprecated"
    )
    assert [len([line for line in lines if " printed: " in line]) for lines in shown[4:8]] == [
        2,
        1,
        1,
        1,
    ]
    assert shown[5][2].startswith("UnpicklingError: Weights only load failed.")


@pytest.mark.slow
def test_a_start_with_one_process_is_not_taken_for_two():
    failures = program("failures")
    start = failures.Start("one process", {}, failures.TORCHRUN.replace("node 2", "node 1"))
    with pytest.raises(RuntimeError, match="one process: two processes must be connected"):
        failures.what_happened(start, edited_script(8))


@pytest.mark.parametrize(("number", "processes_that_print"), [(5, 2), (6, 1)])
def test_every_process_prints_and_saves_unless_the_script_reads_local_rank(
    start, tmp_path, number, processes_that_print
):
    script = edited_script(number) + program("failures").COUNT
    script = program("failures").edited(script, {"torch.save(net, ": 'print("saves " + '})
    result = launch(start, tmp_path, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("connected: 2") == 2
    losses = re.findall(r"epoch 0, step 0: loss \d+\.\d{4}", result.stdout)
    assert len(losses) == processes_that_print
    assert result.stdout.count("saves my_net.pth") == processes_that_print


@pytest.mark.parametrize(
    ("launcher", "renamed", "arguments", "local_ranks"),
    [
        (TORCHRUN, False, [], [0, 0]),
        (TORCHRUN, False, ["--local_rank", "1"], [1, 1]),
        (OLD_LAUNCHER, True, [], [0, 1]),
        (TORCHRUN, True, [], [0, 0]),
    ],
)
def test_the_local_rank_comes_from_the_argument(
    start, tmp_path, launcher, renamed, arguments, local_ranks
):
    first_lines = (TUTORIALS / "91_old.py").read_text().partition("dist.init")[0]
    if renamed:
        first_lines = first_lines.replace('"--local_rank"', '"--local-rank"')
    beliefs = program("local_rank")
    script = beliefs.IMPORTS + first_lines + beliefs.REPORT
    result = launch(start, tmp_path, script, launcher, arguments)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in sorted(result.stdout.splitlines())]
    assert [report["LOCAL_RANK"] for report in reports] == ["0", "1"]
    assert [report["local_rank"] for report in reports] == local_ranks
    assert [report["device"] for report in reports] == [f"cuda:{rank}" for rank in local_ranks]


@pytest.mark.parametrize("name", ["ddp", "accelerate"])
def test_a_port_connects_its_processes_averages_the_loss_and_saves_plain_weights(
    start, tmp_path, name
):
    program("small_mnist").write(tmp_path)
    text = (TUTORIALS / f"91_{name}.py").read_text()
    (tmp_path / "port.py").write_text(program("failures").edited(text, {"resnet101": "resnet18"}))
    (tmp_path / "record.py").write_text(RECORD)
    flags = ["--folder", tmp_path, "--epochs", "2"]
    result = start([*TORCHRUN, tmp_path / "record.py", tmp_path, tmp_path / "port.py", *flags])
    assert result.returncode == 0, result.stderr
    records = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [record["ranks"] for record in records] == [[0, 1], [0, 1]]
    assert records[0]["downloaded first"] == [False]
    assert records[1]["downloaded first"] == ([] if name == "ddp" else [True])
    (own_0, mean_0), (own_1, mean_1) = (record["losses"] for record in records)
    assert own_0 != own_1 and mean_0 == mean_1 == pytest.approx((own_0 + own_1) / 2)
    printed = re.findall(r"^epoch (\d), step 0: loss (\d+\.\d{4})$", result.stdout, re.MULTILINE)
    assert [epoch for epoch, _ in printed] == ["0", "1"]
    assert len(result.stdout.splitlines()) == 2
    assert printed[1][1] == f"{mean_0:.4f}"

    ranks = [torch.load(tmp_path / f"{rank}.pth") for rank in range(2)]
    weights = [key for key, _ in resnet18().named_parameters()]
    assert all(torch.equal(ranks[0][key], ranks[1][key]) for key in weights)
    assert not torch.equal(ranks[0]["bn1.running_mean"], ranks[1]["bn1.running_mean"])
    saved = torch.load(tmp_path / "my_net.pth")
    resnet18().load_state_dict(saved)
    assert all(torch.equal(saved[key], ranks[0][key]) for key in saved)
    assert any(not torch.equal(saved[key], resnet18().state_dict()[key]) for key in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "accelerate"])
def test_a_port_trains_a_resnet101_in_one_process_and_in_two(start, tmp_path, name):
    program("small_mnist").write(tmp_path)
    for processes in (1, 2):
        launcher = ["torchrun", "--standalone", "--nproc-per-node", processes]
        flags = ["--folder", tmp_path, "--epochs", "1"]
        result = start([*launcher, f"tutorials/91_{name}.py", *flags], timeout=200)
        assert result.returncode == 0, result.stderr
        assert len(result.stdout.splitlines()) == 1
        net = models.resnet101(num_classes=10)
        net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
        net.load_state_dict(torch.load(tmp_path / "my_net.pth"))
        (tmp_path / "my_net.pth").unlink()


def test_the_ports_are_short():
    rows = rows_below(TUTORIALS / "95_parts.md", "from")
    assert [row[:2] for row in rows] == [
        ["`11_plain.py`", "`11_ddp.py`"],
        ["`11_plain.py`", "`11_accelerate.py`"],
        ["`91_old.py`", "`91_accelerate.py`"],
    ]
    for _, _, *numbers in rows:
        before, removed, added, after = map(int, numbers)
        assert before - removed + added == after <= 50


def test_normalize_with_05_and_1_only_shifts_the_pixels():
    rows = {row[0].strip("`"): list(map(float, row[1:])) for row in rows_below(PAGE, "after")}
    plain, shifted = rows["ToTensor()"], rows["Normalize((0.5,), (1.0,))"]
    assert shifted[:2] == [-0.5, 0.5]
    assert shifted[2] == pytest.approx(plain[2] - 0.5) and shifted[3] == plain[3] != 1
    assert rows["Normalize((0.286,), (0.353,))"][2:] == [0, 1]
    _, mean, std = STATISTICS["mnist"]
    assert f"`Normalize(({mean[0]},), ({std[0]},))`" in TEXT


def wrap_and_catch() -> str:
    """Wrap a network on the CPU with a group that, like one of NCCL, has no backend for it."""
    group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(ValueError, match="device_ids and output_device arguments only work with"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0], process_group=group)
    with pytest.raises(RuntimeError) as error:
        DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    return str(error.value)


def test_wrapping_a_network_on_the_cpu_fails_without_a_backend_for_the_cpu(together):
    message = "No backend type associated with device type cpu"
    assert together(wrap_and_catch, 2) == [message, message]
    assert f"`{message}`" in TEXT


@pytest.mark.parametrize("device", ["cuda:1", 1, torch.device("cuda", 1)])
def test_output_device_is_one_device_and_a_list_becomes_the_current_device(monkeypatch, device):
    monkeypatch.setattr("torch._utils._get_current_device_index", lambda: 0)
    assert _get_device_index(device, True) == 1
    assert _get_device_index([device], True) == 0


def test_set_device_fails_without_cuda_as_the_page_says(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_setDevice", raising=False)
    message = "module 'torch._C' has no attribute '_cuda_setDevice'"
    with pytest.raises(AttributeError, match=re.escape(message)):
        torch.cuda.set_device(0)
    assert f"`{message}`" in TEXT


def test_the_prefix_of_old_files_can_be_removed():
    state_dict = {f"module.{key}": value for key, value in resnet18().state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        resnet18().load_state_dict(state_dict)
    assert consume_prefix_in_state_dict_if_present(state_dict, "module.") is None
    resnet18().load_state_dict(state_dict)


def test_conv1_is_the_only_layer_that_reads_the_image():
    net = models.resnet101(num_classes=10)
    inputs = [layer.in_channels for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    assert inputs[0] == 3 and 3 not in inputs[1:]
    net.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_old_launcher_passes_local_rank_with_a_hyphen_since_2_0():
    [note] = re.findall(r"versionchanged:: (.*?)\n\n(.*?)\n\n", launch_by_torch.__doc__, re.DOTALL)
    version, explanation = note
    assert version == "2.0.0" and "the dashed ``--local-rank``" in explanation


def test_nccl_means_nccl2_which_raises_the_errors_on_the_page_and_reads_local_rank():
    bound_to(
        "torch", PAGE.name, "with torch {version} (whose `nccl` is an implementation named `nccl2`)"
    )
    default = inspect.getsource(distributed_c10d._register_builtin_nccl_backend)
    assert "else _create_nccl2_process_group" in default
    create = inspect.getsource(distributed_c10d._create_nccl2_process_group)
    choose_device = inspect.getsource(distributed_c10d._nccl2_device)
    assert "device_index = get_node_local_rank() % device_count" in choose_device
    for source, message in (
        (create, "Distributed package doesn't have NCCL built in"),
        (choose_device, "nccl2 requires at least one CUDA device"),
    ):
        assert f'RuntimeError("{message}")' in source and f"`{message}`" in TEXT


def test_ddp_uses_output_device_only_for_its_log():
    bound_to("torch", PAGE.name, "In torch {version}, DDP only logs this device")
    lines = inspect.getsource(DistributedDataParallel).splitlines()
    uses = [line.strip() for line in lines if "self.output_device" in line]
    assert uses == [
        "self.output_device = None",
        "self.output_device = _get_device_index(output_device, True)",
        "-1 if self.output_device is None else self.output_device,",
    ]


def test_torchvision_checks_for_the_files_and_then_writes_them():
    source = inspect.getsource(datasets.MNIST.download)
    assert source.index("if self._check_exists()") < source.index("download_and_extract_archive(")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch has no CUDA library")
def test_gloo_prints_nothing_about_a_group_that_is_not_destroyed():
    bound_to("torch", PAGE.name, "These messages are in torch {version} and its NCCL library")
    libraries = Path(torch.__file__).parent / "lib"
    leak = "was not finalized before destruction"
    assert contains(libraries / "libtorch_cuda.so", leak)
    for name in ("libtorch_python.so", "libtorch_cpu.so"):  # the second one contains gloo
        assert not contains(libraries / name, leak)


def test_a_wrong_number_of_arguments_is_an_error_in_one_line(start):
    result = start(["python", "tutorials/91_small_mnist.py"])
    message = "error: pass one folder, for example runs/small-mnist\n"
    assert (result.returncode, result.stderr) == (2, message)
