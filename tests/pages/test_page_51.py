"""Page 51: each of its checks fails in a training that is wrong at this point, and only there."""

import re

import pytest

from accel_demo.lab.explain.catalog import pitfalls, symptoms
from tests.conftest import run_ranks
from tests.pages.pages import TUTORIALS

CHECKS = TUTORIALS / "51_checks.py"
FAULTS = {  # number of the check: the text of the program, the wrong text
    1: ('("gloo")', '("gloo", rank=0, world_size=1, store=dist.HashStore())'),
    2: (
        "model = DistributedDataParallel(",
        "torch.manual_seed(rank)\n    model = nn.Sequential(",
    ),
    3: ("    torch.manual_seed(rank)\n", ""),
    4: ("GLOBAL_BATCH_SIZE // world_size", "GLOBAL_BATCH_SIZE"),
    5: ("mse_loss(model(inputs)", "mse_loss(model.module(inputs)"),
    6: ("        # 6. ", "        model.module[0].bias.data += rank\n\n        # 6. "),
    7: ("sampler=sampler", "shuffle=False"),
    8: ("        sampler.set_epoch(epoch)\n", ""),
    9: ("EPOCHS * len(train_loader)", "EPOCHS * len(train_loader) * world_size"),
    10: ("range(rank, SAMPLES, world_size)", "range(SAMPLES)"),
    11: ("score = sum(error", "score = rank + sum(error"),
}


@pytest.mark.parametrize("number", FAULTS)
def test_the_check_of_a_fault_fails_first(number, tmp_path):
    text, (right, wrong) = CHECKS.read_text(), FAULTS[number]
    assert text.count(right) == 1
    script = tmp_path / "checks.py"
    script.write_text(text.replace(right, wrong))
    result = run_ranks([script], 2)
    assert result.returncode == 1
    places = re.findall(r'checks.py", line (\d+), in main\n.* assert', result.stderr)
    lines = script.read_text().splitlines()
    assert places, result.stderr
    for place in places:
        above = [line for line in lines[: int(place)] if re.match(r" +# \d+\. ", line)]
        assert above[-1].split()[1] == f"{number}."


def test_the_right_program_passes_all_checks():
    result = run_ranks([CHECKS], 2)
    assert result.stdout == "2 processes: all eleven checks passed\n", result.stderr


def test_the_page_has_each_pitfall_below_its_symptom():
    text = (TUTORIALS / "51_when_it_lies.md").read_text()
    for symptom, heading in symptoms().items():
        below = text.split(f"### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
        names = set(re.findall(r"pitfalls/(\w+)_broken\.py", below))
        assert names == {each["name"] for each in pitfalls() if each["symptom"] == symptom}
