"""Count the bytes that each rank sends in an all-reduce, and compare them with formulas.

N is the number of ranks, and S is the size of the tensor in bytes. The algorithms are in ring.py.
"""

from pathlib import Path

from accel_demo import show
from accel_demo.anatomy.wire import Message

RANK_COUNTS = range(2, 65)  # the values of N in the picture of the formulas


def chunk_sizes(length: int, element_size: int, world_size: int) -> list[int]:
    """Return how many bytes each chunk has if `ring.split` splits a tensor of `length` elements."""
    shorter, longer = divmod(length, world_size)
    return [(shorter + (rank < longer)) * element_size for rank in range(world_size)]


def gather_broadcast_bytes(rank: int, sizes: list[int]) -> tuple[int, int]:
    """Return the bytes a rank sends and receives: (N−1)·S each on rank 0, S each on other ranks.

    Here and below, `sizes` are the N chunk sizes from `chunk_sizes`, whose sum is S.
    """
    messages = len(sizes) - 1 if rank == 0 else 1
    return messages * sum(sizes), messages * sum(sizes)


def naive_ring_bytes(rank: int, sizes: list[int]) -> tuple[int, int]:
    """Return the bytes a rank sends and receives: (N−1)·S each."""
    return (len(sizes) - 1) * sum(sizes), (len(sizes) - 1) * sum(sizes)


def chunked_ring_bytes(rank: int, sizes: list[int]) -> tuple[int, int]:
    """Return the bytes a rank sends and receives: 2(N−1)/N·S each if N divides the length.

    In each of the two phases, a rank sends all chunks but one and receives all chunks but one. In
    the first phase, rank r does not send chunk r and does not receive chunk r − 1. In the second
    phase, it does not send chunk r + 1 and does not receive chunk r.
    """
    before, own, after = (sizes[(rank + offset) % len(sizes)] for offset in (-1, 0, 1))
    return 2 * sum(sizes) - own - after, 2 * sum(sizes) - before - own


FORMULAS = {  # with the same keys as `ring.ALGORITHMS`
    "gather + broadcast": (gather_broadcast_bytes, "rank 0: (N−1)·S, others: S"),
    "naive ring": (naive_ring_bytes, "(N−1)·S"),
    "chunked ring": (chunked_ring_bytes, "2(N−1)/N·S"),
}


def step_table(log: list[Message], world_size: int) -> str:
    """Return a table of the chunk that each rank sends in each step of the chunked ring."""
    head = [f"rank {rank} → {(rank + 1) % world_size}" for rank in range(world_size)]
    rows = []
    for step in range(1, 2 * world_size - 1):
        phase = "reduce-scatter" if step < world_size else "all-gather"
        rows.append([step, phase, *(message.label for message in log if message.step == step)])
    return show.table(["step", "phase", *head], rows)


def byte_table(logs: dict[str, list[Message]], sizes: list[int]) -> str:
    """Return a table of the bytes each rank sends and receives, checked against the formulas."""
    ranks, rows = range(len(sizes)), []
    for name, (bytes_of, formula) in FORMULAS.items():
        steps = max((message.step for message in logs[name]), default=0)
        counts = [bytes_sent_and_received(logs[name], rank) for rank in ranks]
        expected = [bytes_of(rank, sizes) for rank in ranks]
        for index, direction in enumerate(("sends", "receives")):
            by_rank = [count[index] for count in counts]
            is_exact = by_rank == [count[index] for count in expected]
            agrees = "to the byte" if is_exact else "NO"
            rows.append([name, steps, direction, *by_rank, sum(by_rank), formula, agrees])
    head = [*(f"rank {rank}" for rank in ranks), "all ranks"]
    return show.table(["all-reduce", "steps", "a rank", *head, "formula", "agrees"], rows)


def bytes_sent_and_received(log: list[Message], rank: int) -> tuple[int, int]:
    """Return how many bytes the rank has sent, and how many it has received."""
    sent = sum(message.size for message in log if message.source == rank)
    return sent, sum(message.size for message in log if message.target == rank)


def draw(logs: dict[str, list[Message]], sizes: list[int], path: Path) -> None:
    """Draw the steps of the chunked ring, and below them what a rank sends on 2 to 64 ranks."""
    world_size = len(sizes)
    states = holdings(logs["chunked ring"], world_size)
    columns = min(4, len(states))
    rows = -(-len(states) // columns)
    side = max(1.7, 0.42 * world_size)  # side of a grid, in inches
    height = rows * (side + 0.85) + 0.8
    figure = show.new_figure(4 * (side + 0.15) + 0.6, height + 3.4)
    figure.set_layout_engine("constrained", h_pad=0.07)
    ratios = [height, 3.4]
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios, hspace=0.04)[:, 0]
    upper.suptitle(
        "The chunked ring: how many ranks' values each chunk contains before the step.\n"
        "Outlined: the chunk sent in the step, to the next rank (from the last to the first).",
        fontsize=10,
    )
    grids = upper.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grids.flat):
        if number < len(states):
            sent = [message for message in logs["chunked ring"] if message.step == number + 1]
            _draw_grid(axes, states[number], sent)
            phase = "reduce-scatter" if number + 1 < world_size else "all-gather"
            axes.set_title(f"step {number + 1}\n{phase}" if sent else "at the end", fontsize=9)
            axes.set_xlabel("chunk" if number + columns >= len(states) else "", fontsize=9)
            axes.set_ylabel("rank" if number % columns == 0 else "", fontsize=9)
        else:
            axes.set_axis_off()
    _draw_bytes(lower.subplots(), logs, sizes)
    show.save(figure, path)


