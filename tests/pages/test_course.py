"""Test that the pages have the same parts, are short, and explain terms before they use them."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.pages.pages import TUTORIALS, headings_of, section

COURSE = runpy.run_path(str(TUTORIALS / "course.py"))
PAGES = COURSE["COURSE"]["pages"]
TEXTS = {name: (TUTORIALS / f"{name}.md").read_text() for name, _, _ in PAGES}
HEADINGS = [
    "What you will be able to do",
    "Predict",
    "Run",
    "See",
    "Why",
    "The change",
    "On GPUs",
    "Try this",
    "Common mistakes",
    "Next",
    "Answers",
]
MOST_WORDS = {"11": 2000, "12": 2000}  # other pages: 1600
QUESTIONS = COURSE["QUESTIONS"]
POINTS_OF_ARTICLES = [12, 17, 11, 10, 9]  # S0.1 to S0.12, S1.1 to S1.17, and so on
CORRECTIONS = 28


def own_words(text: str) -> str:
    """Return the text and the tables of a page without links and code, which may name later pages.

    The section "Next" is left out as well.
    """
    text = re.sub(r"^## Next$.*?^(?=## )", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"!?\[([^]]*)\]\([^)]*\)|`[^`]*`", "", text)


def test_every_page_is_in_the_course_and_has_its_title():
    files = {path.stem for path in TUTORIALS.glob("[0-9]*.md")}
    assert files == set(TEXTS)
    for name, title, _ in PAGES:
        assert TEXTS[name].startswith(f"# {name[:2]} · {title}\n")


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_has_the_parts_of_every_page_in_order(name):
    headings = re.findall(r"^## (.*)$", TEXTS[name], flags=re.MULTILINE)
    assert [heading for heading in headings if heading in HEADINGS] == HEADINGS
    parts = re.split(r"^## .*$", TEXTS[name], flags=re.MULTILINE)[1:]
    assert all(len(part.split()) >= 10 for part in parts)


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_has_an_exercise_and_questions_whose_answers_are_hidden_until_one_opens_them(name):
    """Only an exercise that `accel-demo check` grades is required."""
    questions = re.search(r"^## Try this\n(.*?)^## ", TEXTS[name], re.DOTALL | re.MULTILINE)
    is_graded = (TUTORIALS / f"exercises/graders/{name[:2]}.py").exists()
    assert not is_graded or questions[1].startswith("\n**Exercise.** ")
    assert (f"`accel-demo check {name[:2]}`" in questions[1]) == is_graded
    numbers = re.findall(r"^(\d)\. ", questions[1], re.MULTILINE)
    assert len(numbers) >= 2
    answers = TEXTS[name].split("\n## Answers\n")[1]
    hidden = r"\n<details>\n<summary>Answer (\d)</summary>\n\n(.+?)\n\n</details>\n"
    assert [number for number, _ in re.findall(hidden, answers, re.DOTALL)] == numbers
    assert re.sub(hidden, "", answers, flags=re.DOTALL) == ""


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_has_at_most_1600_words_of_prose_or_2000_if_it_converts_a_script(name):
    assert len(COURSE["prose_of"](TEXTS[name]).split()) <= MOST_WORDS.get(name[:2], 1600)


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_uses_a_term_only_if_it_or_an_earlier_page_explains_it(name):
    """A reader of the main path has not read the other pages."""
    number, path = int(name[:2]), COURSE["COURSE"]["path"]
    unknown = [
        term
        for term, page, _ in COURSE["COURSE"]["terms"]
        if page > number or (number in path and page not in path)
    ]
    prose = own_words(TEXTS[name])
    used = [
        term for term in unknown if re.search(rf"\b{re.escape(term)}s?\b", prose, re.IGNORECASE)
    ]
    assert used == []


@pytest.mark.parametrize(("term", "page"), [row[:2] for row in COURSE["COURSE"]["terms"]])
def test_the_page_of_a_term_explains_it(term, page):
    """A page writes a term in italics or bold where it explains it."""
    (text,) = [text for name, text in TEXTS.items() if name.startswith(f"{page}_")]
    assert re.search(rf"\*{re.escape(term)}(e?s)?\*", text, re.IGNORECASE)


def test_no_old_page_number_is_left():
    old = re.compile(
        r"(tutorials/|\]\(|exercises/|answers/)(0\d|1[4-9])_|\bpages?\s+(0\d|1[4-9])\b"
    )
    command = ["git", "ls-files"]
    files = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    paths = [REPOSITORY / file for file in files.stdout.splitlines()]
    texts = [path for path in paths if path.suffix in (".py", ".md", ".yaml", ".toml", ".txt")]
    assert len(texts) > 200
    for path in texts:
        assert path == Path(__file__) or not old.search(path.read_text()), path


@pytest.mark.parametrize("name", TEXTS)
def test_the_number_in_a_link_is_that_of_its_page(name):
    links = re.findall(r"\[(?:page\s+)?(\d\d)\b[^]]*\]\((\d\d)_[^)]*\)", TEXTS[name])
    assert links and all(number == target for number, target in links)


def test_the_index_has_each_point_each_correction_and_each_question_of_a_page_once():
    points = [
        f"S{article}.{point}"
        for article, last in enumerate(POINTS_OF_ARTICLES)
        for point in range(1, last + 1)
    ]
    corrections = [f"C{number}" for number in range(1, CORRECTIONS + 1)]
    forums = [row for row in QUESTIONS if row["id"].startswith("Q")]
    pages = [row["page"] for row in forums]
    of_pages = [f"Q{page}.{pages[: n + 1].count(page)}" for n, page in enumerate(pages)]
    assert [row["id"] for row in QUESTIONS] == points + corrections + of_pages
    assert pages == sorted(pages)


@pytest.mark.parametrize("name", TEXTS)
def test_the_index_has_at_least_two_questions_that_a_page_answers(name):
    assert len([row for row in QUESTIONS if str(row["page"]) == name[:2]]) >= 2


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row["id"])
def test_a_question_is_in_both_languages_and_leads_to_a_heading(row):
    assert row["en"].endswith("?") and row["en"].isascii()
    assert row["zh"].endswith("？") and re.search(r"[\u4e00-\u9fff]", row["zh"])
    [text] = [text for name, text in TEXTS.items() if name.startswith(f"{row['page']}_")]
    assert headings_of(text).count(row["heading"]) == 1


@pytest.mark.parametrize("row", QUESTIONS, ids=lambda row: row["id"])
def test_the_section_that_a_question_leads_to_contains_the_answer(row):
    [text] = [text for name, text in TEXTS.items() if name.startswith(f"{row['page']}_")]
    visible = re.sub(r"<!--.*?-->", "", section(text, row["heading"]), flags=re.DOTALL)
    assert row["says"] in " ".join(visible.split())


def test_every_term_has_a_chinese_name_and_meaning():
    terms = [term for term, *_ in COURSE["COURSE"]["terms"]]
    assert sorted(COURSE["COURSE"]["chinese"]) == sorted(terms)
    for name, meaning in COURSE["COURSE"]["chinese"].values():
        assert re.search(r"[\u4e00-\u9fff]", name) and meaning.endswith("。")
