"""Page 90: visible GPUs, the current GPU, `nvidia-smi`, and the exercise."""

import inspect
import random
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from accel_demo.anatomy.devices import visible_devices
from tests.conftest import GPUS, VISIBLE_GPUS
from tests.pages.pages import (
    TUTORIALS,
    load_grader,
    rows_below,
    table_rows,
)

ANSWER = TUTORIALS / "exercises" / "answers" / "90_visible_devices.py"
PAGE = "90_choosing_gpus.md"


def test_the_table_of_visible_devices_is_correct():
    seen = {row[0].strip("`"): row[1:4] for row in table_rows(PAGE, cells=5)}
    assert seen["0,4"] == ["2", "0", "4"]
    assert seen["0,9,4"] == seen["0,-1,4"] == ["1", "0", "none"]
    assert seen["4,0"] == ["2", "4", "0"]
    assert seen["not set"] == ["8", "0", "1"]
    for value in ("empty", "-1", "0,4,0"):
        assert seen[value] == ["0", "none", "none"]
    gpus = runpy.run_path(str(TUTORIALS / "90_choosing_gpus.py"))["GPUS"]
    for value, (count, first, second) in seen.items():
        devices = visible_devices({"not set": None, "empty": ""}.get(value, value), gpus)
        assert count == str(len(devices))
        assert first == str(devices.get("cuda:0", "none"))
        assert second == str(devices.get("cuda:1", "none"))


def test_every_process_has_the_same_variable_and_a_different_device():
    for rank, gpu in enumerate([0, 4]):
        line = f"CUDA_VISIBLE_DEVICES=0,4: my device cuda:{rank} is physical GPU {gpu}"
        assert line in (TUTORIALS / PAGE).read_text().splitlines()


def test_the_random_values_are_fixed_and_contain_no_rare_cases():
    grader = load_grader("90")
    cases = grader.random_cases(random.Random(grader.SEED))
    assert cases == grader.random_cases(random.Random(grader.SEED))
    assert len(cases) == grader.RANDOM_VALUES
    for _, _, value, uuids in cases:
        ids = value.split(",")
        gpus = [gpu for one in ids for gpu in visible_devices(one, uuids).values()]
        assert len(gpus) == len(set(gpus)) >= len(ids) - 1  # at most one id is invalid
        assert len({one.startswith("GPU-") for one in ids}) == 1


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(name, marks=pytest.mark.system) for name in ("zsh", "fish"))]
)
def test_the_first_row_sets_the_variable_for_one_program(shell):
    assert shutil.which(shell), f"this test needs {shell}: apt-get install {shell}"
    [typed] = [how for where, how in rows_below(TUTORIALS / PAGE, "where") if shell in where]
    show = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    python = f'{sys.executable} -c "{show}"'
    command = typed.strip("`").replace("python my_script.py", python)
    both = [shell, "-c", f"{command}; {python}"]
    ended = subprocess.run(both, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.split() == ["0,4", "-1"]  # -1 is set in conftest.py


def test_the_drawing_of_nvidia_smi_contains_no_measured_number():
    lines = (TUTORIALS / "90_nvidia_smi.txt").read_text().splitlines()
    assert lines[0].startswith("A drawing, not a recorded output.")
    numbers = [number for line in lines for number in re.findall("[0-9]+", line)]
    assert numbers == ["0", "4"] * 2  # the GPUs in both tables


def test_each_field_that_the_page_explains_is_in_the_drawing_of_nvidia_smi():
    drawing = (TUTORIALS / "90_nvidia_smi.txt").read_text()
    [_, below_drawing] = (TUTORIALS / PAGE).read_text().split(f"{drawing.rstrip()}\n```\n")
    [bullets, *_] = below_drawing.split("\n### ")
    fields = re.findall(r"\*\*(.+?)\*\*", bullets)
    assert len(fields) >= 6 and "GPU" in fields
    for field in fields:  # as a whole word: "GPU-Util" does not contain the field "GPU"
        assert re.search(rf"(?<![\w-]){re.escape(field)}(?![\w-])", drawing), field


def test_torch_documents_utilization_and_memory_as_the_page_explains_them():
    utilization = " ".join((torch.cuda.utilization.__doc__ or "").split())
    assert "percent of time over the past sample period during which one or more" in utilization
    assert "kernels was executing on the GPU as given by `nvidia-smi`" in utilization
    assert "between 1 second and 1/6 second" in utilization
    allocated = " ".join((torch.cuda.memory_allocated.__doc__ or "").split())
    assert "occupied by tensors" in allocated
    assert "less than the amount shown in `nvidia-smi` since some unused memory" in allocated
    assert "held by the caching allocator and some context" in allocated
    assert "managed by the caching allocator" in (torch.cuda.memory_reserved.__doc__ or "")


def test_collectives_of_objects_need_set_device_with_nccl():
    documented = " ".join((dist.all_gather_object.__doc__ or "").split())
    assert "the device used is given by ``torch.cuda.current_device()``" in documented
    assert "so that each rank has an individual GPU, via ``torch.cuda.set_device()``" in documented


def test_accelerate_calls_set_device():
    assert "device_module.set_device(self.device)" in inspect.getsource(PartialState.set_device)
    assert "self.set_device()" in inspect.getsource(PartialState.__init__)


SET_DEVICE = """import torch
old = torch.zeros(1, device="cuda")
torch.cuda.set_device(1)
print(old.device, torch.zeros(1, device="cuda").device)
with torch.cuda.device(0):
    print(torch.zeros(1, device="cuda").device)
print(torch.cuda.current_device(), torch.cuda.device_count())"""


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_set_device_changes_new_tensors_but_moves_and_hides_nothing(start):
    result = start(["python", "-c", SET_DEVICE], **VISIBLE_GPUS)
    assert result.stdout.split() == ["cuda:0", "cuda:1", "cuda:0", "1", str(GPUS)], result.stderr


MEMORY = """import torch
tensor = torch.zeros(2**26, device="cuda")
del tensor
free, total = torch.cuda.mem_get_info()
print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free)
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved())"""


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
def test_a_deleted_tensor_stays_reserved_and_the_context_takes_more(start):
    result = start(["python", "-c", MEMORY], **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr
    allocated, reserved, used, released = map(int, result.stdout.split())
    assert allocated == 0 < 4 * 2**26 <= reserved < used
    assert released == 0
