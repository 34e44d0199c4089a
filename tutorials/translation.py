"""Copy code and outputs from English pages to their Chinese ones, and find what to translate again.

python tutorials/translation.py             # list what has changed in the English pages since
python tutorials/translation.py --record    # after translating them: store that this is done

A Chinese page has only its prose. `next_block` prints everything else, so no command runs twice.
"""

import re
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import yaml

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser

TUTORIALS = Path(__file__).resolve().parent
CHINESE = TUTORIALS / "zh"
RECORD = CHINESE / "translated.yaml"
HEAD = "# Digests of what has been translated: python tutorials/translation.py --record\n"
# What a program wrote into the page, or else a block of code
BLOCK = re.compile(
    r"^<!-- \[\[\[cog.*?\]\]\] -->\n(?P<generated>.*?)^<!-- \[\[\[end\]\]\] -->$"
    r"|^(?P<fence>`{3,}).*?^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
PICTURE = re.compile(r"!\[(.*?)\]\((.*?)\)", re.DOTALL)


def next_block(page: str) -> Callable[[str], None]:
    """Return a function that prints the next block of an English page each time it is called.

    A block is a code block, an output, a table that a program printed, or a picture. The function's
    argument is the Chinese alt text if the block is a picture.
    """
    remaining = iter(blocks((TUTORIALS / page).read_text(encoding="utf-8")))

    def show(description: str = "") -> None:
        block = next(remaining)
        if bool(description) != bool(PICTURE.match(block)):
            raise ValueError(f"a picture needs a description, and nothing else has one: {block}")
        print(PICTURE.sub(lambda found: f"![{description}](../{found[2]})", block))

    return show


def blocks(text: str) -> list[str]:
    """Return the blocks of a page. A cog comment that prints nothing is not a block."""
    found = (match["generated"] or match["fence"] and match[0] for match in BLOCK.finditer(text))
    return [block.strip("\n") for block in found if block]


def sections(text: str) -> dict[str, str]:
    """Map each heading of a page, with its #s, to its section without blocks. Alt texts remain."""
    prose = BLOCK.sub(lambda match: "\n".join(_descriptions(match["generated"] or "")), text)
    parts = re.split(r"^(#+ .*)\n", prose, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _descriptions(block: str) -> list[str]:
    return [description for description, _ in PICTURE.findall(block)]


def translated_pages() -> list[str]:
    """Return the names of the English pages that have a Chinese one."""
    names = [page.name for page in sorted(CHINESE.glob("[0-9]*.md"))]
    return [name for name in names if (TUTORIALS / name).exists()]


def digests() -> dict[str, dict[str, str]]:
    """Map each translated file to {heading, title or term: digest of the English text}.

    In course.yaml, the texts are the questions of the pages and the meanings of the terms. Digests
    don't depend on line breaks.
    """
    course = yaml.safe_load((TUTORIALS / "course.yaml").read_text(encoding="utf-8"))
    texts = {"course.yaml": {name: text for name, _, text in (*course["pages"], *course["terms"])}}
    for page in translated_pages():
        texts[page] = sections((TUTORIALS / page).read_text(encoding="utf-8"))
    return {
        file: {
            name.lstrip("# "): sha256(" ".join(text.split()).encode()).hexdigest()[:12]
            for name, text in parts.items()
        }
        for file, parts in texts.items()
    }


def to_translate_again() -> Iterator[str]:
    """Yield a line for each English section, question or term that has changed since then."""
    recorded = yaml.safe_load(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for file, now in digests().items():
        before = recorded.get(file, {})
        for name in [*now, *(before.keys() - now.keys())]:
            if before.get(name) != now.get(name):
                yield f'translate "{name}" of tutorials/{file} again'


def main() -> int:
    """List what has changed, or store the digests. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--record", action="store_true", help="store that all is translated")
    record = parser.parse_args().record
    changed = list(to_translate_again())
    print("\n".join(changed) if changed else "every translation is up to date")
    if not record:
        return bool(changed)
    text = yaml.safe_dump(digests(), allow_unicode=True, sort_keys=False)
    RECORD.write_text(HEAD + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
