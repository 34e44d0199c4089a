"""Page 92: old idioms, the lines that replace them, and how to get numbers out of a model."""

import re

import matplotlib.pyplot as plt
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.pages.pages import TUTORIALS, load_module, output_of, table_rows, transcript

PAGE = "92_old_idioms.md"
META = torch.device("meta")
KEPT = TUTORIALS / "92_kept_losses.py"


@pytest.fixture(autouse=True)
def new_accelerate_state():
    """Let each test choose the precision: Accelerate keeps the first choice of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Pair(nn.Module):
    """A model that takes a dict and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch):
        features = self.layer(batch["image"])
        return features.sum(dim=1), features


def rows_of_idioms() -> list[list[str]]:
    """Return [old line, new line, result of the old, result of the new] for each idiom."""
    text = (TUTORIALS / PAGE).read_text()
    blocks = re.findall(r"^-(.*)  # (.*)(?:\n\+(.*)  # (.*))?$", text, re.MULTILINE)
    return [[old, new, before, after] for old, before, new, after in blocks]


def changed(path, folder, *changes):
    """Return the program at `path` as a module, after some replacements in its text."""
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "changed.py").write_text(text)
    return load_module(folder / "changed.py")


def test_the_old_loop_fails_in_the_first_step_and_then_in_the_last():
    output = output_of(PAGE, "python tutorials/92_old_loop_today.py")
    first, last, fixed = output.split("\n\n")
    assert first.startswith("Without .cuda(): step 1 fails\n  losses.append(loss.data[0])\n")
    assert last.splitlines()[:2] == [
        "loss.data[0] replaced by loss.item(): step 188 fails",
        "  label = label.resize(BATCH_SIZE)",
    ]
    assert "RuntimeError: requested resize to 64" in last
    assert fixed == ".resize(BATCH_SIZE) deleted: 188 steps, no error\n"


def test_the_tables_show_what_each_old_line_does():
    old = {line: result for line, _, result, _ in rows_of_idioms()}
    assert old["net.cuda()"] == old["images = images.cuda()"] == "needs a GPU"
    assert old["labels = on_gpu.type(torch.LongTensor)"] == "needs a GPU"
    assert old["images.to(device)"] == "images.device is cpu"
    assert old["images = Variable(images)"] == "type(images).__name__ is Tensor"
    assert old["x = Variable(images, requires_grad=True)"].endswith(" is (True, False)")
    assert old["h = Variable(output)"] == "h.requires_grad is False"
    assert old["values = output.data"] == "values.requires_grad is False"
    assert old["n = sum(pred == labels)"] == "n / len(labels) is tensor(0.5000)"
    for line, message in {
        "labels = inputs['label']": "NameError: name 'inputs' is not defined",
        "labels = labels.resize(BATCH_SIZE)": "but the given tensor has a size of 4",
        "value = loss.data[0]": "IndexError: invalid index of a 0-dim tensor",
        "values = on_gpu.numpy()": "can't convert meta device type tensor to numpy",
        "values = output.numpy()": "Can't call numpy() on Tensor that requires grad",
        "values = bf16.numpy()": "TypeError: Got unsupported ScalarType BFloat16",
        "curve = np.array([loss] * 9)": "Can't call numpy() on Tensor that requires grad",
    }.items():
        assert old[line].endswith(message)
    assert len(old) == 19


def test_the_lines_to_write_raise_no_error():
    new_lines = {new: result for _, new, _, result in rows_of_idioms()}
    assert new_lines["values = on_gpu.cpu().numpy()"] == "needs a GPU"
    assert not [result for result in new_lines.values() if "Error" in result]


def test_five_new_lines_have_the_result_of_the_old_line():
    same = [old for old, *_, result in rows_of_idioms() if result == "the same"]
    assert same == [
        "x = Variable(images, requires_grad=True)",
        "values = output.data",
        "net.bias.data.zero_()",
        "pred = torch.max(output, 1)[1]",
        "n = sum(pred == labels)",
    ]


def test_meta_does_not_raise_all_errors_of_a_gpu():
    assert nn.Conv2d(1, 8, 5).to(META)(torch.rand(4, 1, 28, 28)).shape == (4, 8, 24, 24)


def test_without_a_gpu_cuda_raises_one_of_the_errors_on_the_page(start):
    text = " ".join((TUTORIALS / PAGE).read_text().split())
    [recorded] = transcript("no_gpu").values()
    assert recorded.strip() in text
    result = start(["python", "tutorials/92_old_idioms.py", "--cuda"])
    assert result.returncode == 0
    assert ": " in result.stdout and result.stdout.strip() in text


