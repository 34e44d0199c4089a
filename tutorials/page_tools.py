"""Regenerate or check the code, diffs, outputs and pictures in the pages.

python tutorials/page_tools.py            # regenerate every page
python tutorials/page_tools.py --check    # write nothing; exit with code 1 if a page is stale
python tutorials/page_tools.py tutorials/21_ring.md --force    # one page; run its commands again
python tutorials/page_tools.py --check --force --real    # without the fork server: slow

The functions below print Markdown. Pages call them in comments, and cog runs these calls. A command
runs only if something that it depends on has changed since its last run; see
`command_cache.py` for the rule. `--force` runs every command.
"""

import difflib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from command_cache import FORCE, forking, result_of

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser

REPOSITORY = Path(__file__).resolve().parent.parent
OTHER_PAGES = ("README.md", "benchmarks/BENCHMARKS.md", "tutorials/pitfalls/README.md")
# Numbers of the slowest pages. To shorten the whole run, these pages start first.
SLOWEST = ("91", "10", "11", "34", "23", "24", "33", "31", "30")
CHANGED = 5  # exit code of `cog --check` if the page would change


def code(path: str, start: str | None = None, end: str | None = None) -> None:
    """Print a file, or a part of it, as a code block.

    The part starts at the first line that contains `start`. It stops before the next line that
    contains `end`. The defaults are the beginning and the end of the file.
    """
    language = {".py": "python", ".yaml": "yaml", ".sbatch": "sh"}.get(Path(path).suffix, "text")
    _block(language, "\n".join(_part(path, start, end)))


def diff(
    a: str, b: str, context: int = 3, start: str | None = None, end: str | None = None
) -> None:
    """Print the diff from file `a` to file `b`, or from a part of `a` to the same part of `b`.

    `start` and `end` select the part as in `code`. Line numbers count from the start of the part.
    """
    before, after = _part(a, start, end), _part(b, start, end)
    _block("diff", "\n".join(difflib.unified_diff(before, after, a, b, n=context, lineterm="")))


def changes(
    a: str,
    b: str | dict[str, str],
    start: str | None = None,
    end: str | None = None,
    context: int = 0,
    names: bool = False,
    skip: str = "(?!)",
) -> None:
    """Print how file `b`, or a part of it, differs from file `a`, without line numbers.

    `b` may also be the texts to replace in `a`. "..." stands for lines that are equal. With
    `names=True`, the names of the files come first. Changed lines that match `skip` are left out.
    """
    before = _part(a, start, end)
    if isinstance(b, str):
        after = _part(b, start, end)
    else:
        text = "\n".join(before)
        for old, new in b.items():
            if old not in text:
                raise ValueError(f"{a} does not contain {old!r}")
            text = text.replace(old, new)
        b, after = "", text.split("\n")
    old, new, *lines = difflib.unified_diff(before, after, a, b, n=context, lineterm="")
    if start:  # what comes before the first change is not shown anyway
        lines = lines[1:]
    lines = [" ..." if line.startswith("@@") else line for line in lines]
    shown = [line for line in lines if not re.match(skip, line)]
    _block("diff", "\n".join([old, new, *shown] if names else shown))


def run(command: str, returncode: int = 0, in_order: bool = True, fence: bool = True) -> None:
    """Print the command and its output.

    Raises `RuntimeError` if the exit code is not `returncode`. With `in_order=False`, the
    output lines are sorted: use it if unconnected processes print in any order. With `fence=False`,
    only the output is printed, as Markdown.
    """
    output = result_of(command, returncode)["output"]
    if not in_order:
        output = "\n".join(sorted(output.splitlines()))
    _block("text", f"$ {command}\n{output}") if fence else print(output)


