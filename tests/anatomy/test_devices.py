"""Tests for CUDA_VISIBLE_DEVICES, the report about the machine, and asynchronous calls."""

import doctest
import itertools
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accel_demo import show
from accel_demo.anatomy import asynchronous, devices
from accel_demo.anatomy.devices import visible_devices
from tests.anatomy.programs import printed, table_rows, words_in
from tests.conftest import GPUS, VISIBLE_GPUS

STARTS = "1a2b 1a9f 27c4 3d08 4f6e 58b1 6c3d 7e95 80aa 9b07".split()  # two start with 1a
UUIDS = [f"GPU-{start}0000-4000-8000-000000000000" for start in STARTS]
written_numbers = st.builds(  # spellings that torch accepts: with blanks, a sign, or trailing text
    "{}{}{}{}{}".format,
    st.sampled_from(["", " "]),
    st.sampled_from(["", "", "+", "-"]),
    st.integers(0, 9),
    st.sampled_from(["", "", "gpu", "st"]),
    st.sampled_from(["", " "]),
)
beginnings = st.builds(lambda uuid, length: uuid[:length], st.sampled_from(UUIDS), st.integers(4))
words = st.sampled_from(["", " ", "-1", "99", "gpu", "GPU-zz", "MIG-1", "GPU-1a", " GPU-3d08"])


def values(*ids):
    return st.lists(st.one_of(*ids), max_size=6).map(",".join)


def numbers_of(devices: dict) -> list:
    """Return the physical GPUs of `cuda:0`, `cuda:1` …, and check that no index is missing."""
    assert list(devices) == [f"cuda:{index}" for index in range(len(devices))]
    return list(devices.values())


