"""Test that each Chinese page shows what its English page shows, and says no less."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.pages import TUTORIALS

TOOLS = runpy.run_path(str(TUTORIALS / "translation.py"))
COURSE = runpy.run_path(str(TUTORIALS / "course.py"))
PAGES = TOOLS["translated_pages"]()
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)]+)\)")
PAGE_NUMBER = re.compile(r"\[(?:第 |page\s+)?(\d\d)\b[^\]]*\]\(([^)#]+)")  # in a link
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ENGLISH = [*sorted(TUTORIALS.glob("[0-9]*.md")), *sorted(TUTORIALS.glob("exercises/*.py"))]
QUOTABLE = "\n".join(path.read_text() for path in ENGLISH)
COG = [sys.executable, "-m", "cogapp", "-P", "-I", "tutorials", "--verbosity=0"]
CHINESE = "[\u4e00-\u9fff]"


def both(page):
    """Return the texts of the English and of the Chinese page."""
    return (TUTORIALS / page).read_text(), (TUTORIALS / "zh" / page).read_text()


def pairs(page):
    """Yield the English heading, and the prose of this section in both languages."""
    english, chinese = map(TOOLS["sections"], both(page))
    for (heading, part), translated in zip(english.items(), chinese.values(), strict=True):
        yield heading, part, translated


def shape(text):
    """Return each heading's level, with what must be equal below it and what may be more.

    These are the numbers of blocks, table rows and answers, and of list items and empty lines.
    """
    marked = TOOLS["BLOCK"].sub(lambda block: "@" * bool(TOOLS["blocks"](block[0])), text)
    marked = re.sub(r"\n{3,}", "\n\n", marked)
    parts = re.split(r"^(#+) .*\n", marked, flags=re.MULTILINE)[1:]
    return [
        (level, counts(part, "^@$", r"^\|", "^<details>$"), counts(part, "^- ", r"^\d\. ", "^$"))
        for level, part in zip(parts[::2], parts[1::2], strict=True)
    ]


def counts(text, *kinds):
    return [len(re.findall(kind, text, re.MULTILINE)) for kind in kinds]


def test_no_english_section_has_changed_since_its_translation():
    if changed := list(TOOLS["to_translate_again"]()):
        update = "afterwards, run: python tutorials/translation.py --record"
        pytest.fail("\n".join([*changed, update]), pytrace=False)


@pytest.mark.parametrize("page", PAGES)
def test_a_translation_has_the_same_headings_and_tables_and_no_fewer_lists_and_paragraphs(page):
    """It may split a paragraph or turn it into a list."""
    english, chinese = map(shape, both(page))
    headings = list(TOOLS["sections"](both(page)[0]))
    for heading, *shapes in zip(headings, english, chinese, strict=True):
        assert shapes[0][:2] == shapes[1][:2], heading
        fewer = [there < here for here, there in zip(shapes[0][2], shapes[1][2], strict=True)]
        assert not any(fewer), (heading, shapes)


@pytest.mark.parametrize("page", PAGES)
def test_code_outputs_and_pictures_are_those_of_the_english_page(page):
    english, chinese = map(TOOLS["blocks"], both(page))
    assert [TOOLS["PICTURE"].sub(r"![](../\2)", block) for block in english] == [
        TOOLS["PICTURE"].sub(r"![](\2)", block) for block in chinese
    ]
    assert not [block for block in TOOLS["BLOCK"].finditer(both(page)[1]) if block["fence"]]


@pytest.mark.parametrize("page", PAGES)
def test_inline_code_and_numbers_are_those_of_the_english_course(page):
    for heading, english, chinese in pairs(page):
        assert differences(page, english, chinese) == [], heading


def differences(page, english, chinese):
    """Return the inline code and numbers that a Chinese section lacks or that nothing explains.

    It has those of the English section. More code may come from any page or exercise, and more
    numbers from this page or its exercise. Numbers up to 10 are free: words may replace them.
    """
    exercise = next(TUTORIALS.glob(f"exercises/{page[:2]}_*.py"), None)
    whole = both(page)[0] + (exercise.read_text() if exercise else "")
    missing = (codes(english) - codes(chinese)) | (numbers(english) - numbers(chinese))
    invented = {code for code in codes(chinese) if code not in QUOTABLE}
    return sorted(missing | invented | (numbers(chinese) - set(NUMBER.findall(whole))))


def codes(text):
    return {" ".join(code.split()) for code in CODE.findall(text)}


def numbers(text):
    """Return a text's numbers above 10, except those of the pages to which it links."""
    found = set(NUMBER.findall(LINK.sub("", CODE.sub("", text))))
    linked = {Path(target).name[:2] for target in LINK.findall(text)}
    return {number for number in found - linked if not (number.isdigit() and int(number) <= 10)}


