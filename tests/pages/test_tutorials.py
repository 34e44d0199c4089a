"""Test that the pages match the code and its output, and that exercises are graded correctly."""

import re
import runpy
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from tests.conftest import REPOSITORY
from tests.pages.pages import TUTORIALS, check, table_rows

EXERCISES = TUTORIALS / "exercises"
CONSTRAINTS = REPOSITORY / "constraints.txt"
ANCHOR = runpy.run_path(str(TUTORIALS / "course.py"))["anchor"]
PAGES = sorted(TUTORIALS.glob("*.md"))
OTHER_PAGES = ["README.md", "benchmarks/BENCHMARKS.md"]
# A false version of each kind of generated text: (page, text on the page, false text)
LIES = [
    ("10_where_am_i.md", "2 …` | 2 | 2 | ⚠ 1 |", "2 …` | 2 | 2 | 2 |"),
    ("10_where_am_i.md", "process 1 of 2", "process 0 of 2"),
    ("10_where_am_i.md", "device_count() < number_in", "device_count() <= number_in"),
    (
        "90_choosing_gpus.md",
        "my device cuda:1 is physical GPU 4",
        "my device cuda:1 is physical GPU 1",
    ),
    ("11_from_one_process_to_many.md", "| 2 | 6 |", "| 2 | 1 |"),
    ("11_from_one_process_to_many.md", "+    accelerator = Acc", "+    accelerator = acc"),
    (
        "24_data_parallel.md",
        "classifier |            2 |       2 |",
        "classifier |            1 |       1 |",
    ),
    ("25_dp_or_ddp.md", "36 of 36 byte counts", "35 of 36 byte counts"),
    (
        "25_dp_or_ddp.md",
        "|         2 |                64 |             2 |          256 |      0 |",
        "|         2 |                64 |             4 |          256 |      0 |",
    ),
    ("20_collectives.md", "100 200 300 | 3 30 300", "100 200 300 | 3 30 301"),
    ("21_ring.md", "     8 | 1.75 × S", "     8 | 2.75 × S"),
    ("21_ring.md", "wire.exchange(chunks[out], right", "wire.exchange(chunks[into], right"),
    (
        "22_ddp.md",
        "in reverse order from step 2 on             | equal       | equal ",
        "in reverse order from step 2 on             | equal       | different ",
    ),
    (
        "22_ddp.md",
        "Collectives within `optimizer.step()`: 0",
        "Collectives within `optimizer.step()`: 1",
    ),
    ("23_accumulation.md", "| 4 | 0 | 1 | 1 | the same |", "| 4 | 0 | 0 | 1 | the same |"),
    (
        "23_accumulation.md",
        "                accelerator.backward(loss)  # div",
        "                loss.backward()  # div",
    ),
    (
        "30_who_saw_which_sample.md",
        "|   4 | `gather`                                   |      30 |",
        "|   4 | `gather`                                   |      22 |",
    ),
    (
        "30_who_saw_which_sample.md",
        "rank 0 has more batches (2) than rank 2 (1).",
        "rank 0 has more batches (2) than rank 2 (2).",
    ),
    (
        "31_batch_and_learning_rate.md",
        "| 1 | 0.5 | 0 | 0 | 0 | 32 |",
        "| 1 | 0.75 | 0.5 | 0.25 | 0 | 64 |",
    ),
    (
        "31_batch_and_learning_rate.md",
        "        step_scheduler_with_optimizer=False,",
        "        step_scheduler_with_optimizer=True,",
    ),
    (
        "33_precision_and_compilation.md",
        "| `BF16`    | 108,690 weights | 217,380           |          2 |",
        "| `BF16`    | 108,690 weights | 434,760           |          4 |",
    ),
    (
        "33_precision_and_compilation.md",
        "| train, 20 images    |          2 |          3 |",
        "| train, 20 images    |          1 |          3 |",
    ),
    ("34_kill_and_resume.md", "54 of 54 | **equal** |", "54 of 54 | differ |"),
    ("34_kill_and_resume.md", "`random_states_2.pkl`, `sch", "`sch"),
    ("34_kill_and_resume.md", "+    state = TrainingState", "+    state = trainingState"),
    ("35_complete_or_absent.md", "bitwise equal in all 20", "bitwise equal in all 19"),
    ("35_complete_or_absent.md", "        flush(folder / name)", "        pass"),
    (
        "93_over_devices.md",
        "| yes         | 2 × rank's share   | full gradient ",
        "| yes         | full gradient      | full gradient ",
    ),
    ("42_when_it_does_not_fit.md", "The bubble is 1/5:", "The bubble is 1/10:"),
    (
        "42_when_it_does_not_fit.md",
        "|     217380 |    217380 |          434760 |",
        "|     217380 |    217380 |          217380 |",
    ),
    (
        "40_where_the_time_goes.md",
        "|            25 |           1 |                     0 |",
        "|            25 |           1 |                     1 |",
    ),
    (
        "40_where_the_time_goes.md",
        "| 2 ×              |       8 | 38% ",
        "| 2 ×              |       8 | 88% ",
    ),
    ("45_lost_machine.md", "| 1,024  | 2.06 days ", "| 1,024  | 6.02 days "),
    ("41_scaling.md", "| 2 × 64  | 5,146    |", "| 2 × 64  | 9,146    |"),
    ("README.md", "[10 Where am I?](10_where_am_i.md)", "00 Where am I? (planned)"),
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
    fresh = start(["python", "tutorials/page_tools.py", "--check"], timeout=900)
    assert fresh.returncode == 0, fresh.stdout
    for page in (*OTHER_PAGES, *(f"tutorials/{page.name}" for page in PAGES)):
        assert f"fresh    {page}\n" in fresh.stdout
    lies = start(["python", "tutorials/page_tools.py", "--check", *copies], timeout=900)
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
    ladders = [row[2:] for row in rows if len(row) == 4]
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
    rows = [row for row in table_rows("34_kill_and_resume.md") if len(row) == 3]
    assert [same for _, same, _ in rows] == [
        *["0 of 18"] * 3,
        *("19 of 19", "18 of 18", "18 of 18", "18 of 18"),
        *["0 of 54"] * 3,
        *("57 of 57", "54 of 54", "54 of 54", "54 of 54"),
        *("54 of 54", "0 of 54", "0 of 54", "57 of 57", "54 of 54", "54 of 54"),  # stateful
    ]
    weights = [weights for _, _, weights in rows]
    assert weights == [
        *["differ"] * 5,
        *["**equal**"] * 2,
        *["differ"] * 5,
        "differ in the last bits",  # one backward pass
        "differ",
        "**equal**",
        *["differ"] * 4,
        "differ in the last bits",
    ]


def test_a_name_that_a_page_finds_in_a_file_of_ours_is_there():
    cited = []
    for page in PAGES:
        text = " ".join(page.read_text().split())
        for name, file in re.findall(r"`(\w+)` in \[[\w.]+\]\(([\w./]+\.py)\)", text):
            assert name in (page.parent / file).read_text(), f"{page.name}: {name} in {file}"
            cited.append(name)
    assert len(cited) >= 4


def test_every_link_leads_to_a_file_or_a_heading():
    links = 0
    for page in [*PAGES, *REPOSITORY.glob("*.md"), *REPOSITORY.glob("[ab]*/**/*.md")]:
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


@pytest.mark.parametrize(
    "name", ["10_assert_distributed", "11_clip_gradients", "34_resume_exactly"]
)
def test_a_model_answer_passes(start, name):
    # Do not use tmp_path, because it would make the path of a Unix socket too long.
    with tempfile.TemporaryDirectory(prefix="a b ") as folder:
        result = check(start, name[:2], EXERCISES / "answers" / f"{name}.py", TMPDIR=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("right: ")


def test_an_unsolved_exercise_fails(start):
    result = check(start, "10")
    assert result.returncode == 1
    assert "with python alone, a function is not implemented yet" in result.stdout
    result = check(start, "11")
    assert result.returncode == 1
    assert "on 1 process, plain_step does not clip" in result.stdout
    result = check(start, "34")
    assert result.returncode == 1
    assert "on 1 process" in result.stdout
    assert "first batch of the first epoch: level 0" in result.stdout


@pytest.mark.parametrize("arguments", [["99"], ["00", "--file", "nowhere.py"], ["--hint"]])
def test_an_impossible_check_causes_a_one_line_error(start, arguments):
    result = start(["accel-demo", "check", *arguments])
    assert result.returncode == 2
    assert re.fullmatch("error: .*\n", result.stderr)
