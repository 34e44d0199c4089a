"""Test the index of messages and symptoms, and that a search finds what the pages quote."""

import os
import re
import runpy
import sys
import tempfile
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_demo.lab.explain.catalog import pitfalls, places_of
from tests.conftest import REPOSITORY, run_to_end
from tests.pages.pages import TUTORIALS, headings_of, section

TEXTS = {path.name: path.read_text() for path in sorted(TUTORIALS.glob("*.md"))}
TEXTS["../README.md"] = (REPOSITORY / "README.md").read_text()
COURSE = runpy.run_path(str(TUTORIALS / "course.py"))
INDEX = COURSE["INDEX"]
MESSAGES, SYMPTOMS = INDEX["messages"], INDEX["symptoms"]
WITH_CODE = [row for row in MESSAGES + INDEX["elsewhere"] if "code" in row]
IN_LIBRARY = [row for row in MESSAGES + INDEX["elsewhere"] if "library" in row]
PACKAGES = Path(torch.__file__).parent.parent
COMMENT = r"<!--.*?-->"
FENCE = r"^ *(`{3,}).*?^ *\1 *$"
INLINE_CODE = r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)"


def prose(text: str) -> str:
    """Return a page without its comments and its blocks of code and output."""
    return re.sub(rf"{COMMENT}|{FENCE}", "\n", text, flags=re.DOTALL | re.MULTILINE)


def broken(text: str) -> list[str]:
    """Return the inline code and the quotations that begin and end on different lines."""
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d\.) )", prose(text))
    found = []
    for paragraph in paragraphs:
        code = [match[0] for match in re.finditer(INLINE_CODE, paragraph, re.DOTALL)]
        words = re.sub(INLINE_CODE, "``", paragraph, flags=re.DOTALL)
        found += [part for part in code + re.findall(r'"[^"]*"', words) if "\n" in part]
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_inline_code_and_quotations_are_on_one_line(name):
    assert broken(TEXTS[name]) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- It stops with `Expected to\n  have finished reduction`.", 1),
        ("You get ``a model with `device_map='auto'`\nin any mode``.", 1),
        ('PyTorch warns: "an autograd\nkernel was not registered".', 1),
        ('It says "address\nalready in use" and "Connection\nrefused".', 2),
        ('- *"I wrap it."* No: `no\n  attribute`.', 1),
        ('- *"I call `model.module`."* No.\n- **"Not shuffled."** No.', 0),
        ('- *"It stops with `no\n  attribute`."*', 1),
        ('`a` "b\n\n- `c`\n- d" `e`', 0),
        ("```text\nlines of `an\noutput`\n```\n<!-- `a\nb` -->", 0),
        ("1. Run\n   ```bash\n   python a.py\n   ```\n   and `b`.", 0),
    ],
)
def test_a_message_that_is_broken_over_two_lines_is_found(text, found):
    assert len(broken(text)) == found


def test_a_message_of_the_index_is_nowhere_broken_over_two_lines():
    for name, text in TEXTS.items():
        on_lines = re.sub(r"[^\S\n]+", " ", text)
        for row in MESSAGES:
            pattern = ".*?".join(map(re.escape, row["message"].split("…")))
            anywhere = re.findall(pattern.replace(r"\ ", r"\s+"), text)
            assert len(anywhere) == len(re.findall(pattern, on_lines)), f"{name}: {anywhere}"


@pytest.mark.parametrize("name", TEXTS)
def test_an_error_that_a_page_quotes_is_in_the_index(name):
    """An error in inline code begins with its name, such as `ValueError: `."""
    code = [match[0].strip("` ") for match in re.finditer(INLINE_CODE, prose(TEXTS[name]))]
    errors = [text for text in code if re.match(r"[\w. ]*([Ee]rror|Exception): ", text)]
    known = [row["message"] for row in [*MESSAGES, *pitfalls()] if "message" in row]
    assert [text for text in errors if not any(contains(text, m) for m in known)] == []


def test_the_index_has_many_messages_and_each_one_once():
    messages = [row["message"] for row in MESSAGES]
    assert len(messages) >= 45
    messages += [row["message"] for row in INDEX["elsewhere"]]
    assert len(messages) == len(set(messages))
    assert len(SYMPTOMS) == len({row["symptom"] for row in SYMPTOMS}) >= 20


