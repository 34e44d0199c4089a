"""Print the tables of README.md, and measure how long the commands of a page take.

python tutorials/course.py           # run the commands of every page, and store the times
python tutorials/course.py 10 40     # only those of pages 10 and 40

The tables come from course.yaml, questions.yaml and messages.yaml, and the times are in
seconds.yaml. Run this program on an idle machine.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from accel_demo.lab.explain.catalog import FOLDER, pitfalls, symptoms

TUTORIALS = Path(__file__).parent
SECONDS = TUTORIALS / "seconds.yaml"
HEAD = "# Seconds that the commands of each page take on two cores: python tutorials/course.py\n"
WORDS_PER_MINUTE, LINES_PER_MINUTE = 100, 10  # reading prose slowly, and code or output
WHERE = "torchrun --standalone --nproc-per-node 2 tutorials/50_where.py"
FINDERS = ("diff", "accel-demo audit", WHERE)  # they exit with 1 if they find something
NOT_RUN = ("python3 -m venv", "source ", "python -m pip", "accel-demo init", "cd course")
NOT_RUN += ("apt-get ", "CUDA_VISIBLE_DEVICES=0,4", "OMP_NUM_THREADS=8")
THEIRS = re.compile(r"^## On your script$.*?(?=^## )", re.DOTALL | re.MULTILINE)

COURSE = yaml.safe_load((TUTORIALS / "course.yaml").read_text(encoding="utf-8"))
QUESTIONS = yaml.safe_load((TUTORIALS / "questions.yaml").read_text(encoding="utf-8"))
INDEX = yaml.safe_load((FOLDER / "messages.yaml").read_text(encoding="utf-8"))
GALLERY = "pitfalls/README.md"


def prose_of(text: str) -> str:
    """Return a page without its code, tables, pictures and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[.*?\]\(.*?\)|</?(details|summary)>", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def minutes(name: str) -> int:
    """Return the minutes that a page takes without its exercise, rounded to 5.

    The time to read its words, code, output and tables is an estimate. The time of its commands was
    measured.
    """
    text = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    prose = prose_of(text)
    visible = re.sub(
        r"<!--.*?-->|!\[.*?\]\(.*?\)|^`{3,}.*?$", "", text, flags=re.DOTALL | re.MULTILINE
    )
    lines = len([line for line in visible.splitlines() if line.strip()])
    lines -= len([line for line in prose.splitlines() if line.strip()])
    seconds = yaml.safe_load(SECONDS.read_text(encoding="utf-8"))[name[:2]]
    reading = len(prose.split()) / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE
    return 5 * max(1, round((reading + seconds / 60) / 5))


def commands_of(text: str) -> list[str]:
    """Return the commands that a page runs, without those for the reader's own script."""
    text = THEIRS.sub("", text)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith(NOT_RUN)]


