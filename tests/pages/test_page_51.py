"""Page 51: its checks pass, each one finds a fault, and no pitfall is missing from the gallery."""

import re

import numpy
import pytest
import torch
from PIL import Image

from accel_demo.lab.explain.catalog import pitfalls, symptoms
from tests.conftest import run_ranks
from tests.pages.pages import TUTORIALS, load_module, rows_below

CHECKS = TUTORIALS / "checks.py"


def test_each_fault_is_found_by_the_check_of_its_number():
    rows = rows_below(TUTORIALS / "51_when_it_lies.md", "what is wrong")
    checks = re.findall(r'^    """(\d+\. .*)"""$', CHECKS.read_text(), re.MULTILINE)
    found = [check for _, check, _ in rows]
    assert len(checks) == 12 and list(dict.fromkeys(found)) == checks and len(found) == 14


@pytest.mark.parametrize("name", ["51_ddp.py", "51_accelerate.py"])
def test_the_right_programs_call_and_pass_all_checks(name):
    calls = re.findall(r"^ +checks\.(\w+)\(", (TUTORIALS / name).read_text(), re.MULTILINE)
    numbered = re.findall(r'def (\w+)\(.*\):\n    """\d+\. ', CHECKS.read_text())
    assert set(calls) == set(numbered)
    result = run_ranks([TUTORIALS / name], 2)
    assert result.stdout == "2 processes: all twelve checks passed\n", result.stderr


def test_the_content_of_a_sample_has_all_of_its_bytes():
    checks = load_module(CHECKS)
    large = numpy.zeros((64, 64))
    other = large.copy()
    other[30, 30] = 1
    pairs = [
        (large, other),
        (torch.tensor(0.12341), torch.tensor(0.12343)),
        ({"image": torch.zeros(2000), "name": "a"}, {"image": torch.zeros(2000), "name": "b"}),
        (Image.fromarray(large), Image.fromarray(other)),
        ((1, "a"), (1, "b")),
    ]
    for one, other in pairs:
        assert checks.content(one) == checks.content(one) != checks.content(other)


def test_the_gallery_has_each_pitfall_below_its_symptom():
    page = (TUTORIALS / "51_when_it_lies.md").read_text()
    text = (TUTORIALS / "pitfalls/README.md").read_text()
    for symptom, heading in symptoms().items():
        assert f"- [{heading}](pitfalls/README.md#" in page
        below = text.split(f"## {heading}\n")[1].split("\n## ")[0]
        names = set(re.findall(r"\((\w+)_broken\.py", below))
        assert names == {each["name"] for each in pitfalls() if each["symptom"] == symptom}
