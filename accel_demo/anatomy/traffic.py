"""Count the bytes that each rank sends in an all-reduce, and compare them with formulas.

N is the number of ranks, and S is the size of the tensor in bytes. The algorithms are in ring.py.
"""

from pathlib import Path

from accel_demo import show
from accel_demo.anatomy.wire import Message


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
UNEVEN = "2·S − 2 chunks"  # formula of the chunked ring if the chunks differ in size


def step_table(log: list[Message], world_size: int) -> str:
    """Return a table of the chunk that each rank sends in each step of the chunked ring."""
    head = [f"rank {rank} → {(rank + 1) % world_size}" for rank in range(world_size)]
    rows = []
    for step in range(1, 2 * world_size - 1):
        phase = "reduce-scatter" if step < world_size else "all-gather"
        rows.append([step, phase, *(message.label for message in log if message.step == step)])
    return show.table(["step", "phase", *head], rows)


def byte_table(logs: dict[str, list[Message]], sizes: list[int]) -> str:
    """Return a table of the bytes that each rank sends.

    The last column says whether the bytes that ranks send and receive are those of the formulas.
    """
    ranks, rows = range(len(sizes)), []
    for name, (bytes_of, formula) in FORMULAS.items():
        steps = max((message.step for message in logs[name]), default=0)
        counts = [bytes_sent_and_received(logs[name], rank) for rank in ranks]
        expected = [bytes_of(rank, sizes) for rank in ranks]
        sent, agrees = [sent for sent, _ in counts], counts == expected
        if name == "chunked ring" and len(set(sizes)) > 1:
            formula = UNEVEN
        rows.append([name, steps, *sent, sum(sent), formula, "to the byte" if agrees else "NO"])
    head = [*(f"rank {rank}" for rank in ranks), "all ranks"]
    return show.table(["all-reduce", "steps", *head, "formula", "agrees"], rows)


def bytes_sent_and_received(log: list[Message], rank: int) -> tuple[int, int]:
    """Return how many bytes the rank has sent, and how many it has received."""
    sent = sum(message.size for message in log if message.source == rank)
    return sent, sum(message.size for message in log if message.target == rank)


def draw(log: list[Message], world_size: int, path: Path) -> None:
    """Draw what the chunks contain before each step of the chunked ring, and at the end.

    `log` lists the messages of the chunked ring.
    """
    states = holdings(log, world_size)
    columns = min(3, len(states))
    rows = -(-len(states) // columns)
    side = max(1.45, 0.36 * world_size)  # side of a grid, in inches
    figure = show.new_figure(max(4.9, columns * (side + 0.15) + 0.3), rows * (side + 0.95) + 0.9)
    figure.suptitle(
        "The chunked ring: how many ranks' values\neach chunk contains before the step. Outlined:\n"
        "the chunk that the rank sends to the next one.",
        fontsize=10,
    )
    figure.set_layout_engine("constrained", h_pad=0.12)
    grids = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grids.flat):
        if number < len(states):
            sent = [message for message in log if message.step == number + 1]
            _draw_grid(axes, states[number], sent)
            phase = "reduce-scatter" if number + 1 < world_size else "all-gather"
            axes.set_title(f"step {number + 1}\n{phase}" if sent else "at the end", fontsize=10)
            axes.set_xlabel("chunk", fontsize=10)
            axes.set_ylabel("rank" if number % columns == 0 else "", fontsize=10)
        else:
            axes.set_axis_off()
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

    shades = LinearSegmentedColormap.from_list("held", ["#e8f1f8", show.COLORS[0]])
    world_size = len(state)
    for rank, chunks in enumerate(state):
        for chunk, held in enumerate(chunks):
            share = (len(held) - 1) / max(1, world_size - 1)
            cell = Rectangle((chunk, rank), 1, 1, facecolor=shades(share), edgecolor="white")
            axes.add_patch(cell)
            color = "white" if share > 0.8 else "black"
            place = (chunk + 0.5, rank + 0.5)
            axes.text(*place, len(held), ha="center", va="center", color=color, fontsize=10)
    orange = show.COLORS[1]
    for message in sent:
        chunk, rank = _chunk(message), message.source
        outline = Rectangle((chunk, rank), 1, 1, fill=False, edgecolor=orange, linewidth=2.5)
        axes.add_patch(outline)
        starts = [rank + 0.8]
        if rank == world_size - 1:
            starts.append(-0.2)  # the last rank's arrow leaves at the bottom and enters at the top
        for start in starts:
            arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.5, "mutation_scale": 12}
            arrow |= {"shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (chunk + 0.5, start + 0.34), (chunk + 0.5, start), arrowprops=arrow)
    axes.set(xlim=(-0.1, world_size + 0.1), ylim=(world_size + 0.35, -0.35), aspect="equal")
    middles = [index + 0.5 for index in range(world_size)]
    axes.set_xticks(middles, range(world_size), fontsize=10)
    axes.set_yticks(middles, range(world_size), fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
