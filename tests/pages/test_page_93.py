"""Page 93: methods that compute the kernel distance, and the exercise on its gradient."""

import re

import torch
from kernel_distance.methods import over_devices, predicted_graph_bytes

from tests.pages.pages import TUTORIALS, load_module, output_of, table_rows, transcript

PAGE = TUTORIALS / "93_over_devices.md"
ANSWER = TUTORIALS / "exercises" / "answers" / "93_gather_with_gradient.py"


def cells(first: str) -> list[str]:
    """Find the row that starts with `first` and "yes" or "no". Return the cells after `first`."""
    rows = [row for row in table_rows(PAGE.name) if len(row) > 1]
    [found] = [row[1:] for row in rows if row[0] == first and row[1] in ("yes", "no")]
    return found


def test_all_methods_agree_and_graphs_of_all_pairs_grow_with_the_number_of_kernels():
    for way in ("double loop", "vectorized", "over devices"):
        equal, *kept, large = cells(way)
        assert equal == "yes" and [round(float(size)) for size in kept] == [8, 16, 32]
        assert large == "4,833 MB"
    assert cells("over ranks") == ["yes", "4.0", "8.0", "16.1", "2,416 MB"]
    for way in ("chunked", "over ranks, chunked"):
        assert cells(way) == ["yes", "0.0", "0.0", "0.0", "0 MB"]
    assert cells("torch.cdist") == ["yes", "0.0", "0.1", "0.1", "1 MB"]
    assert cells("closed form") == ["yes", "1.0", "1.0", "1.0", "9 MB"]


def test_signed_differences_add_up_to_a_rounding_error_without_a_gradient():
    output = output_of(PAGE.name, "python tutorials/93_signed.py")
    assert output == "distance: 6e-08, gradient: [0.0, 0.0, 0.0]\n"
    assert "(6e-08 is a rounding error)" in PAGE.read_text()


def test_three_methods_with_equal_values_have_different_gradients():
    assert cells("`dist.all_reduce`") == ["yes", "rank's share", "full gradient / 2"]
    aware = "`_functional_collectives.all_reduce`"
    assert cells(aware) == ["yes", "2 × rank's share", "full gradient"]
    assert cells("`over_ranks`") == ["yes", "full gradient", "full gradient"]


def test_the_prediction_and_the_answers_match_the_tables():
    text = " ".join(PAGE.read_text().split())
    *multiples, megabytes = cells("double loop")[1:]
    assert f"With a double loop, the layer from the prediction needs {megabytes}." in text
    options = dict(re.findall(r"^- \((\w)\) (.*)$", PAGE.read_text(), re.MULTILINE))
    [right] = re.findall(r"\*\*Your prediction\*\*: \((\w)\)", text)
    assert options[right] == "Half of it"
    assert cells("`dist.all_reduce`") == ["yes", "rank's share", "full gradient / 2"]
    quarters = ", ".join(f"{float(multiple) / 4:.1f}" for multiple in multiples)
    four = predicted_graph_bytes("over ranks", (512, 512, 3, 3), 4)
    assert f"{quarters} and {four / 1e6:,.0f} MB" in text
    large, small = (
        predicted_graph_bytes("double loop", shape, 1) for shape in ((64, 64, 3, 3), (32, 32, 3, 3))
    )
    assert f"About {round(large / small)} times: 4 times" in text


def test_the_first_call_on_the_page_changes_the_gradient_of_the_weight(monkeypatch):
    program, said = load_module(TUTORIALS / "93_over_devices.py"), []
    for is_cut in (True, False):
        monkeypatch.setattr(program, "over_devices", cut(over_devices) if is_cut else over_devices)
        said.append(program.use_in_a_loss(torch.device("cpu")))
    about = "net.conv.weight.grad with and without the distance:"
    assert said == [f"{about} equal", f"{about} different"]
    lines = PAGE.read_text().splitlines()
    assert said[1] in lines
    first_code = lines[lines.index("```python") + 1 :]
    code = first_code[: first_code.index("```")]
    assert code[0].endswith("methods import over_devices") and "over_devices(net.c" in code[3]
    device, names = torch.device("cpu"), {"Net": program.Net, "torch": torch}
    exec("\n".join(code), names | {"device": device})