def test_a_cpu_layer_and_a_tensor_elsewhere_cannot_be_combined():
    images = torch.ones(2, 3)
    images.to(META)
    assert images.device == torch.device("cpu")
    with pytest.raises(RuntimeError):
        nn.Linear(3, 2).to(META)(images)


def test_to_changes_a_module_in_place_and_keeps_its_parameters():
    net = nn.Linear(3, 2)
    before = [id(parameter) for parameter in net.parameters()]
    net.to(torch.float64)
    assert net.weight.dtype == torch.float64
    assert [id(parameter) for parameter in net.parameters()] == before


def test_a_prepared_loader_copies_without_waiting_only_if_configured():
    for options, non_blocking in (({}, False), ({"non_blocking": True}, True)):
        config = DataLoaderConfiguration(**options)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        assert accelerator.prepare(DataLoader([1, 2]))._non_blocking is non_blocking


def test_a_prepared_loader_moves_nested_dicts_lists_and_tuples():
    sample = {"image": torch.ones(2), "more": {"label": 3, "name": "shirt"}}
    sample |= {"list": [torch.ones(1)], "tuple": (1, 2.0)}
    loader = prepare_data_loader(DataLoader([sample] * 4, 2), device=META, put_on_device=True)
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        tensors = [batch["image"], batch["more"]["label"], *batch["list"], *batch["tuple"]]
        assert [tensor.device for tensor in tensors] == [META] * 5
        assert batch["more"]["name"] == ["shirt"] * 2


def outputs_of_wrappers() -> list:
    """Return what DDP's and Accelerate's wrappers return for a dict, and a mean over the ranks."""
    accelerator, batch = Accelerator(cpu=True), {"image": torch.ones(4, 3)}
    results = []
    for model in (DistributedDataParallel(Pair()), accelerator.prepare(Pair())):
        outputs = model(batch)
        results.append((type(model).__name__, type(outputs), [output.shape for output in outputs]))
    losses = torch.arange(3.0) + accelerator.process_index
    return [*results, accelerator.reduce(losses, "mean").tolist(), accelerator.num_processes]


def test_wrapped_models_return_tuples_and_reduce_averages_each_step(together):
    wrapped = ("DistributedDataParallel", tuple, [(4,), (4, 2)])
    for results in together(outputs_of_wrappers, 2):
        assert results == [wrapped, wrapped, [0.5, 1.5, 2.5], 2]


def test_item_and_tolist_need_neither_detach_nor_float():
    values = torch.tensor([1.5, 2.5], dtype=torch.bfloat16, requires_grad=True)
    assert (values[0].item(), values.tolist()) == (1.5, [1.5, 2.5])


def test_variable_with_requires_grad_cannot_be_deleted_without_a_replacement():
    torch.autograd.Variable(torch.ones(2), requires_grad=True).exp().sum().backward()
    torch.ones(2).requires_grad_().exp().sum().backward()
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        torch.ones(2).exp().sum().backward()


def test_variable_and_detach_make_a_new_leaf_whose_gradient_does_not_accumulate():
    def gradients_of(new_leaf) -> list[float]:
        images, gradients = torch.zeros(2), []
        for _ in range(3):
            x = new_leaf(images)
            assert x.is_leaf and x.data_ptr() == images.data_ptr()
            x.exp().sum().backward()
            gradients.append(x.grad[0].item())
        return gradients

    assert gradients_of(lambda t: torch.autograd.Variable(t, requires_grad=True)) == [1, 1, 1]
    assert gradients_of(lambda t: t.detach().requires_grad_()) == [1, 1, 1]
    assert gradients_of(lambda t: t.requires_grad_()) == [1, 2, 3]


def test_variable_of_a_result_cuts_the_graph_as_detach_does():
    for cut in (torch.autograd.Variable, torch.Tensor.detach, lambda output: output):
        net, head = nn.Linear(3, 2), nn.Linear(2, 1)
        head(cut(net(torch.ones(4, 3)))).sum().backward()
        assert head.weight.grad is not None
        assert (net.weight.grad is None) == (cut in (torch.autograd.Variable, torch.Tensor.detach))


def test_resize_warns_and_reshape_works_for_any_length_and_keeps_one_dimension():
    for count in (64, 32):
        labels = torch.arange(count)
        assert labels.reshape(-1, 1).reshape(-1).equal(labels)
        assert labels.reshape(-1).shape == labels.shape
    with pytest.warns(UserWarning, match="non-inplace resize is deprecated"):
        assert torch.zeros(64, 1).resize(64).shape == (64,)


