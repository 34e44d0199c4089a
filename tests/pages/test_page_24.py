"""Page 24: the phases of DataParallel, and the exercise on scatter and gather."""

import inspect
import shlex
import subprocess

import pytest
import torch
from torch import nn

from accel_demo.anatomy.data_parallel.phases import data_parallel
from accel_demo.anatomy.data_parallel.scatter_gather import chunk_sizes
from tests.conftest import GPUS, VISIBLE_GPUS
from tests.exercises.wrong_answers import edited
from tests.pages.pages import TUTORIALS, load_grader, mistake_in, rows_below

ANSWER = TUTORIALS / "exercises" / "answers" / "24_scatter_and_gather.py"
FINE = "below 1e-6"


def tables():
    """Map each table's first heading to all rows of the table, including the heading row."""
    found, last = [], ""
    for line in (TUTORIALS / "24_data_parallel.md").read_text().splitlines():
        if line.startswith("| "):
            if not last.startswith("| "):
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        last = line
    return {
        table[0][0]: [row for row in table if not set(row[0]) <= {"-", ":"} or not row[0]]
        for table in found
    }


def test_the_page_shows_uneven_chunks_four_threads_and_the_bytes_of_each_phase():
    phases = {row[0]: row[1:] for row in tables()["phase"][1:]}
    forward = ["`scatter`", "`replicate`", "`parallel_apply`", "`gather`"]
    assert list(phases) == [*forward, "backward of gather", "backward of replicate"]
    assert phases["`scatter`"][1:5] == ["3×6", "3×6", "3×6", "1×6"]
    assert phases["`gather`"][1:5] == ["3×3", "3×3", "3×3", "1×3"]
    assert phases["`parallel_apply`"][0] == "4 threads" and phases["`parallel_apply`"][-1] == "0"
    parameters = 4 * (6 * 5 + 5 + 5 * 3 + 3)  # bytes
    back = phases["backward of replicate"]
    assert phases["`replicate`"][-1] == back[-1] == str(3 * parameters)
    assert phases["backward of gather"][1:] == phases["`gather`"][1:]


def test_every_forward_copies_the_module_and_other_code_runs_in_the_main_thread():
    calls = [row[1:] for row in tables()["two steps with"][1:]]
    replicas = "replica 0, replica 1, replica 2, replica 3"
    assert calls == [
        ["`forward`", "2", "main", "1"],
        ["`kernel_distance`", "2", "main", "1"],
        ["`forward`", "8", replicas, "1"],
        ["`kernel_distance`", "2", "main", "1"],
    ]
    page = (TUTORIALS / "24_data_parallel.md").read_text()
    assert "\nReplications in 2 steps: 2\n" in page and "\ndevice_ids on a CPU: []\n" in page


def test_data_parallel_replicates_in_every_forward():
    assert "= self.replicate(" in inspect.getsource(nn.DataParallel.forward)


def test_one_device_only_calls_the_module():
    one = "if len(self.device_ids) == 1:\n                return self.module("
    assert one in inspect.getsource(nn.DataParallel.forward)


def test_replicas_keep_no_attribute_and_only_the_buffers_of_the_first_part():
    rows = tables()["after a step with 12 samples"][1:]
    assert [row[1:] for row in rows[:3]] == [["1", "0"], ["12", "3"], ["5.50", "1.00"]]
    inputs = torch.arange(12.0)

    def gradient(parts):
        """Return the gradient of the weight, 1, of BatchNorm, for a mean over all samples."""
        total = 0.0
        for part in inputs.chunk(parts):
            normalized = (part - part.mean()) / (part.var(correction=0) + 1e-5).sqrt()
            total += (2 * normalized * (normalized - part / 12)).sum().item()
        return f"{total / 12:.2f}"

    assert rows[3][1:] == [gradient(1), gradient(4)] and gradient(1) != gradient(4)


OLD_SCRIPT = """\
class Net(nn.Module):
    def forward(self, inputs):
        self.calls += 1
        self.last = inputs
        return self.layer(inputs)

model = nn.DataParallel(Net())
loss = model(inputs).mean()
distance = model.kernel_distance()
torch.save(model.state_dict(), "model.pt")
"""