def page_of(row: dict) -> str:
    [text] = [text for name, text in TEXTS.items() if name.startswith(f"{row['page']}_")]
    return text


def outputs(text: str) -> str:
    """Return the parts of a page that cog has written, without blocks of code."""
    written = "\n".join(re.findall(rf"{COMMENT}\n(.*?)<!-- \[\[\[end\]\]\] -->", text, re.DOTALL))
    blocks = r"^```(python|yaml|bash)\n.*?^```$"
    return re.sub(blocks, "", written, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("row", [*MESSAGES, *SYMPTOMS], ids=lambda row: [*row.values()][0])
def test_a_row_of_the_index_leads_to_a_heading_of_a_page(row):
    assert headings_of(page_of(row)).count(row["heading"]) == 1


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row["message"])
def test_a_message_is_below_its_heading_or_in_an_output_of_the_page(row):
    text = page_of(row)
    is_quoted = "code" in row or "library" in row
    places = outputs(text) + (section(text, row["heading"]) if is_quoted else "")
    assert contains(places, row["message"])


def contains(text: str, message: str) -> bool:
    return any(places_of(message, text))


@cache
def printed_by(program: str) -> str:
    """Run the code of a row. Return what it has printed to stderr, with its error."""
    stderr, environment = os.dup(2), dict(os.environ)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            exec(program, {"os": os, "torch": torch, "dist": dist, "nn": nn})
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(environment)
        file.seek(0)
        return file.read()


def printed_alone(folder: Path) -> None:
    """Run the programs that are not connected, or that make a group of one process."""
    for number, row in enumerate(WITH_CODE):
        if "processes" not in row:
            (folder / f"{number}.txt").write_text(printed_by(row["code"]))
            if dist.is_initialized():
                dist.destroy_process_group()


def printed_together() -> tuple[int, dict[int, str]]:
    rows = {number: row for number, row in enumerate(WITH_CODE) if "processes" in row}
    return dist.get_world_size(), {n: printed_by(row["code"]) for n, row in rows.items()}


@pytest.fixture(scope="module")
def printed(together, tmp_path_factory) -> dict[int, str]:
    """Return what each program of the index prints, on all ranks."""
    assert {row.get("processes", 2) for row in WITH_CODE} == {2}
    folder = tmp_path_factory.mktemp("messages")
    code = "import sys, tests.pages.test_message_index as t; t.printed_alone(t.Path(sys.argv[1]))"
    result = run_to_end(["python", "-c", code, folder])
    assert result.returncode == 0, result.stderr
    texts = {int(file.stem): file.read_text() for file in folder.glob("*.txt")}
    (size, first), (_, second) = together(printed_together, 2)
    assert size == 2
    return texts | {number: first[number] + second[number] for number in first}


@pytest.mark.parametrize("number", range(len(WITH_CODE)), ids=lambda n: WITH_CODE[n]["message"])
def test_the_program_of_a_message_prints_it(printed, number):
    assert contains(printed[number], WITH_CODE[number]["message"]), printed[number]


def test_a_message_that_differs_in_a_word_is_not_accepted():
    text = "ValueError: Tried to step 5 times. The specified number of total steps is 4"
    assert contains(text, "Tried to step … times. The specified number of total steps is …")
    assert not contains(text, "RuntimeError: Tried to step … times.")
    assert not contains(text, "Tried to step … times. The specified number of steps is …")


@pytest.mark.parametrize("row", IN_LIBRARY, ids=lambda row: row["message"])
def test_the_library_of_a_message_contains_it(row):
    files = [*PACKAGES.glob(row["library"])]
    if not files and not torch.backends.cuda.is_built():
        pytest.skip("this PyTorch has no CUDA library")
    [file] = files
    message = COURSE["without_error"](row["message"])
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
        is_source = file.suffix == ".py"  # here, a string may be on several lines
        text = re.sub(rb'"\s*\n\s*f?"', b"", content[:]) if is_source else content
        assert all(text.find(part.encode()) >= 0 for part in message.split("…"))