def test_data_changes_a_gradient_detach_raises_and_numpy_shares_memory():
    output = output_of(PAGE, "python tutorials/92_shared_memory.py")
    data, detach, numpy = output.splitlines()
    assert data == "After y.data.zero_(), the gradient is [0.0, 0.0]"
    assert detach.endswith("has been modified by an inplace operation")
    assert numpy == "After optimizer.step(), saved is [0.5] and copied is [1.0]"


def test_force_detaches_and_copies_but_does_not_convert_bf16():
    weight = torch.ones(2, requires_grad=True)
    values = weight.numpy(force=True)
    with torch.no_grad():
        weight.mul_(3)
    assert values.tolist() == [3, 3] and weight.requires_grad
    with pytest.raises(NotImplementedError):  # the copy that .cpu() makes too
        torch.empty(2, device=META).numpy(force=True)
    with pytest.raises(TypeError, match="Got unsupported ScalarType BFloat16"):
        torch.ones(2, dtype=torch.bfloat16).numpy(force=True)


def test_longtensor_names_a_type_on_the_cpu():
    assert torch.LongTensor(2).device == torch.device("cpu")
    assert torch.empty(2, device=META).long().device == META


class Operations(TorchDispatchMode):
    """Record the names of the operations that run inside the context."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_pythons_sum_runs_an_operation_for_each_element():
    is_right = torch.tensor([True, False] * 32)
    with Operations() as one_by_one:
        by_python = sum(is_right)
    with Operations() as at_once:
        by_torch = is_right.sum()
    assert by_python.equal(by_torch) and by_torch.item() == 32
    assert one_by_one.names.count("add") == 64
    assert at_once.names == ["sum"]


def test_labels_with_a_second_dimension_give_one_number_for_each_prediction():
    pred, labels = torch.randint(10, (64,)), torch.randint(10, (64, 1))
    assert (pred == labels).shape == (64, 64)
    accuracy = sum(pred == labels) / len(labels)
    assert accuracy.tolist() == [(labels == one).sum().item() / 64 for one in pred]


def test_only_losses_with_a_graph_keep_nodes_and_saved_tensors():
    left = {"training": [], "evaluation": []}  # (graph nodes, saved bytes) for each way
    for loop, *_, nodes, size in table_rows(PAGE, cells=4):
        if loop in left:
            left[loop].append((int(nodes), int(size.replace(",", ""))))
    images = 100 * 64 * 784 * 4  # bytes of the input images of all steps
    assert round(images / 1e6) == 20
    assert left["training"] == [(700, 0), (800, 0), (0, 0), (0, 0)]
    assert left["evaluation"][2:] == [(0, 0)] * 2
    for nodes, size in left["evaluation"][:2]:
        assert nodes >= 700 and images < size and round(size / 1e6) == 24


def test_without_gradients_an_evaluation_loop_leaves_nothing(tmp_path):
    new = "with torch.set_grad_enabled(trains), saved_tensors_hooks("
    program = changed(KEPT, tmp_path, ("with saved_tensors_hooks(", new))
    left = [program.left_after_an_epoch(keep, trains=False) for keep in program.WAYS.values()]
    assert left == [(0, 0)] * 4


def test_a_kept_loss_takes_a_few_kilobytes_although_backward_has_run(start):
    program = """
import os, torch
from torch import nn

def memory():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

model, kept = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), []
for step in range(2500):
    if step == 500:  # the first steps also allocate what all steps share
        before = memory()
    loss = nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1]))
    loss.backward()
    model.zero_grad()
    kept.append(loss)
print((memory() - before) / 2000)
"""
    result = start(["python", "-c", program])
    assert result.returncode == 0, result.stderr
    assert 2_000 < float(result.stdout) < 12_000


def test_matplotlib_cannot_plot_a_tensor_that_requires_grad():
    loss = torch.ones(3, requires_grad=True)
    axes = plt.figure().subplots()
    with pytest.raises(RuntimeError, match="Can't call numpy\\(\\) on Tensor that requires grad"):
        axes.plot(loss)
    with pytest.raises(RuntimeError, match="Can't call numpy\\(\\) on Tensor that requires grad"):
        axes.plot([loss[0], loss[1]])
    axes.plot(loss.detach())
    plt.close("all")


def test_two_processes_draw_one_curve_of_half_as_many_steps(start, tmp_path):
    config = "accelerate_configs/cpu_two_processes.yaml"
    command = ["accelerate", "launch", "--config_file", config, "tutorials/92_loss_curve.py"]
    result = start([*command, "--plot", tmp_path / "loss.svg"])
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 3  # a heading, a rule, and one row although two processes ran
    assert [cell.strip() for cell in rows[2].split("|")[1:3]] == ["2", "94"]
    assert "training loss" in (tmp_path / "loss.svg").read_text()
