"""Write the timeline as one HTML file, with tables and with lanes that you can zoom and pan."""

from pathlib import Path

from accel_demo.lab.timeline import tables
from accel_demo.lab.timeline.picture import ACTIVITY, COLOR_OF
from accel_demo.lab.timeline.result import (
    RankTimeline,
    TimelineResult,
    row_count,
    step_spans,
    steps_shown,
    whole_span,
)
from accel_demo.lab.web_page import escape, html_table, write_page
from accel_demo.wording import duration

SCRIPT = Path(__file__).with_suffix(".js")
TITLE = "Where the time of a training step goes"
STYLE = """
th, td { white-space: nowrap; } .wide { margin-top: 12px; } body { overflow-wrap: anywhere; }
.verdict { font-size: 1.1rem; font-weight: 600; } .slow { color: var(--warn); }
.stack { display: flex; gap: 8px; align-items: center; margin: 4px 0; white-space: nowrap; }
.stack b { width: 4em; font-weight: 400; } .stack > span { flex: 1; display: flex; height: 22px; }
.stack i, .key { display: inline-block; } .stack i { height: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 8px 0; }
.legend li { list-style: none; } .key { width: 14px; height: 14px; margin-right: 6px; }
.tools { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 8px 0; }
.tools button, .tools select { font: inherit; min-width: 44px; min-height: 44px; padding: 0 12px;
  color: inherit; background: var(--page); border: 1px solid #8c959f; border-radius: 6px; }
.tools button:hover { background: var(--shade); }
#range { font-variant-numeric: tabular-nums; }
#detail { display: flex; flex-wrap: wrap; gap: 0 20px; align-content: flex-start; padding: 8px 12px;
  min-height: 42px; background: var(--page); border: 1px solid var(--ink); border-radius: 6px;
  margin-top: 8px; font-variant-numeric: tabular-nums; }
#detail:has(b) { position: sticky; bottom: 8px; }
#detail span { color: var(--soft); } #detail span b { color: var(--ink); }
#lanes { display: block; width: 100%; margin-top: 8px; touch-action: pan-y; cursor: grab;
  user-select: none; -webkit-user-select: none; font: 13px system-ui, sans-serif; }
#lanes.dragged { cursor: grabbing; }
#lanes:focus-visible, button:focus-visible, select:focus-visible { outline: 2px solid #0072b2;
  outline-offset: 2px; }
#lanes rect { outline: none; } #lanes .chosen { stroke: var(--ink); stroke-width: 2px; }
#lanes text { pointer-events: none; } #lanes text:not([fill]) { fill: var(--ink); }
#lanes text.slow:not([fill]) { fill: var(--warn); }
#lanes text:is(.tick, .unit):not([fill]) { fill: var(--soft); }
#lanes .lane { fill: var(--shade); } #lanes .slow-lane { fill: var(--marked); }
#lanes .edge { stroke: var(--soft); } #lanes .rule { stroke: var(--line); }
kbd { font: inherit; border: 1px solid var(--line); border-radius: 4px; padding: 0 4px;
  background: var(--shade); }
@media (max-width: 640px) { #detail { min-height: 90px; } .stack b { width: 3.5em; } }
"""
LEGEND = '<ul class="legend">'
for phase, color in COLOR_OF.items():
    LEGEND += f'<li><span class="key" style="background:{color}"></span>{phase}</li>'
LEGEND += "</ul>"
TOOLS = """<div class="tools" role="group" aria-label="zoom and move the lanes">
<button id="in" aria-label="zoom in, twice as large">+</button>
<button id="out" aria-label="zoom out, half as large">−</button>
<button id="whole" aria-label="show the whole time">whole</button>
<button id="earlier" aria-label="move earlier">←</button>
<button id="later" aria-label="move to later">→</button>
<select id="step" aria-label="zoom to one step">
<option value="whole">all steps</option>{options}
<option value="part" disabled hidden>part of the timeline</option></select>
<output id="range" aria-label="visible time range"></output>
</div>"""
LABEL = "two lanes per rank, one for its activity and one for collectives: arrow keys pan, "
LABEL += "plus and minus zoom, and Enter selects a bar"
HELP = """<p class="soft">To zoom, use the mouse wheel, two fingers, or <kbd>+</kbd> and
<kbd>−</kbd>; <kbd>0</kbd> shows the whole timeline. To move, drag, or press <kbd>←</kbd> or
<kbd>→</kbd>. To see the details of a bar, point at it, tap it, or press <kbd>Enter</kbd> in the
lanes and choose a bar with the arrow keys; <kbd>Esc</kbd> returns to the lanes.</p>"""
NOTE = """<p class="soft">While a rank computes during a collective, its time belongs to the phase
that it computes. A wait is only the time in which it does nothing else: "rank wait" until another
rank has started the same collective, too, and "message wait" from then on until the messages have
arrived. The hidden part of an all-reduce is the time during which the same rank computes backward.
"Late" is how much later than the first rank a rank starts a collective.</p>"""