def test_a_wrong_number_or_a_changed_name_is_a_difference():
    english = "512 images and `batch_size=256`, in 2 steps"
    for chinese, expected in (
        ("512 张图像，`batch_size=256`", []),
        ("521 张图像，`batch_size=256`", ["512", "521"]),
        ("512 张图像，`batchsize=256`", ["batch_size=256", "batchsize=256"]),
    ):
        assert differences("91_then_and_now.md", english, chinese) == expected


@pytest.mark.parametrize("page", PAGES)
def test_a_link_leads_to_the_chinese_page_if_there_is_one(page):
    """It may be in another section than in English."""
    sections = list(pairs(page))
    expected = {
        in_chinese(target) for _, english, _ in sections for target in LINK.findall(english)
    }
    assert {target for _, _, chinese in sections for target in LINK.findall(chinese)} == expected
    for number, target in PAGE_NUMBER.findall(both(page)[1]):
        assert Path(target).name.startswith(number)


@pytest.mark.parametrize("page", [*PAGES, "README.md"])
def test_both_pages_begin_with_a_link_to_the_other(page):
    english, chinese = (text.partition("\n## ")[0] for text in both(page))
    assert f"(zh/{page})" in english
    assert f"\n[English](../{page})\n" in chinese


def in_chinese(target):
    """Return the target of a link that a Chinese page has in place of an English page's target."""
    if target.startswith("zh/"):  # the English page's link to its translation
        return target.replace("zh/", "../")
    path, _, anchor = target.partition("#")
    if "://" in target or path not in PAGES:
        return target if "://" in target else f"../{target}"
    english, chinese = (list(TOOLS["sections"](text)) for text in both(path))
    anchors = [[COURSE["anchor"](heading.lstrip("# ")) for heading in english]]
    anchors += [[COURSE["anchor"](heading.lstrip("# ")) for heading in chinese]]
    return f"{path}#{dict(zip(*anchors, strict=True))[anchor]}" if anchor else path


@pytest.mark.parametrize("page", [*PAGES, "README.md"])
def test_chinese_text_has_chinese_punctuation_and_spaces_around_latin_words(page):
    text = TOOLS["BLOCK"].sub("", (TUTORIALS / "zh" / page).read_text())
    text = re.sub(r"\]\([^)]*\)", "]", text)
    shown = re.sub(r"[*\[\]]", "", CODE.sub("x", text))
    assert re.findall(f".{{,9}}(?:{CHINESE}[a-z0-9]|[a-z0-9]{CHINESE}).{{,9}}", shown, re.I) == []
    assert re.findall(f".{{,9}}{CHINESE}[,.:;?!(].{{,9}}", shown) == []
    # Markdown shows stars between a letter and a punctuation mark, if the mark is inside.
    bold = re.findall(r"(\w?)(?<!\*)\*\*([^*\n]+)\*\*(?=(\w?))", CODE.sub("`x`", text))
    assert (
        bold
        and [
            content
            for before, content, after in bold
            if (before and not content[0].isalnum()) or (after and not content[-1].isalnum())
        ]
        == []
    )


def test_a_translation_is_stale_if_a_block_of_the_english_page_changes(tmp_path):
    page = "10_where_am_i.md"
    (tmp_path / "tutorials" / "zh").mkdir(parents=True)
    for name in ("translation.py", page, f"zh/{page}"):
        shutil.copy(TUTORIALS / name, tmp_path / "tutorials" / name)
    original = tmp_path / "tutorials" / page
    command = [*COG, "--check", f"tutorials/zh/{page}"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    original.write_text(original.read_text().replace("received [0, 1]", "received [1, 0]"))
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 5


def test_only_a_changed_section_has_to_be_translated_again(tmp_path):
    """Other line breaks, and outputs, don't count."""
    page = "10_where_am_i.md"
    (tmp_path / "zh").mkdir()
    for name in ("translation.py", "course.yaml", page, f"zh/{page}"):
        shutil.copy(TUTORIALS / name, tmp_path / name)

    def translation(*arguments):
        command = [sys.executable, "translation.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert translation("--record").returncode == 0
    text = (tmp_path / page).read_text()
    text = text.replace("received [0, 1]", "received [1, 0]").replace(
        "Write down\n", "Write\ndown "
    )
    (tmp_path / page).write_text(text)
    assert (translation().returncode, translation().stdout) == (
        0,
        "every translation is up to date\n",
    )
    (tmp_path / page).write_text(text.replace("First, train something", "Now train something"))
    changed = f'translate "Run" of tutorials/{page} again\n'
    assert (translation().returncode, translation().stdout) == (1, changed)
    assert translation("--record").returncode == 0
    assert translation().returncode == 0


def test_the_chinese_index_lists_every_page_in_the_order_of_the_course():
    text = (TUTORIALS / "zh" / "README.md").read_text()
    listed = re.findall(r"^\| \**\[(\d\d) [^]]*\]\(([^)]*)\)", text, re.MULTILINE)
    names = [f"{name}.md" for name, _, _ in COURSE["COURSE"]["pages"]]
    in_parts = sorted(names, key=lambda name: name[0])
    assert listed == [(name[:2], name if name in PAGES else f"../{name}") for name in in_parts]