def picture(command: str, path: str, description: str, output: bool = True) -> None:
    """Print a link to the picture that `command --plot path` draws, and the command's output.

    `description` is the alt text. With `output=False`, only the link is printed. Without `--check`,
    the picture file is overwritten. With `--check`, the page is stale if the words in the picture
    have changed.
    """
    result = result_of(command, draws=True)
    drawn = result["drawn"]
    file = REPOSITORY / path
    if "--check" not in sys.argv:
        file.write_text(drawn, encoding="utf-8")
    if not file.exists() or _words(drawn) != _words(file.read_text(encoding="utf-8")):
        print(f"**{path} is stale.**\n")
    print(f"![{description}]({file.name})" + (f"\n\n{result['output']}" if output else ""))


def _part(path: str, start: str | None = None, end: str | None = None) -> list[str]:
    lines = (REPOSITORY / path).read_text(encoding="utf-8").splitlines()
    first = _find(path, lines, start, 0) if start else 0
    return lines[first : _find(path, lines, end, first + 1) if end else len(lines)]


def _find(path: str, lines: list[str], text: str, first: int) -> int:
    for index in range(first, len(lines)):
        if text in lines[index]:
            return index
    raise ValueError(f"{path} has no line with {text!r} after line {first}")


def _block(language: str, text: str) -> None:
    fence = "````" if "```" in text else "```"
    print(f"{fence}{language}\n{text.rstrip()}\n{fence}")


def _words(svg: str) -> list[str]:
    """Return the words in an SVG picture. Matplotlib writes them as comments beside the glyphs."""
    return re.findall(r"<!-- (.*?) -->", svg)


def main() -> int:
    """Run cog on the pages, several at a time. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="default: every page")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with code 1 if a page is stale"
    )
    parser.add_argument("--force", action="store_true", help="run every command again")
    parser.add_argument("--real", action="store_true", help="start each command as a new process")
    options = parser.parse_args()
    pages = [Path(page).resolve() for page in options.pages] or _all_pages()
    for page in pages:
        if not page.is_file():
            raise UserError(f"no such page: {page}")
    pages.sort(key=_position)
    translations = [page for page in pages if page.parent.name == "zh"]
    others = [page for page in pages if page not in translations]
    outcomes = {"stale": [], "failed": []}
    workers = max(2, (os.cpu_count() or 1) // 2)
    with forking(not options.real), ThreadPoolExecutor(workers) as pool:
        for group in (others, translations):  # a translation copies from a regenerated page
            submit = partial(pool.submit, _regenerate, check=options.check, force=options.force)
            for task in as_completed(map(submit, group)):
                name, outcome, text = task.result()
                print(text, flush=True)
                outcomes.setdefault(outcome, []).append(name)
    for outcome in ("stale", "failed"):
        if outcomes[outcome]:
            print(f"{outcome}: {' '.join(sorted(outcomes[outcome]))}")
    return 1 if outcomes["stale"] or outcomes["failed"] else 0


def _all_pages() -> list[Path]:
    pages = [REPOSITORY / page for page in OTHER_PAGES]
    own = [*REPOSITORY.glob("tutorials/*.md"), *REPOSITORY.glob("tutorials/zh/*.md")]
    return [*sorted(own), *pages]


def _position(page: Path) -> int:
    return SLOWEST.index(page.name[:2]) if page.name.startswith(SLOWEST) else len(SLOWEST)


def _regenerate(page: Path, check: bool, force: bool) -> tuple[str, str, str]:
    """Run cog on one page. Return the page's name, the outcome, and the text to print."""
    name = str(page.relative_to(REPOSITORY) if page.is_relative_to(REPOSITORY) else page)
    mode = ["--check", "--diff"] if check else ["-r"]
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "cogapp", *mode, "-P", "-I", "tutorials", "--verbosity=0", name],
        cwd=REPOSITORY,
        env={**os.environ, FORCE: "yes" if force else ""},
        capture_output=True,
        encoding="utf-8",
    )
    seconds = time.monotonic() - started
    outcomes = {0: "fresh" if check else "written", CHANGED: "stale"}
    outcome = outcomes.get(ended.returncode, "failed")
    details = [*ended.stderr.splitlines(), *ended.stdout.splitlines()]
    return name, outcome, "\n".join([f"{seconds:7.1f} s  {outcome:7}  {name}", *details])


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
