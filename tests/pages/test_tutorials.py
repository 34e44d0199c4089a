"""Test that the pages match the code and its output, and that exercises are graded correctly."""

import ast
import re
import runpy
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from tests.conftest import REPOSITORY
from tests.pages.pages import TUTORIALS, table_rows

EXERCISES = TUTORIALS / "exercises"
CONSTRAINTS = REPOSITORY / "constraints.txt"
ANCHOR = runpy.run_path(str(TUTORIALS / "course.py"))["anchor"]
PAGES = sorted(TUTORIALS.glob("*.md"))
OTHER_PAGES = ["README.md", "benchmarks/BENCHMARKS.md"]
LIES = [  # (page, text on the page, false text)
    (page, *lie)
    for page, lies in yaml.safe_load(Path(__file__).with_name("lies.yaml").read_text()).items()
    for lie in lies
]


@pytest.mark.pages
@pytest.mark.timeout(1000)  # runs every program whose result is not stored
def test_no_page_is_stale_and_a_page_with_a_false_text_is_stale(start, tmp_path):
    copies = []
    for number, (page, truth, lie) in enumerate(LIES):
        text = (TUTORIALS / page).read_text()
        assert truth in text
        copies.append(tmp_path / f"lie-{number}.md")
        copies[-1].write_text(text.replace(truth, lie, 1))
    check = ["python", "tutorials/page_tools.py", "--check"]
    # As from a shell, so that a result that such a check has stored is not computed again.
    fresh = start(check, timeout=900, real=True, COLUMNS=None)
    assert fresh.returncode == 0, fresh.stdout
    chinese = [f"tutorials/zh/{page.name}" for page in TUTORIALS.glob("zh/*.md")]
    for page in (*OTHER_PAGES, *chinese, *(f"tutorials/{page.name}" for page in PAGES)):
        assert f"fresh    {page}\n" in fresh.stdout
    lies = start([*check, *copies], timeout=900, real=True, COLUMNS=None)
    assert lies.returncode == 1
    *_, last = lies.stdout.splitlines()
    assert last.split() == ["stale:", *sorted(map(str, copies))], lies.stdout


def test_page_11_shows_four_equal_runs_on_one_process_and_two_on_two():
    rows = table_rows("11_from_one_process_to_many.md", cells=4)
    rows = [row for row in rows if "accel_demo/" in row[1]]
    assert [(processes, twins) for _, _, processes, twins in rows] == [
        ("1", "2, 3, 4"),
        ("1", "1, 3, 4"),
        ("1", "1, 2, 4"),
        ("1", "1, 2, 3"),
        ("2", "6"),
        ("2", "5"),
    ]


def test_page_34_resumes_with_the_same_weights_only_at_the_highest_levels():
    rows = table_rows("34_kill_and_resume.md")
    ladders = [row[2:] for row in rows if len(row) == 4 and " of " in row[2]]
    assert ladders == [
        *[["0 of 19", "differ"]] * 3,
        ["19 of 19", "differ"],
        ["18 of 18", "differ"],
        *[["18 of 18", "**equal**"]] * 2,  # level 6 only affects sums over ranks
        *[["0 of 57", "differ"]] * 3,
        ["57 of 57", "differ"],
        ["54 of 54", "differ"],
        ["54 of 54", "differ in the last bits"],
        ["54 of 54", "**equal**"],
    ]


def test_page_34_shows_that_three_processes_need_every_level():
    rows = [row for row in table_rows("34_kill_and_resume.md", cells=3) if " of " in row[1]]
    assert [same for _, same, _ in rows] == [
        *["0 of 18"] * 3,
        *("19 of 19", "18 of 18", "18 of 18", "18 of 18"),
        *["0 of 54"] * 3,
        *("57 of 57", "54 of 54", "54 of 54", "54 of 54"),
    ]
    weights = [weights for _, _, weights in rows]
    assert weights == [
        *["differ"] * 5,
        *["**equal**"] * 2,
        *["differ"] * 5,
        "differ in the last bits",  # one backward pass
        "differ",
    ]


def test_a_name_that_a_page_finds_in_a_file_of_ours_is_there():
    cited = []
    for page in PAGES:
        text = " ".join(page.read_text().split())
        for name, file in re.findall(r"`(\w+)` in \[[\w.]+\]\(([\w./]+\.py)\)", text):
            assert name in (page.parent / file).read_text(), f"{page.name}: {name} in {file}"
            cited.append(name)
    assert len(cited) >= 3


def test_every_link_leads_to_a_file_or_a_heading():
    links = 0
    for page in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("[abt]*/**/*.md")]:
        for target in re.findall(r"\]\(([^)]+)\)", without_code(page)):
            if "{" in target or "://" in target:  # a placeholder in cog code, or a web link
                continue
            path, _, heading = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name}: {target}"
            if heading:
                titles = re.findall("^#+ (.*)", without_code(linked), re.MULTILINE)
                assert heading in map(ANCHOR, titles), f"{page.name}: {target}"
            links += 1
    assert links > 200


IN_A_LIBRARY = r"`([\w.]+)` \(?in `((torch|torchvision|accelerate)/[\w/]+\.py)`"
CITED = {
    (page.name, *match)
    for page in PAGES
    for match in re.findall(IN_A_LIBRARY, " ".join(page.read_text().split()))
}

assert CITED, "no page cites a library, so the next test would test nothing"


@pytest.mark.parametrize(("page", "name", "file", "package"), sorted(CITED))
def test_a_name_that_a_page_finds_in_a_file_of_a_library_is_there(page, name, file, package):
    [tested] = re.findall(rf"^{package}==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if Version(version(package)) < Version(tested):
        pytest.skip(f"the pages are about {package} {tested}, but {version(package)} is older")
    source = (Path(find_spec(package).origin).parent.parent / file).read_text()
    for part in name.split("."):
        assert re.search(rf"\b{part}\b", source), f"{page}: {file} does not contain {part}"


def without_code(page):
    """Return the text of a page without its blocks of code and output."""
    return re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_that_a_reader_copies_from_a_page_has_no_syntax_errors(page):
    """A block that a program has written into the page may be a part of a function."""
    own = re.sub(r"\]\]\] -->.*?<!-- \[\[\[end", "", page.read_text(), flags=re.DOTALL)
    for block in re.findall(r"^```python\n(.*?)^```$", own, re.DOTALL | re.MULTILINE):
        ast.parse(block)


@pytest.mark.parametrize("arguments", [["99"], ["00", "--file", "nowhere.py"], ["--hint"]])
def test_an_impossible_check_causes_a_one_line_error(start, arguments):
    result = start(["accel-demo", "check", *arguments])
    assert result.returncode == 2
    assert re.fullmatch("error: .*\n", result.stderr)