def test_the_commands_find_the_mistakes_of_an_old_script(tmp_path):
    for name in ("model.py", "train.py"):
        (tmp_path / name).write_text(OLD_SCRIPT)
    found = [
        subprocess.run(
            shlex.split(row[0].strip("`")), cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for row in rows_below(TUTORIALS / "24_data_parallel.md", "command")
    ]
    assert [[line.split(":")[0] for line in text.splitlines()] for text in found] == [
        ["3", "4"],
        ["8"],
        ["10"],
        ["9", "10"],
    ]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs 1 GPU(s)")
def test_the_program_of_the_page_prints_the_same_output_on_a_gpu_machine(start):
    program = ["python", "tutorials/24_data_parallel.py"]
    result = start(program, **VISIBLE_GPUS)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == start(program).stdout


def test_only_the_plain_mean_of_uneven_chunks_is_biased():
    rows = tables()["replicas"][1:]
    assert [row[0] for row in rows] == list("12345678")
    for replicas, chunks, after, plain, weighted in rows:
        assert (after, weighted) == (FINE, FINE)
        uneven = len(set(chunks.split(", "))) > 1
        assert (plain == FINE) != uneven, replicas
    assert rows[-1][1] == "4, 4, 4, 4, 4, 4, 4, 2" and float(rows[-1][3]) > 0.01


def test_the_answer_on_20_samples_is_right():
    sizes = {replicas: chunk_sizes(20, replicas) for replicas in (2, 3, 4, 5)}
    assert [replicas for replicas, parts in sizes.items() if len(set(parts)) > 1] == [3]
    first, second, last = sizes[3]
    answer = f"Only for 3, which split 20 samples into {first}, {second} and {last}."
    assert answer in (TUTORIALS / "24_data_parallel.md").read_text()


@pytest.fixture(scope="module")
def grader():
    return load_grader("24")


CHUNKS = "batch.chunk(len(devices))"
MOVED = "[chunk.to(device) for"
CONTAINER = "[scatter(value, devices) for value in batch]"
DETACHED = "[value.detach() if torch.is_tensor(value) else value for value in batch]"
FIRST = "    if isinstance(batch, torch.Tensor):\n"  # the first line of scatter
OTHER = "    return [batch] * len(devices)"
JOINED = "gather(list(values), device) for"
DETACH = "detach() if isinstance(values[0], torch.Tensor) else gather(list(values), device)"
MISTAKES = [  # (text in the model answer, replacement, part of the grader's message)
    (CHUNKS, "batch.chunk(len(devices), 1)", "a dimension other than 0"),
    (CHUNKS, f"batch.detach(){CHUNKS[5:]}", "scatter of 12 samples to 4 devices cuts the graph"),
    (CHUNKS, f"batch.flip(0){CHUNKS[5:]}", "every sample once, in order"),
    (
        CHUNKS,
        "[batch]",
        "scatter of 12 samples to 4 devices should return parts of at most 3 samples",
    ),
    (
        CHUNKS,
        "batch.split([len(batch) - len(devices) + 1] + [1] * (len(devices) - 1))",
        "scatter of 12 samples to 4 devices should return parts of at most 3 samples, got [9, 1",
    ),
    (MOVED, "[chunk for", "put part i on devices[i], but uses cpu, cpu"),
    (
        FIRST,
        f"    if isinstance(batch, dict):\n        return [batch]\n{FIRST}",
        "returns 1 parts, unlike scatter of a tensor",
    ),
    ("[dict(zip(batch, part, strict=True)) for", "[part for", "should return a list of dicts"),
    (CONTAINER, CONTAINER.replace("in batch", f"in {DETACHED}"), "scatter cuts the graph of a te"),
    (
        CONTAINER,
        CONTAINER.replace("devices", "devices[:1] * len(devices)"),
        "scatter should also move tensors inside tuples, lists and dicts to dev",
    ),
    (" and batch:", ":", "returns no parts. Does it return one for a value without"),
    ("type(batch)(part)", "list(part)", "scatter of a tuple that contains a list should"),
    (OTHER, "    return [None] * len(devices)", "every replica unchanged: 'a batch' became None"),
    (
        "torch.cat(moved)",
        "torch.cat(moved, dim=-1)",
        "gather should join dimension 0: 2×2 and 2×2 should become 4×2, got (2, 4)",
    ),
    ("torch.cat(moved)", "torch.stack(moved)", "gather should join dimension 0"),
    (
        "device) for output in outputs]",
        "device) for output in outputs[::-1]]",
        "does not return all rows in the order",
    ),
    ("output.to(device)", "output.detach()", "gather cuts the graph: no gradient"),
    (" if first.dim() > 0 else torch.stack(moved)", "", "gather of scalars raises RuntimeErr"),
    (JOINED, f"gather(list(values), device).{DETACH} for", "gather cuts the graph of tensors in a"),
    (JOINED, "gather(list(values), torch.device('cpu')) for", "tensors in a tuple or list on the"),
    ("def scatter(", "def scater(", "your file raised an error: AttributeError"),
]


@pytest.mark.parametrize(("right", "wrong", "said"), MISTAKES, ids=[said for *_, said in MISTAKES])
def test_the_grader_names_a_typical_mistake(grader, tmp_path, right, wrong, said):
    (tmp_path / "wrong.py").write_text(edited(ANSWER.read_text(), right, wrong))
    assert said in mistake_in(grader, tmp_path / "wrong.py")


def test_backward_of_the_losses_of_all_replicas_raises_the_error_on_the_page():
    page = " ".join((TUTORIALS / "24_data_parallel.md").read_text().split())
    message = "grad can be implicitly created only for scalar outputs"
    assert f"`RuntimeError: {message}`" in page

    class LossInside(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).square().mean()

    losses = data_parallel(LossInside(3, 2), torch.ones(4, 3), 2)
    assert losses.shape == (2,)
    with pytest.raises(RuntimeError, match=message):
        losses.backward()