def write_timeline_page(result: TimelineResult, path: Path) -> None:
    """Write the result as one self-contained HTML file."""
    slow = "" if result.straggler is None else " slow"
    steps = step_spans(result.ranks)
    options = "".join(f'<option value="{step}">step {step}</option>' for step in steps)
    parts = [
        f"<h1>{TITLE}</h1>",
        f'<p class="soft">{escape(result.description)}</p>',
        *[f'<p class="verdict{slow}">{escape(text)}</p>' for text in tables.verdict(result)],
        "<h2>Median step on each rank (ms)</h2>",
        LEGEND,
        *[_stacked_bar(rank, result.ranks) for rank in result.ranks],
        html_table("median step on each rank", *tables.rank_table(result), css_class="numbers"),
        *[f"<p>{escape(sentence)}</p>" for sentence in tables.all_reduce_sentences(result)],
        NOTE,
    ]
    if result.sweep:
        parts.append("<h2>Bucket sizes</h2>")
        parts.append(html_table("bucket sizes", *tables.sweep_table(result), css_class="numbers"))
    parts += [
        "<h2>The lanes</h2>",
        TOOLS.format(options=options),
        f'<div><svg id="lanes" tabindex="0" role="application" aria-label="{LABEL}"></svg>',
        '<div id="detail"><span>Point at a bar to see its details.</span></div></div>',
        LEGEND,
        HELP,
    ]
    write_page(
        path, TITLE, "\n".join(parts), STYLE, SCRIPT.read_text(encoding="utf-8"), data_of(result)
    )


def data_of(result: TimelineResult) -> dict:
    """Return the data for page.js. The `share` of a bar is its fraction of the step time."""
    lanes, bars = [], []
    for rank in result.ranks:
        is_slow, wall_ms = rank.rank == result.straggler, {s.number: s.wall_ms for s in rank.steps}
        edges = [edge for step in steps_shown(rank) for edge in (step.start_ms, step.end_ms)]
        for name, lane in rank.lanes.items():
            is_first = name == "activity"
            label = name
            if is_first:
                label = f"rank {rank.rank}{' (slow)' if is_slow else ''}: "
                label += ACTIVITY[result.device != "cpu"]
            shown = {"label": label, "rows": row_count(lane), "edges": edges}
            for bar in lane:
                share = (bar.end_ms - bar.start_ms) / wall_ms[bar.step]
                bars.append({**vars(bar), "rank": rank.rank, "lane": len(lanes), "share": share})
            lanes.append({**shown, "is_first": is_first, "is_slow": is_slow})
    return {
        "lanes": lanes,
        "bars": bars,
        "steps": [{"step": step, "span": span} for step, span in step_spans(result.ranks).items()],
        "whole": whole_span(result.ranks),
        "colors": COLOR_OF,
    }


def _stacked_bar(rank: RankTimeline, ranks: list[RankTimeline]) -> str:
    """Return a stacked bar of a rank's phases. The bars of all ranks have the same scale."""
    longest = max(sum(other.phases_ms.values()) for other in ranks)
    label, parts = [], ""
    for phase, ms in rank.phases_ms.items():
        label.append(f"{phase} {duration(ms / 1000)}")
        parts += f'<i style="width:{100 * ms / longest:.3f}%;background:{COLOR_OF[phase]}"></i>'
    bar = f'<span role="img" aria-label="rank {rank.rank}: {", ".join(label)}">{parts}</span>'
    return f'<div class="stack"><b>rank {rank.rank}</b>{bar}</div>'