def holdings(log: list[Message], world_size: int) -> list[list[list[set[int]]]]:
    """Replay the messages of the chunked ring, and return what all chunks contain before each step.

    In each state, `state[rank][chunk]` is the set of ranks whose values this chunk contains. The
    last state is the state after the last step.
    """
    states = [[[{rank} for _ in range(world_size)] for rank in range(world_size)]]
    for step in range(1, 2 * world_size - 1):
        before = states[-1]
        after = [[set(held) for held in chunks] for chunks in before]
        for message in log:
            if message.step == step:
                chunk = _chunk(message)
                after[message.target][chunk] |= before[message.source][chunk]
        states.append(after)
    return states


def _chunk(message: Message) -> int:
    return int(message.label.removeprefix("chunk "))


def _draw_grid(axes, state: list[list[set[int]]], sent: list[Message]) -> None:
    """Draw a grid with ranks from top to bottom and chunks from left to right."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    shades = LinearSegmentedColormap.from_list("held", ["#e8f1f8", show.COLOURS[0]])
    world_size = len(state)
    for rank, chunks in enumerate(state):
        for chunk, held in enumerate(chunks):
            share = (len(held) - 1) / max(1, world_size - 1)
            cell = Rectangle((chunk, rank), 1, 1, facecolor=shades(share), edgecolor="white")
            axes.add_patch(cell)
            colour = "white" if share > 0.5 else "black"
            place = (chunk + 0.5, rank + 0.5)
            axes.text(*place, len(held), ha="center", va="center", color=colour, fontsize=9)
    orange = show.COLOURS[1]
    for message in sent:
        chunk, rank = _chunk(message), message.source
        outline = Rectangle((chunk, rank), 1, 1, fill=False, edgecolor=orange, linewidth=2.5)
        axes.add_patch(outline)
        starts = [rank + 0.75]
        if rank == world_size - 1:
            starts.append(-0.25)  # the last rank's arrow leaves at the bottom and enters at the top
        for start in starts:
            arrow = {"arrowstyle": "-|>", "color": orange, "linewidth": 2, "mutation_scale": 15}
            arrow |= {"shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (chunk + 0.5, start + 0.55), (chunk + 0.5, start), arrowprops=arrow)
    axes.set(xlim=(-0.1, world_size + 0.1), ylim=(world_size + 0.35, -0.35), aspect="equal")
    middles = [index + 0.5 for index in range(world_size)]
    axes.set_xticks(middles, range(world_size), fontsize=8)
    axes.set_yticks(middles, range(world_size), fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_bytes(axes, logs: dict[str, list[Message]], sizes: list[int]) -> None:
    """Draw the bytes that a rank sends, in multiples of S: as predicted, and as counted."""
    orange, green, blue = show.COLOURS[1], show.COLOURS[2], show.COLOURS[0]
    lines = [  # (all-reduce, rank, label, style)
        ("gather + broadcast", 0, "gather + broadcast, rank 0", {"color": orange, "linewidth": 5}),
        ("naive ring", 0, "naive ring, each rank", {"color": "black", "linestyle": "--"}),
        ("chunked ring", 0, "chunked ring, each rank", {"color": blue, "linewidth": 2.5}),
        ("gather + broadcast", 1, "gather + broadcast, the others", {"color": green}),
    ]
    for name, rank, label, style in lines:
        bytes_of = FORMULAS[name][0]
        sent = [bytes_of(rank, [1] * count)[0] / count for count in RANK_COUNTS]  # S = N bytes
        axes.plot(RANK_COUNTS, sent, label=label, **style)
        if len(sizes) > 1:
            counted = bytes_sent_and_received(logs[name], rank)[0] / sum(sizes)
            axes.plot(len(sizes), counted, "o", color="black", markerfacecolor="white", zorder=9)
    if len(sizes) > 1:
        axes.plot([], [], "o", color="black", markerfacecolor="white", label="counted in this run")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    powers = [2**power for power in range(1, 7)]
    axes.set_xticks(powers, powers)
    axes.set_yticks([1, *powers], ["S", *(f"{power} S" for power in powers)])
    axes.set_xlabel("N, the number of ranks")
    axes.set_ylabel("bytes sent by one rank")
    axes.set_title("What a rank sends, for a tensor of S bytes", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, loc="upper left")
