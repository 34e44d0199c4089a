"""Create the packaged text from alice29.txt of the Canterbury corpus.

python accel_demo/assets/cut_text.py FOLDER_WITH_ALICE29_TXT

Writes alice.txt.gz next to this script, and prints the SHA-256 digest of its decompressed contents,
to be copied to PACKAGED_SUMS in accel_demo/data.py.
"""

import gzip
import hashlib
import sys
from pathlib import Path

SOURCE_SUM = "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0"
FIRST_WORDS = "  Alice was beginning to get very tired"


def cut(source: Path, target: Path) -> None:
    """Write the text in `source`/alice29.txt without its title page, with Unix line ends."""
    content = (source / "alice29.txt").read_bytes()
    if hashlib.sha256(content).hexdigest() != SOURCE_SUM:
        sys.exit("error: alice29.txt is not the file of the Canterbury corpus")
    text = content.decode("ascii").replace("\r\n", "\n").rstrip("\x1a")  # DOS's end of file
    content = text[text.index(FIRST_WORDS) :].encode("ascii")
    (target / "alice.txt.gz").write_bytes(gzip.compress(content, compresslevel=9, mtime=0))
    print(f'    "alice.txt": "{hashlib.sha256(content).hexdigest()}",')


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python accel_demo/assets/cut_text.py FOLDER_WITH_ALICE29_TXT")
    cut(Path(sys.argv[1]), Path(__file__).parent)
