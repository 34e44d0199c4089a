"""Copy code and outputs from English pages to their Chinese ones, and find what to translate again.

python tutorials/translation.py             # list the English sections that changed since then
python tutorials/translation.py --record    # after translating them: store that this is done

A Chinese page has only its prose. `next_block` prints everything else, so no command runs twice.
"""

import re
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import yaml

TUTORIALS = Path(__file__).resolve().parent
CHINESE = TUTORIALS / "zh"
RECORD = CHINESE / "translated.yaml"
HEAD = "# Digests of the translated English sections: python tutorials/translation.py --record\n"
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


def digests(page: str) -> dict[str, str]:
    """Map each heading of an English page to a digest of its prose, however lines are broken."""
    parts = sections((TUTORIALS / page).read_text(encoding="utf-8"))
    return {
        heading.lstrip("# "): sha256(" ".join(part.split()).encode()).hexdigest()[:12]
        for heading, part in parts.items()
    }


def to_translate_again() -> Iterator[str]:
    """Yield a line for each English section that has changed since its translation."""
    recorded = yaml.safe_load(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for page in translated_pages():
        before, now = recorded.get(page, {}), digests(page)
        for heading in [*now, *(before.keys() - now.keys())]:
            if before.get(heading) != now.get(heading):
                yield f'translate "{heading}" of tutorials/{page} again, in tutorials/zh/{page}'


def main() -> int:
    """List the changed sections, or store the digests of all. Return the exit code."""
    changed = list(to_translate_again())
    print("\n".join(changed) if changed else "every translation is up to date")
    if sys.argv[1:] != ["--record"]:
        return bool(changed)
    record = {page: digests(page) for page in translated_pages()}
    text = yaml.safe_dump(record, allow_unicode=True, sort_keys=False)
    RECORD.write_text(HEAD + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
