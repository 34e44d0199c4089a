"""Page 51: its checks pass, each one finds a fault, and no pitfall is missing from the gallery."""

import re

from accel_demo.lab.explain.catalog import pitfalls, symptoms
from tests.conftest import run_ranks
from tests.pages.pages import TUTORIALS, rows_below

CHECKS = TUTORIALS / "51_checks.py"


def test_each_fault_is_found_by_the_check_of_its_number():
    rows = rows_below(TUTORIALS / "51_when_it_lies.md", "what is wrong")
    checks = re.findall(r"^ +# (\d+\. .*)", CHECKS.read_text(), re.MULTILINE)
    found = [check for _, check, _ in rows]
    assert len(checks) == 11 and list(dict.fromkeys(found)) == checks and len(found) == 12


def test_the_right_program_passes_all_checks():
    result = run_ranks([CHECKS], 2)
    assert result.stdout == "2 processes: all eleven checks passed\n", result.stderr


def test_the_page_has_each_pitfall_below_its_symptom():
    text = (TUTORIALS / "51_when_it_lies.md").read_text()
    for symptom, heading in symptoms().items():
        below = text.split(f"### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
        names = set(re.findall(r"pitfalls/(\w+)_broken\.py", below))
        assert names == {each["name"] for each in pitfalls() if each["symptom"] == symptom}