GRADIENTS = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from accel_demo.processes.group import run_in_group

def main(device):
    for is_wrapped in (True, False):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False, device=device))
        numbers = torch.full((1, 1), 2.0 * dist.get_rank(), device=device)
        (model if is_wrapped else model.module)(numbers).sum().backward()
        gradients = [None] * dist.get_world_size()
        dist.all_gather_object(gradients, model.module.weight.grad.item())
        if dist.get_rank() == 0:
            print(gradients)

if __name__ == "__main__":
    run_in_group(main, 2)
"""


def test_a_call_of_the_module_inside_ddp_skips_the_all_reduce(start, tmp_path):
    (tmp_path / "gradients.py").write_text(GRADIENTS)
    result = start(["python", tmp_path / "gradients.py"])
    assert result.stdout.splitlines()[-2:] == ["[1.0, 1.0]", "[0.0, 2.0]"], result.stderr


def cut(method):
    """Return a method with the same value, but without a gradient."""
    return lambda weight: method(weight).detach()


def test_the_recorded_table_is_on_the_page_and_supports_its_claims():
    [(command, output)] = transcript("kernel_distance").items()
    assert command == "python tutorials/kernel_distance"
    lines = output.splitlines()
    start, end = (lines.index(line) for line in lines if line.startswith("512 ×"))
    assert "\n".join(lines[start:end]).strip() in PAGE.read_text()
    seconds_and_megabytes = {}
    for line in lines:
        if line.startswith(("128 ×", "512 ×")):
            table = seconds_and_megabytes[line[:3], re.search(r"p=(\d)", line)[1]] = {}
        row = [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        if len(row) == 4 and row[1] not in ("", "seconds") and not set(row[1]) <= {"-"}:
            way = line.strip("|").split("|")[0].strip()
            table[way] = float(row[1]), float(row[2])
            assert float(row[3]) < 1e-4
    rows = {layer: len(table) for layer, table in seconds_and_megabytes.items()}
    assert rows == {("128", "1"): 8, ("128", "2"): 7, ("512", "1"): 4, ("512", "2"): 3}
    large = seconds_and_megabytes["512", "1"]
    assert "double loop" not in large and "vectorized" not in large
    seconds, megabytes = large["closed form"]
    assert seconds < 1 and megabytes < 10 * 9.4  # the weight has 9.4 MB
    assert seconds == min(time for time, _ in large.values())
    assert large["torch.cdist"][1] == min(peak for _, peak in large.values())
    assert f"The peak is still {large['chunked'][1]:.0f} MB" in PAGE.read_text()
    small = seconds_and_megabytes["128", "1"]
    ways = ("vectorized", "over ranks", "chunked", "closed form")
    peaks = [small[way][1] for way in ways]
    assert peaks == sorted(peaks, reverse=True)


def test_the_default_of_cdist_is_wrong_for_euclidean_distances_of_nearly_equal_kernels():
    """The right sums are those of float64."""
    torch.manual_seed(0)
    kernels = torch.randn(1, 576) + 1e-4 * torch.randn(64, 576)
    exact = torch.cdist(kernels.double(), kernels.double()).sum().item()
    argument = 'compute_mode="donot_use_mm_for_euclid_dist"'
    assert argument in PAGE.read_text()
    slow = torch.cdist(kernels, kernels, compute_mode="donot_use_mm_for_euclid_dist")
    assert abs(slow.sum().item() / exact - 1) < 1e-3
    assert abs(torch.cdist(kernels, kernels).sum().item() / exact - 1) > 0.1
