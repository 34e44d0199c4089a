"""Write a self-contained HTML page that needs no network. This module does not import torch."""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path

from accel_demo.files import write_whole

escape = html.escape  # use this for all text from files

PAGE_COLORS = {"light": (255, 255, 255), "dark": (13, 17, 23)}  # red, green and blue: `--page`
# A dark page has the same elements in other colors, and its text has a contrast of at least 4.5:
# https://www.w3.org/TR/WCAG22/#contrast-minimum. Paper is always light.
STYLE = """
:root { color-scheme: light dark; --page: rgb(255, 255, 255); --ink: #1b1f24; --soft: #57606a;
        --line: #d0d7de; --shade: #f6f8fa; --grid: #e4e8ec; --warn: #a33f00; --marked: #fcefe2; }
@media screen and (prefers-color-scheme: dark) {
  :root { --page: rgb(13, 17, 23); --ink: #e6edf3; --soft: #9ea7b1; --line: #3d444d;
          --shade: #1c232b; --grid: #262d35; --warn: #ff9a5c; --marked: #2b1d0e; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 16px; color: var(--ink);
       background: var(--page);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 8px; } h2 { font-size: 1.2rem; margin: 28px 0 8px; }
p { margin: 8px 0; } .soft { color: var(--soft); }
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: left; }
th { background: var(--shade); font-weight: 600; }
.number, .numbers :is(th, td) { text-align: right; }
"""


def write_page(
    path: Path, title: str, body: str, style: str = "", script: str = "", data: object = None
) -> None:
    """Write a page. `title` is plain text. `body` is HTML, so escape any text from files in it.

    `script` runs after the body has been parsed. It reads `data`, which must not contain NaN, with
    `JSON.parse(document.getElementById("data").textContent)`. A content security policy blocks all
    other scripts and all requests to servers: https://www.w3.org/TR/CSP3/
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
    policy += f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # Escape "<", so that the data cannot contain "</script>".
    json_data = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{json_data}</script>
<script>{script}</script>
</body>
</html>
"""
    # Text from JSON files and names of files may contain surrogates, which UTF-8 cannot encode.
    write_whole(path, page.encode(errors="backslashreplace"))


def ink_on(background: tuple[int, int, int]) -> str:
    """Return the color of text, black or white, that has the higher contrast on this background.

    The contrast is at least 4.58. Source: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance
    """
    linear = [
        part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in background
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#fff"


def html_table(label: str, head: Sequence, rows: Sequence[Sequence], css_class: str = "") -> str:
    """Return an HTML table that scrolls horizontally if the screen is narrow. All cells are HTML.

    The first cell of each row is the row's heading. Screen readers read `label` aloud.
    """
    headings = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in cells)
        for first, *cells in rows
    ]
    table = f"<thead><tr>{headings}</tr></thead><tbody>{'</tr>'.join([*lines, ''])}</tbody>"
    table = f'<table class="{css_class}">{table}</table>'
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'
    )
