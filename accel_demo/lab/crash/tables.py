"""Print and draw the result of `accel-demo crash`."""

from pathlib import Path

from accel_demo import show
from accel_demo.lab.crash.result import CrashResult, LaunchResult
from accel_demo.wording import counted

PHASES = {"save": "during a save", "step": "in a step", "start-up": "during start-up"}
MARKERS = {
    "save": {"marker": "X", "color": "black", "markersize": 8},
    "step": {"marker": "o", "color": "white", "markeredgecolor": "black", "markersize": 8},
    "start-up": {"marker": "s", "color": show.COLORS[2], "markersize": 8},
}


def sentence(number: int, launch: LaunchResult) -> str:
    """Return a line about a launch: where it started, its last step, and how it ended."""
    parts = []
    if (step := launch.resumed_after_step) is not None:
        parts.append(f"resumed after step {step}" if step else "started from the beginning")
    if launch.points:
        replayed = counted(launch.replayed_steps, "step")
        again = f" ({replayed} replayed)" if launch.replayed_steps else ""
        parts.append(f"reached step {launch.points[-1][1]}{again}")
    end = "finished"
    if kill := launch.kill:
        end = f"killed rank {kill.rank} {PHASES[kill.actual_phase]}"
        if kill.actual_phase != kill.planned_phase:
            end += f" (planned: {PHASES[kill.planned_phase]})"
    parts.append(f"then {end}" if parts else end)
    return f"launch {number}: {', '.join(parts)}"


def summary(result: CrashResult) -> str:
    """Return the totals over all launches and the comparison with the uninterrupted run."""
    launches, comparison = result.launches, result.comparison
    phases = [launch.kill.actual_phase for launch in launches if launch.kill]
    trained = sum(len(launch.points) for launch in launches)
    replayed = sum(launch.replayed_steps for launch in launches)
    complete = sum(len(launch.complete_checkpoints) for launch in launches)
    damaged = sum(len(launch.damaged_checkpoints) for launch in launches)
    unfinished = sum(launch.left_unfinished_checkpoint for launch in launches)
    resumed = sum(launch.resumed_from is not None for launch in launches)
    wrong = sum(not launch.used_newest_checkpoint for launch in launches)
    newest = f"{wrong} NOT from the newest" if wrong else "always from the newest"
    connected = sum(launch.has_connected for launch in launches)
    killed = ", ".join(f"{phases.count(phase)} {words}" for phase, words in PHASES.items())
    different = len(comparison.different_tensors)
    weights = f"DIFFERENT in {different} of" if different else "bitwise equal in all"
    return f"""
kills: {len(phases)} ({killed})
steps: {result.steps}, plus {replayed} replayed ({trained} trained in total)
checkpoints after the launches: {complete} complete, {damaged} damaged, {unfinished} unfinished
resumed: {counted(resumed, "time")}, {newest} complete checkpoint
damaged checkpoints used: {sum(launch.used_damaged_checkpoint for launch in launches)}
connected: {counted(result.processes, "process")} in {connected} of {len(launches)} launches
metrics: equal in {comparison.equal_logged_steps} of {comparison.logged_steps} steps
final weights: {weights} {comparison.tensors} tensors"""


def draw(result: CrashResult, path: Path) -> None:
    """Plot each run's position against the number of optimizer steps that it has trained.

    Steps, not seconds: restarting takes longer than all steps, and would fill most of the picture.
    """
    from matplotlib.ticker import MaxNLocator

    figure = show.new_figure(6.5, 5.4)
    axis = figure.subplots()
    blue, orange = show.COLORS[0], show.COLORS[3]
    diagonal = [0, result.steps]
    axis.plot(diagonal, diagonal, color="0.3", linewidth=1, zorder=1, label="uninterrupted run")
    trained = killed_step = 0
    for index, launch in enumerate(result.launches):
        # If a launch was killed before it resumed, use the step at which a later launch resumed.
        resumed = [later.resumed_after_step for later in result.launches[index:]]
        first_step = next(step for step in resumed if step is not None)
        if lost := killed_step - first_step:
            axis.vlines(trained, first_step, killed_step, color=orange, linewidth=4, zorder=5)
            text = {"color": orange, "fontsize": 12, "fontweight": "bold", "ha": "center"}
            below = {"xytext": (0, -7), "textcoords": "offset points", "va": "top"}
            axis.annotate(f"−{lost}", (trained, first_step), **below, **text)
        steps = [first_step, *(step for _, step in launch.points)]
        axis.plot(range(trained, trained + len(steps)), steps, color=blue, linewidth=2.5, zorder=2)
        trained, killed_step = trained + len(launch.points), steps[-1]
        if launch.kill:
            axis.plot(trained, killed_step, **MARKERS[launch.kill.actual_phase], zorder=4)
    axis.plot([], [], color=blue, linewidth=2.5, label="killed run")
    axis.plot([], [], color=orange, linewidth=4, label="steps lost by a kill")
    phases = [launch.kill.actual_phase for launch in result.launches if launch.kill]
    for phase in sorted(set(phases)):
        label = f"killed {PHASES[phase]}: {phases.count(phase)}"
        axis.plot([], [], **MARKERS[phase], linestyle="none", label=label)
    axis.axhline(result.steps, color="0.8", linewidth=0.8, zorder=0)
    below = {"xytext": (0, -5), "textcoords": "offset points", "va": "top"}
    axis.annotate(f"last step: {result.steps}", (0, result.steps), **below, fontsize=11)
    axis.set_xlabel("optimizer steps trained, including repeated ones", fontsize=11)
    axis.set_ylabel("position in the run (optimizer step)", fontsize=11)
    axis.set_ylim(bottom=-result.steps / 10)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=11)
    show.save(figure, path)
