"""The page of a timeline: its tables, and lanes to zoom and pan. One file, no network."""

from pathlib import Path

from accel_demo.lab.timeline.picture import (
    COLOUR_OF,
    LANES,
    lanes_of,
    steps_of,
    verdict,
    what_ran,
    whole_of,
)
from accel_demo.lab.web_page import escape, write_page

SCRIPT = Path(__file__).with_suffix(".js")
TITLE = "Where the time of a training step goes"
STYLE = """
th, td { white-space: nowrap; } .wide { margin-top: 12px; } body { overflow-wrap: anywhere; }
.verdict { font-size: 1.1rem; font-weight: 600; } .slow { color: #b04a00; }
.stack { display: flex; gap: 8px; align-items: center; margin: 4px 0; white-space: nowrap; }
.stack b { width: 4em; font-weight: 400; } .stack > span { flex: 1; display: flex; height: 22px; }
.stack i, .key { display: inline-block; } .stack i { height: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 8px 0; }
.legend li { list-style: none; } .key { width: 14px; height: 14px; margin-right: 6px; }
.tools { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 8px 0; }
.tools button, .tools select { font: inherit; min-width: 44px; min-height: 44px; padding: 0 12px;
  color: inherit; background: #fff; border: 1px solid #8c959f; border-radius: 6px; }
.tools button:hover { background: var(--shade); }
#range { font-variant-numeric: tabular-nums; }
#detail { display: flex; flex-wrap: wrap; gap: 0 20px; align-content: flex-start; padding: 8px 12px;
  min-height: 42px; background: #fff; border: 1px solid var(--ink); border-radius: 6px;
  margin-top: 8px; font-variant-numeric: tabular-nums; }
#detail:has(b) { position: sticky; bottom: 8px; }
#detail span { color: var(--soft); } #detail span b { color: var(--ink); }
#lanes { display: block; width: 100%; margin-top: 8px; touch-action: pan-y; cursor: grab;
  user-select: none; -webkit-user-select: none; font: 13px system-ui, sans-serif; }
#lanes.dragged { cursor: grabbing; }
#lanes:focus-visible, button:focus-visible, select:focus-visible { outline: 2px solid #0072b2;
  outline-offset: 2px; }
#lanes rect { outline: none; } #lanes .chosen { stroke: #000; stroke-width: 2px; }
#lanes text { pointer-events: none; } #lanes .slow { fill: #b04a00; }
#lanes .tick, #lanes .unit { fill: #57606a; }
kbd { font: inherit; border: 1px solid var(--line); border-radius: 4px; padding: 0 4px;
  background: var(--shade); }
@media (max-width: 640px) { #detail { min-height: 90px; } .stack b { width: 3.5em; } }
"""
TOOLS = """<div class="tools" role="group" aria-label="what the lanes show">
<button id="in" aria-label="zoom in, twice as large">+</button>
<button id="out" aria-label="zoom out, half as large">−</button>
<button id="whole" aria-label="show the whole time">whole</button>
<button id="earlier" aria-label="move to earlier">←</button>
<button id="later" aria-label="move to later">→</button>
<select id="step" aria-label="fill the view with a step">{options}</select>
<output id="range" aria-label="visible time"></output>
</div>"""
LABEL = "two lanes per rank, what it computed and what it sent: arrow keys move, plus and minus "
LABEL += "zoom, Enter goes to the bars"
HELP = """<p class="soft">Zoom: wheel, two fingers, <kbd>+</kbd> <kbd>−</kbd>; <kbd>0</kbd> shows
the whole time. Move: drag, <kbd>←</kbd> <kbd>→</kbd>. Point at a bar, tap it, or press
<kbd>Enter</kbd> in the lanes and go from bar to bar with the arrow keys; <kbd>Esc</kbd> goes back.
</p>"""


def write(found: dict, path: Path) -> None:
    """Write the page of what `timeline` found, as HTML that needs nothing else."""
    parts = [
        f"<h1>{TITLE}</h1>",
        f'<p class="soft">{escape(what_ran(found))}</p>',
        f'<p class="{"verdict slow" if found["straggler"] else "verdict"}">'
        f"{escape(verdict(found))}</p>",
        "<h2>A step on each rank, median (ms)</h2>",
        _legend(found["phases"]),
        *[_stack(row, found) for row in found["summary"]],
        _summary(found),
        *([_sweep(found["sweep"])] if found["sweep"] else []),
        "<h2>The lanes</h2>",
        _tools(found),
        f'<div><svg id="lanes" tabindex="0" role="application" aria-label="{LABEL}"></svg>',
        '<div id="detail"><span>Point at a bar to see what it is.</span></div></div>',
        _legend(found["phases"]),
        HELP,
    ]
    write_page(path, TITLE, "\n".join(parts), STYLE, SCRIPT.read_text("utf-8"), data_of(found))