def measure(numbers: list[str]) -> None:
    """Run the commands of the pages in a new course, and store the seconds that they take."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["accel-demo", "init", folder], check=True)
        _measure(numbers, folder)


def _measure(numbers: list[str], folder: str) -> None:
    seconds = yaml.safe_load(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    for page in sorted(TUTORIALS.glob("[0-9]*.md")):
        number = page.name[:2]
        if numbers and number not in numbers:
            continue
        started = time.monotonic()
        variables = ""
        for command in commands_of(page.read_text(encoding="utf-8")):
            print(f"{number}: {command}", flush=True)
            if command.startswith("eval "):  # sets variables for the commands below
                variables = f"{command} && "
            run = ["bash", "-c", variables + command]
            result = subprocess.run(run, cwd=folder, capture_output=True, encoding="utf-8")
            if result.returncode > command.startswith(FINDERS):
                raise RuntimeError(f"{command} failed:\n{result.stderr}")
        seconds[number] = round(time.monotonic() - started)
        print(f"{number}: {seconds[number]} s", flush=True)
        SECONDS.write_text(HEAD + yaml.safe_dump(seconds), encoding="utf-8")


def print_pages() -> None:
    """Print a table of the pages in each part, as Markdown."""
    for part, heading in COURSE["parts"].items():
        print(f"\n**{part} · {heading}**\n")
        print("| page | question | minutes | exercise |\n|---|---|---:|---|")
        for name, title, question in COURSE["pages"]:
            number = name[:2]
            if number[0] != str(part):
                continue
            graded = (TUTORIALS / f"exercises/graders/{number}.py").exists()
            exercise = f"`accel-demo check {number}`" if graded else ""
            page = f"[{number} {title}]({name}.md)"
            page = f"**{page}**" if int(number) in COURSE["path"] else page
            print(f"| {page} | {question} | {minutes(name)} | {exercise} |")


def print_hours() -> None:
    """Print how long the main path and all pages take, in hours."""
    of_page = {page.stem: minutes(page.stem) for page in TUTORIALS.glob("[0-9]*.md")}
    path = sum(of_page[name] for name in of_page if int(name[:2]) in COURSE["path"])
    print(
        f"The main path takes about {round(path / 60)} hours, all pages together about "
        f"{round(sum(of_page.values()) / 60)}, and the exercises as long again."
    )


def print_terms() -> None:
    """Print the glossary as a Markdown table."""
    names = {name[:2]: name for name, _, _ in COURSE["pages"]}
    print("| term | 术语 | meaning | page |\n|---|---|---|---|")
    for term, number, meaning in sorted(COURSE["terms"], key=lambda row: row[0].lower()):
        chinese, _ = COURSE["chinese"][term]
        print(f"| {term} | {chinese} | {meaning} | [{number}]({names[str(number)]}.md) |")


def print_chinese_terms() -> None:
    """Print the Chinese glossary as a Markdown table, in the order of the pages."""
    names = {name[:2]: name for name, _, _ in COURSE["pages"]}
    print("| 术语 | 英文 | 释义 | 页面 |\n|---|---|---|---|")
    for term, number, _ in sorted(COURSE["terms"], key=lambda row: row[1]):
        chinese, meaning = COURSE["chinese"][term]
        page = f"{names[str(number)]}.md"
        page = page if (TUTORIALS / "zh" / page).exists() else f"../{page}"
        print(f"| {chinese} | {term} | {meaning} | [{number}]({page}) |")


def print_questions() -> None:
    """Print a table of the questions in each part, in the order of the pages, as Markdown."""
    for part, heading in COURSE["parts"].items():
        rows = [row for row in QUESTIONS if str(row["page"])[0] == str(part)]
        if not rows:
            continue
        print(f"\n**{part} · {heading}**\n\n| question | 问题 | answer |\n|---|---|---|")
        for row in sorted(rows, key=lambda row: row["page"]):
            print(f"| {row['en']} | {row['zh']} | {link(row)} |")


def print_symptoms() -> None:
    """Print a table of what a reader sees if there is no error message, as Markdown."""
    print("| what you see | answer |\n|---|---|")
    for row in INDEX["symptoms"]:
        print(f"| {row['symptom']} | {link(row)} |")


def print_groups(file: str = "") -> None:
    """Print a list of the symptoms in the gallery, with links to them in `file`, as Markdown."""
    for symptom, heading in symptoms().items():
        count = sum(each["symptom"] == symptom for each in pitfalls())
        print(f"- [{heading}]({file}#{anchor(heading)}) ({count})")


def print_pitfalls() -> None:
    """Print a table of the pitfalls of each symptom, for the README in their folder."""
    for symptom, heading in symptoms().items():
        print(f"\n## {heading}\n")
        print("| the broken script prints | what is wrong | cause | cure | read | audit |")
        print("|---|---|---|---|---|---|")
        for row in [each for each in pitfalls() if each["symptom"] == symptom]:
            name = row["name"]
            read = f"[broken]({name}_broken.py), [fixed]({name}_fixed.py)"
            read += f", [page {row['page']}](../{link(row).split('](')[1]}" if "page" in row else ""
            kinds = [kind for kind, key in (("error", "audit"), ("note", "note")) if key in row]
            found = kinds[0] if kinds else f"no: {row['unseen']}"
            title = f"[{row['title']}]({row['thread']})" if "thread" in row else row["title"]
            prints = row.get("message") or "; ".join(row["broken"])
            print(f"| `{prints}` | {title} | {row['cause']} | {row['cure']} | {read} | {found} |")


def print_messages() -> None:
    """Print a table of the error messages, in alphabetical order, as Markdown.

    A † marks the messages that the tests find in a library but cannot cause on every machine.
    """
    links = {row["message"]: link(row) for row in INDEX["messages"]}
    print("| message | answer |\n|---|---|")
    rows, texts = list(INDEX["messages"]), "\n".join(row["message"] for row in INDEX["messages"])
    for each in pitfalls():
        message = each.get("message", "")
        if message not in texts:  # neither a row, nor a part of one
            rows.append({"message": message})
            heading = symptoms()[each["symptom"]]
            links[message] = f"[gallery: {heading}]({GALLERY}#{anchor(heading)})"
            texts += message
    for row in sorted(rows, key=lambda row: without_error(row["message"]).lower()):
        quotes = "``" if "`" in row["message"] else "`"
        mark = " †" if "library" in row else ""
        print(f"| {quotes}{row['message']}{quotes}{mark} | {links[row['message']]} |")


def without_error(message: str) -> str:
    """Return a message without the name of the error in front of it, such as `ValueError: `."""
    return re.sub(r"^[\w. ]*([Ee]rror|Warning): ", "", message)


def link(row: dict) -> str:
    """Return a Markdown link to the heading that answers a question, a message or a symptom."""
    [name] = [name for name, _, _ in COURSE["pages"] if name.startswith(f"{row['page']}_")]
    return f"[{row['page']} {row['heading']}]({name}.md#{anchor(row['heading'])})"


def anchor(heading: str) -> str:
    """Return the part of a link after `#` that leads to a heading on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    measure(sys.argv[1:])
