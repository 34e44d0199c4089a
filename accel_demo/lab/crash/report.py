"""What `accel-demo crash` found: a line for each launch, the comparison, the figures, a picture."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from accel_demo.wording import counted

WORDS = {"save": "during a save", "step": "in a step", "start-up": "while it started"}
MARKERS = {  # in Okabe and Ito's colours, which everyone can tell apart
    "save": {"marker": "X", "color": "black", "markersize": 6},
    "step": {"marker": "o", "color": "#e69f00", "markersize": 5},
    "start-up": {"marker": "s", "color": "#009e73", "markersize": 5},
}
HEAD = "launch  resumed after step  reached  replayed  killed"


def line(number: int, row: dict) -> str:
    """One line of the table under `HEAD`: a launch of the training, and how it was killed."""
    step, kill = row["resumed_after_step"], row["kill"]
    step = "-" if step is None else step or "the start"
    text = f"{number:>6}  {step:>18}  {row['reached'] or '-':>7}  {row['replayed']:>8}  "
    if kill is None:
        return f"{text}no, ended"
    text += f"rank {kill['rank']} {WORDS[kill['hit']]}"
    return text if kill["hit"] == kill["kind"] else f"{text} (aimed: {WORDS[kill['kind']]})"


def compare(twin: Path, killed: Path) -> dict:
    """Which tensors of two runs differ by a bit, and how many steps have the same line of metrics.

    Speed is no part of the comparison. Both runs have ended.
    """
    ours, theirs = (load_file(run / "model.safetensors") for run in (twin, killed))
    different = ours.keys() ^ theirs.keys()
    for name in ours.keys() & theirs.keys():
        a, b = (one[name].reshape(-1).view(torch.uint8) for one in (ours, theirs))
        if ours[name].shape != theirs[name].shape or not torch.equal(a, b):
            different.add(name)
    lines = []
    for run in (twin, killed):
        metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        kept = [{**one, "images_per_second": 0} for one in metrics if "train_loss" in one]
        lines.append(kept)
    return {
        "tensors": len(ours),
        "different_tensors": sorted(different),
        "steps_logged": max(map(len, lines)),
        "steps_logged_alike": sum(a == b for a, b in zip(*lines, strict=False)),
    }


def passed(found: dict) -> bool:
    """Whether nothing was lost: the same bits, and each launch from the newest whole checkpoint."""
    alike = found["steps_logged_alike"] == found["steps_logged"]
    rows = found["launches"]
    right = all(row["from_the_newest_whole"] and not row["from_a_damaged"] for row in rows)
    return alike and right and not found["different_tensors"]


def summary(found: dict) -> str:
    """The figures, one to a line; the verdict comes last."""
    rows = found["launches"]
    kills = [row["kill"] for row in rows if row["kill"]]
    hits = [kill["hit"] for kill in kills]
    trained, replayed = (sum(row[key] for row in rows) for key in ("trained", "replayed"))
    resumed = sum(row["resumed_from"] is not None for row in rows)
    wrong = sum(not row["from_the_newest_whole"] for row in rows)
    whole, damaged = (sum(len(row[key]) for row in rows) for key in ("whole", "damaged"))
    used, connected = (sum(row[key] for row in rows) for key in ("from_a_damaged", "connected"))
    unfinished = sum(row["unfinished"] for row in rows)
    early = len(rows) - connected
    different, tensors = len(found["different_tensors"]), found["tensors"]
    lines = {
        "kills": f"{len(kills)}: "
        + ", ".join(f"{hits.count(kind)} {words}" for kind, words in WORDS.items()),
        "steps": f"{found['steps']}, and {replayed} replayed ({trained} trained in all)",
        "checkpoints found": f"{whole} whole, {damaged} damaged, {unfinished} left unfinished",
        "damaged ones used": str(used),
        "resumed": f"{resumed} times, "
        + (f"{wrong} NOT from the newest whole one" if wrong else "from the newest whole one"),
        "connected": f"{counted(found['processes'], 'process')} in "
        f"{connected} of {len(rows)} launches" + (f"; {early} killed before that" if early else ""),
        "metrics": f"equal in {found['steps_logged_alike']} of {found['steps_logged']} steps",
        "final weights": f"DIFFERENT in {different} of {tensors} tensors"
        if different
        else f"bitwise equal ({tensors} tensors)",
    }
    return "\n".join(["", *(f"{name + ':':19}{text}" for name, text in lines.items())])


def draw(found: dict, path: Path) -> None:
    """Optimizer steps over time: the twin, the run that is killed, its kills and its ways back."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axis = figure.subplots()
    rows, twin = found["launches"], found["twin_points"]
    axis.plot(*zip(*twin, strict=True), color="black", linewidth=1.2, label="twin, never killed")
    where = (0.0, 0)  # seconds and step of the last kill
    for number, row in enumerate(rows):
        later = [one["resumed_after_step"] for one in rows[number:]]
        level = next(step for step in later if step is not None)  # what the next one goes on from
        kill, points = row["kill"], row["points"]
        ready = points[0][0] if points else kill["moment"]
        axis.vlines(where[0], level, where[1], color="#d55e00", linewidth=4, zorder=3)
        axis.hlines(level, where[0], ready, color="0.6", linewidth=1.2)
        trained = [(ready, level), *points]
        if kill:
            where = (max(kill["moment"], trained[-1][0]), trained[-1][1])
            trained.append(where)
        axis.plot(*zip(*trained, strict=True), color="#0072b2", linewidth=2.5)
        if kill:
            axis.plot(*where, **MARKERS[kill["hit"]], zorder=4)
    axis.plot([], [], color="#0072b2", linewidth=2.5, label="the run that is killed")
    axis.plot([], [], color="#d55e00", linewidth=4, label="steps lost: back to the checkpoint")
    axis.plot([], [], color="0.6", linewidth=1.2, label="starting again")
    hits = [row["kill"]["hit"] for row in rows if row["kill"]]
    for kind in sorted(set(hits)):
        label = f"killed {WORDS[kind]}: {hits.count(kind)}"
        axis.plot([], [], **MARKERS[kind], linestyle="none", label=label)
    axis.axhline(found["steps"], color="0.8", linewidth=0.8, zorder=0)
    axis.set_xlabel("seconds since the first launch")
    axis.set_ylabel("optimizer steps")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