def data_of(found: dict) -> dict:
    """What the script needs: the lanes, every bar with its row and its share of its step (ms)."""
    slow = found["straggler"] and found["straggler"]["rank"]
    walls, edges, lanes, bars = {}, {}, [], []
    for rank in found["ranks"]:
        walls |= {(rank["rank"], step["step"]): step["wall_ms"] for step in rank["steps"]}
        edges[rank["rank"]] = [
            step[end] for step in rank["steps"] for end in ("start_ms", "end_ms")
        ]
    for number, lane in enumerate(lanes_of(found)):
        rank, is_first = lane["rank"], lane["lane"] == LANES[0]
        is_slow = rank == slow
        head = f"rank {rank}{' (slow)' if is_slow else ''}: " if is_first else ""
        lanes.append({"words": head + lane["lane"], "rows": lane["rows"], "edges": edges[rank]})
        lanes[-1] |= {"is_first": is_first, "is_slow": is_slow}
        for bar in lane["bars"]:
            wall = walls.get((rank, bar["step"]))
            share = (bar["end_ms"] - bar["start_ms"]) / wall if wall else None
            kept = {key: bar[key] for key in ("phase", "name", "step", "bytes", "row")}
            kept |= {"start": bar["start_ms"], "end": bar["end_ms"], "share": share}
            bars.append({"rank": rank, "lane": number, **kept})
    steps = [
        {"step": step["step"], "start": step["start_ms"], "end": step["end_ms"]}
        for step in steps_of(found)
    ]
    colours = {phase: COLOUR_OF[phase] for phase in found["phases"]}
    whole = whole_of(found)
    return {"lanes": lanes, "bars": bars, "steps": steps, "whole": whole, "colours": colours}


def _legend(phases: list[str]) -> str:
    items = [
        f'<li><span class="key" style="background:{COLOUR_OF[phase]}"></span>{escape(phase)}</li>'
        for phase in phases
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _stack(row: dict, found: dict) -> str:
    """A rank's phases end to end, to the same scale for all ranks."""
    longest = max(sum(other["phases_ms"].values()) for other in found["summary"]) or 1
    said = [f"{phase} {row['phases_ms'][phase]:.2f} ms" for phase in found["phases"]]
    parts = [
        f'<i style="width:{100 * row["phases_ms"][phase] / longest:.3f}%;'
        f'background:{COLOUR_OF[phase]}" title="{escape(words)}"></i>'
        for phase, words in zip(found["phases"], said, strict=True)
    ]
    label = escape(f"rank {row['rank']}: {', '.join(said)}")
    bar = f'<span role="img" aria-label="{label}">{"".join(parts)}</span>'
    return f'<div class="stack"><b>rank {row["rank"]}</b>{bar}</div>'


def _summary(found: dict) -> str:
    head = ["rank", "wall", *found["phases"], "all of all-reduce", "of it hidden", "late"]
    rows = [
        [
            f"{row['rank']}",
            f"{row['wall_ms']:.2f}",
            *[f"{row['phases_ms'][phase]:.2f}" for phase in found["phases"]],
            f"{row['all_reduce_ms']:.2f}",
            f"{100 * row['hidden_share']:.0f} %",
            f"{row['late_ms']:.2f}",
        ]
        for row in found["summary"]
    ]
    note = "A moment in which a rank computes counts as computing: the phase all-reduce is only "
    note += "what is exposed, the time in which the rank does nothing but wait for what is sent "
    note += "(also for the buffers of BatchNorm, which rank 0 sends). Hidden is the part of an "
    note += "all-reduce that lies under backward of the same rank. Late is how long after the "
    note += "first rank it comes."
    return f'{_table("a step on each rank", head, rows)}<p class="soft">{note}</p>'


def _sweep(sweep: list[dict]) -> str:
    head = ["bucket_cap_mb", "buckets", "all of all-reduce (ms)", "exposed (ms)"]
    head += ["hidden", "step (ms)"]
    rows = [
        [
            f"{row['bucket_mb']:g}",
            f"{row['buckets']}",
            *[f"{row[key]:.2f}" for key in ("all_reduce_ms", "exposed_ms")],
            f"{100 * row['hidden_share']:.0f} %",
            f"{row['step_ms']:.2f}",
        ]
        for row in sweep
    ]
    return f"<h2>The same with other buckets</h2>{_table('sizes of buckets', head, rows)}"


def _tools(found: dict) -> str:
    steps = [step["step"] for step in steps_of(found)]
    options = ['<option value="whole">all steps</option>']
    options += [f'<option value="{step}">step {step}</option>' for step in steps]
    options.append('<option value="part" disabled hidden>a part</option>')
    return TOOLS.format(options="".join(options))


def _table(name: str, head: list[str], rows: list[list[str]]) -> str:
    """All cells are numbers. It scrolls on its own where the screen is narrow."""
    first = [f'<th class="number" scope="col">{escape(cell)}</th>' for cell in head]
    lines = [[f'<td class="number">{escape(cell)}</td>' for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    table = f"<table><thead><tr>{''.join(first)}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{table}</div>'
