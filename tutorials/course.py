"""Print the tables of README.md, and estimate how long a page takes.

The tables come from course.yaml and questions.yaml.
"""

import re
from pathlib import Path

import yaml

TUTORIALS = Path(__file__).parent
WORDS_PER_MINUTE, LINES_PER_MINUTE = 150, 15  # reading prose slowly, and code or output

COURSE = yaml.safe_load((TUTORIALS / "course.yaml").read_text())
QUESTIONS = yaml.safe_load((TUTORIALS / "questions.yaml").read_text())


def prose_of(text: str) -> str:
    """Return a page without its code, tables, pictures and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def minutes(name: str) -> int:
    """Estimate the minutes to read a page: its words, and its lines of code, output and tables.

    The exercise is not included.
    """
    text = (TUTORIALS / f"{name}.md").read_text()
    visible = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    words = len(prose_of(text).split())
    lines = len([line for line in visible.splitlines() if line.strip()])
    lines -= len([line for line in prose_of(text).splitlines() if line.strip()])
    return max(5, 5 * round((words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE) / 5))


def print_pages() -> None:
    """Print a table of the pages in each part, as Markdown."""
    for part, heading in COURSE["parts"].items():
        print(f"\n**{part} · {heading}**\n")
        print("| page | question | minutes | exercise |\n|---|---|---:|---|")
        for name, title, question in COURSE["pages"]:
            number = name[:2]
            if number[0] != str(part):
                continue
            if not (TUTORIALS / f"{name}.md").exists():
                print(f"| {number} {title} (planned) | {question} | | |")
                continue
            graded = (TUTORIALS / f"exercises/graders/{number}.py").exists()
            exercise = f"`accel-demo check {number}`" if graded else ""
            print(f"| [{number} {title}]({name}.md) | {question} | {minutes(name)} | {exercise} |")


def print_terms() -> None:
    """Print the dictionary as a Markdown table."""
    names = {name[:2]: name for name, _, _ in COURSE["pages"]}
    print("| term | meaning | page |\n|---|---|---|")
    for term, number, meaning in sorted(COURSE["terms"], key=lambda row: row[0].lower()):
        print(f"| {term} | {meaning} | [{number}]({names[str(number)]}.md) |")


def print_questions() -> None:
    """Print a table of the questions in each part, in the order of the pages, as Markdown."""
    pages = {name[:2]: (name, title) for name, title, _ in COURSE["pages"]}
    for part, heading in COURSE["parts"].items():
        rows = [row for row in QUESTIONS if str(row["page"])[0] == str(part)]
        if not rows:
            continue
        print(f"\n**{part} · {heading}**\n\n| question | 问题 | answer |\n|---|---|---|")
        for row in sorted(rows, key=lambda row: row["page"]):
            name, title = pages[str(row["page"])]
            answer = f"{row['page']} {title} (planned)"
            if "heading" in row:
                target = f"{name}.md#{anchor(row['heading'])}"
                answer = f"[{row['page']} {row['heading']}]({target})"
            print(f"| {row['en']} | {row['zh']} | {answer} |")


def anchor(heading: str) -> str:
    """Return the part of a link after `#` that leads to a heading on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