def read_by_torch(value: str | None, uuids: list[str]) -> list:
    """Return the GPUs that torch selects for this value on a machine with these UUIDs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if value is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", value)
        ids = torch.cuda._parse_visible_devices()
    if ids and isinstance(ids[0], str):
        return (
            ids if ids[0].startswith("MIG-") else torch.cuda._transform_uuid_to_ordinals(ids, uuids)
        )
    valid = [gpu < len(uuids) for gpu in ids]
    return ids[: valid.index(False)] if False in valid else ids


def test_the_examples_in_the_docstrings_are_correct():
    assert doctest.testmod(devices).attempted >= 1
    assert doctest.testmod(devices).failed == 0


@pytest.mark.parametrize("join", [",", " , "])
def test_valid_ids_are_numbered_from_0_in_the_order_written(join):
    for count in range(1, 4):
        for ids in itertools.permutations(range(5), count):
            assert numbers_of(visible_devices(join.join(map(str, ids)), 8)) == list(ids)


ABBREVIATED = ",".join(uuid[:8] for uuid in UUIDS)
RULES = [  # (value, the GPUs that it selects on a machine with ten GPUs)
    (None, list(range(10))),  # an unset variable selects all GPUs, and an empty one none
    *(("", []), (" ", [])),
    *((f"2,0,{invalid},7,7", [2, 0]) for invalid in ("-1", "10", "99", "", "x")),  # hides the rest
    *((f"{invalid},2", []) for invalid in ("-1", "10", "99", "x")),
    *((f"{UUIDS[3]},{unknown},{UUIDS[3]}", [3]) for unknown in ("-1", "x", "GPU-zz", "GPU-1a")),
    *(("5,1,5", []), ("0,00", []), (f"{UUIDS[2]},{UUIDS[3]},{UUIDS[2][:8]}", [])),  # repeated
    *((ABBREVIATED, list(range(10))), ("GPU-1", []), ("GPU-1a", []), ("GPU-1a2", [0])),
    *(("GPU-2", [2]), ("GPU", []), (f"{UUIDS[4]}, {UUIDS[3]}", [4])),  # no space before a UUID
    *((f"2,{UUIDS[0]}", [2]), (f"{UUIDS[0]},2", [0]), (f" {UUIDS[0]}", [])),  # the first decides
]


@pytest.mark.parametrize(("value", "gpus"), RULES)
def test_every_rule_in_the_docstring_holds(value, gpus):
    assert numbers_of(visible_devices(value, UUIDS)) == gpus
    if value is None or "GPU" not in value:
        assert numbers_of(visible_devices(value, 10)) == gpus


def test_uuids_that_cannot_be_looked_up_are_returned_as_written():
    assert visible_devices("GPU-1a,GPU-3d,5", 8) == {"cuda:0": "GPU-1a", "cuda:1": "GPU-3d"}
    for value in ("MIG-GPU-1a2b/1/2", "MIG-1a2b"):
        assert visible_devices(value, 8) == visible_devices(value, UUIDS) == {"cuda:0": value}
    assert visible_devices("MIG-1a2b,MIG-3d08", 8) == {"cuda:0": "MIG-1a2b"}


@pytest.mark.parametrize("physical", [-1, ["GPU-1", "GPU-1"], ["GPU-1", ""]])
def test_an_impossible_machine_is_a_value_error(physical):
    with pytest.raises(ValueError, match="physical must be"):
        visible_devices("0", physical)


@settings(deadline=None)
@given(st.one_of(st.none(), values(written_numbers, words), values(beginnings, words)))
def test_torch_selects_the_same_gpus(value):
    """There is one exception: torch also rejects a repeated id after an invalid one."""
    ids = [] if value is None else value.split(",")
    for physical in (5, UUIDS):
        gpus = numbers_of(visible_devices(value, physical))  # numbered without gaps
        assert len(gpus) == len(set(gpus)) <= (10 if value is None else len(ids))
    assume(len(ids) == 1 or not (ids and ids[0].startswith("MIG-")))
    ours, torchs = numbers_of(visible_devices(value, UUIDS)), read_by_torch(value, UUIDS)
    assert ours == torchs or (torchs == [] and repeats_an_id_behind_an_invalid_one(ids))


def repeats_an_id_behind_an_invalid_one(ids: list[str]) -> bool:
    gpus = [next(iter(visible_devices(written, UUIDS).values()), written) for written in ids]
    valid = [isinstance(gpu, int) for gpu in gpus]
    return False in valid and len(set(gpus)) < len(gpus)


def test_torch_selects_no_gpu_if_an_id_is_repeated_after_an_invalid_one():
    for value in ("0,99,0", "0,99,99", "GPU-1a2,GPU-zz,GPU-1a2"):
        assert numbers_of(visible_devices(value, UUIDS)) == [0]
        assert read_by_torch(value, UUIDS) == []


class FakeNvml:
    """A fake pynvml with two GPUs. Most queries fail on the second GPU.

    Its names and fields are the same as in nvidia-ml-py. The real module needs a driver, so only a
    GPU test uses it.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, count=2):
        self.count, self.is_open = count, False

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetName(self, gpu):
        return ["NVIDIA A", "NVIDIA B"][gpu]

    def nvmlDeviceGetUUID(self, gpu):
        return UUIDS[gpu]

    def nvmlDeviceGetMemoryInfo(self, gpu):
        self.only_the_first(gpu)
        return SimpleNamespace(total=8 * 2**30, used=3 * 2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        self.only_the_first(gpu)
        known, unknown = (SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in (7, 8))
        return [known, unknown, SimpleNamespace(pid=7, usedGpuMemory=None)]

    def nvmlSystemGetProcessName(self, pid):
        self.only_the_first(pid - 7)
        return "/usr/bin/python"

    def only_the_first(self, gpu):
        if gpu > 0:
            raise self.NVMLError("Not Supported")


def test_each_gpu_is_listed_with_its_processes_and_its_name_in_pytorch():
    nvml = FakeNvml()
    assert devices.nvml_rows(nvml, {UUIDS[0]: "cuda:0"}) == [
        ("GPU 0", "NVIDIA A, 3 GiB of 8 GiB used"),
        ("", f"cuda:0 here, {UUIDS[0]}"),
        ("", "process 7, /usr/bin/python: 1 GiB"),
        ("", "process 8, unknown name: 1 GiB"),
        ("", "process 7, /usr/bin/python: unknown memory"),
        ("GPU 1", "NVIDIA B, unknown memory"),
        ("", f"hidden here, {UUIDS[1]}"),
        ("", "unknown processes"),
    ]
    assert not nvml.is_open
    assert devices.nvml_rows(FakeNvml(0), {}) == [("GPU", "NVML responds, but lists no GPU")]


@pytest.mark.parametrize(
    ("question", "row"),
    [
        ("nvmlDeviceGetHandleByIndex", ("GPU 1", "does not respond and may be lost")),
        ("nvmlDeviceGetName", ("GPU 1", "unknown name, unknown memory")),
        ("nvmlDeviceGetUUID", ("", "unknown UUID, so its name in torch is unknown")),
    ],
)
def test_a_failing_query_on_one_gpu_does_not_hide_other_rows(monkeypatch, question, row):
    answer = getattr(FakeNvml, question)

    def only_for_the_first(self, gpu):
        self.only_the_first(gpu)
        return answer(self, gpu)

    everything = devices.nvml_rows(FakeNvml(), {UUIDS[0]: "cuda:0"})
    monkeypatch.setattr(FakeNvml, question, only_for_the_first)
    rows = devices.nvml_rows(FakeNvml(), {UUIDS[0]: "cuda:0"})
    assert rows[:5] == everything[:5]
    assert [other for other in rows[5:] if other not in everything] == [row]


def test_a_gpu_without_processes_is_listed_with_no_process(monkeypatch):
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetComputeRunningProcesses", lambda self, gpu: [])
    assert devices.nvml_rows(FakeNvml(1), {})[-1] == ("", "no process")


@pytest.mark.parametrize("library", ["missing", "without a driver"])
def test_the_report_names_a_missing_library_or_driver(monkeypatch, library):
    nvml = FakeNvml()

    def refuse():
        raise nvml.NVMLError("NVML Shared Library Not Found")

    nvml.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", None if library == "missing" else nvml)
    row = dict(devices.machine_rows())["GPU processes"]
    assert ("pip install nvidia-ml-py" in row) == (library == "missing")
    assert ("no NVIDIA driver responds" in row) == (library != "missing")


def test_the_report_lists_cores_and_cuda_variables(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "")
    rows = dict(devices.machine_rows())
    assert 1 <= int(rows["cores usable"]) <= psutil.cpu_count()
    assert rows["CUDA_VISIBLE_DEVICES"] == "-1"  # set in conftest.py
    assert (rows["CUDA_DEVICE_ORDER"], rows["CUDA_LAUNCH_BLOCKING"]) == ("PCI_BUS_ID", "empty")
    assert not any(name.startswith("cuda:") for name in rows)


def test_the_program_reports_this_machine_and_how_many_processes_fit(capsys):
    devices.main([])
    report = dict(table_rows(capsys.readouterr().out))
    fit, rest = report["gloo processes"].split(" ", 1)
    room = int(rest.rsplit(" ", 1)[1])
    assert 0 <= int(fit) == min(room, devices.usable_cores())
    assert "before it has a model" in rest


def early(device):
    dist.barrier()
    return asynchronous.all_reduce_early(device), printed(asynchronous.main, device, plot=None)


def test_a_call_returns_before_the_other_ranks_have_joined(together):
    ranks = together(early, 3)
    assert [result for result, _ in ranks] == [(False, True, 6.0)] * 3
    assert [text for _, text in ranks[1:]] == [""] * 2
    assert [row[:3] for row in table_rows(ranks[0][1])[1:]] == [
        ["the call has returned", "have not called it", "False"],
        ["`wait()` has returned", "have joined", "True"],
    ]


def test_one_process_is_an_error():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="needs at least two processes"):
            asynchronous.all_reduce_early(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_the_map_of_devices_is_printed_and_drawn(tmp_path, capsys):
    drawn = tmp_path / "map.svg"
    devices.main(["--visible", "0,4", "--visible", "3,9", "--plot", str(drawn)])
    cells = table_rows(capsys.readouterr().out)[1:]
    assert cells == [["0,4", "2", "cuda:0: 0, cuda:1: 4"], ["3,9", "1", "cuda:0: 3"]]
    assert "no GPU 9" in words_in(drawn)


def test_an_empty_value_is_drawn_as_none_visible(tmp_path):
    for value in ("", " "):
        drawn = tmp_path / "map.svg"
        devices.main(["--visible", value, "--plot", str(drawn)])
        assert "none visible" in words_in(drawn) and "no GPU " not in drawn.read_text()


@pytest.mark.parametrize(
    ("values", "physical"),
    [
        (["0,4", "0,9,4"], 8),
        (["0,15,99,3", ""], 16),
        ([",".join(map(str, range(8))), "7,6,5,4,3,2,1,0", " 0, +4"], 8),
        ([",".join(map(str, range(15, -1, -1)))], 16),
        (["", "0", "1"], 1),
    ],
)
def test_texts_and_lines_in_the_map_do_not_overlap(values, physical, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figures = []
    monkeypatch.setattr(show, "save", lambda figure, file: figures.append(figure))
    devices.draw_map(values, physical, "map.svg")
    canvas = FigureCanvasAgg(figures[0])
    canvas.draw()
    for axes in figures[0].axes:
        places = {text: text.get_window_extent(canvas.get_renderer()) for text in axes.texts}
        for text, place in places.items():
            if text.get_bbox_patch():
                places[text] = place = text.get_bbox_patch().get_window_extent()
            assert place.x0 >= 0 and place.x1 <= figures[0].bbox.x1, text
        for first, second in itertools.combinations(places, 2):
            assert not places[first].overlaps(places[second]), (first, second)
        for line in axes.lines:  # each connects a GPU, an id and, unless dotted, a device
            path = line.get_path().transformed(line.get_transform())
            crossed = [text for text in places if path.intersects_bbox(places[text], filled=False)]
            assert len(crossed) == (2 if line.get_linestyle() == ":" else 3), crossed


def test_enqueued_calls_can_be_timed_only_on_a_gpu():
    with pytest.raises(ValueError, match="device must be a CUDA GPU, got cpu"):
        asynchronous.time_enqueued(torch.device("cpu"))


def test_the_variable_can_still_be_set_after_importing_torch(monkeypatch):
    """CUDA reads the variable when initialized. Without a GPU, check only what torch parses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,4")
    assert torch.cuda._parse_visible_devices() == [0, 4] and not torch.cuda.is_initialized()


needs_gpu = pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
SET_WHEN = """import os, torch
{before}
torch.zeros(1, device="cuda")
{after}
print(torch.ones(1, device="cuda").device)"""  # `device_count` reads the variable again


@pytest.mark.gpu
@needs_gpu
def test_setting_the_variable_after_cuda_is_initialized_has_no_effect(start):
    hide = "os.environ['CUDA_VISIBLE_DEVICES'] = '-1'"
    late = start(["python", "-c", SET_WHEN.format(before="", after=hide)], **VISIBLE_GPUS)
    assert late.stdout.strip() == "cuda:0"
    early = start(["python", "-c", SET_WHEN.format(before=hide, after="")], **VISIBLE_GPUS)
    assert early.returncode != 0 and "RuntimeError" in early.stderr


TIMES = """import torch
from accel_demo.anatomy.asynchronous import time_enqueued
print(*time_enqueued(torch.device("cuda")))"""


@pytest.mark.gpu
@needs_gpu
def test_calls_return_long_before_the_gpu_finishes_unless_launches_block(start):
    enqueued, done = map(float, start(["python", "-c", TIMES], **VISIBLE_GPUS).stdout.split())
    assert enqueued < done / 2
    blocking = {**VISIBLE_GPUS, "CUDA_LAUNCH_BLOCKING": "1"}
    enqueued, done = map(float, start(["python", "-c", TIMES], **blocking).stdout.split())
    assert enqueued > done / 2


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPU(s)")
def test_a_call_on_gpus_returns_before_the_other_rank_has_joined(start):
    command = ["python", "-m", "accel_demo.anatomy.asynchronous"]
    result = start(command, **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr
    assert "on cuda (nccl)" in result.stdout and "ten products: called in" in result.stdout
    early, late = [line for line in result.stdout.splitlines() if "has returned" in line]
    assert "False" in early and "True" in late


REPORT = """import torch
from accel_demo.anatomy.devices import machine_rows
torch.zeros(1, device="cuda")
print(*(": ".join(row) for row in machine_rows()), sep="\\n")"""


@pytest.mark.gpu
@needs_gpu
def test_the_real_nvml_lists_the_gpu_that_torch_calls_cuda_0(start):
    pytest.importorskip("pynvml")
    result = start(["python", "-c", REPORT], **VISIBLE_GPUS)
    assert result.returncode == 0, result.stderr
    assert "cuda:0: " in result.stdout
    assert ": cuda:0 here, GPU-" in result.stdout
