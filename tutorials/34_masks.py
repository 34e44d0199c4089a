"""Show which dropout masks a resumed epoch draws, without and with a generator for the loader.

python tutorials/34_masks.py --plot masks.svg
"""

from pathlib import Path

import torch
from torch.nn.functional import dropout
from torch.utils.data import DataLoader

from accel_demo import show
from accel_demo.options import Parser

BATCHES, SAVE_AFTER = 12, 6
TITLES = {
    False: "Level 4: the loader draws from the global generator",
    True: "Level 5: the loader has its own generator",
}
RESTART = SAVE_AFTER + 1  # a column of the picture, with no batch
SEED = "seed that the loader draws"
EQUAL, DIFFERENT = "dropout mask", "mask that differs from the uninterrupted run"
COLORS = {SEED: show.COLORS[1], EQUAL: show.COLORS[5], DIFFERENT: show.COLORS[4]}


def main() -> None:
    options = Parser(__doc__, plot=True).parse_args()
    masks = {own: masks_of(own) for own in TITLES}
    if options.plot:
        draw(masks, options.plot)
        return
    for own, title in TITLES.items():
        full, resumed = masks[own]
        equal = sum(map(torch.equal, full[SAVE_AFTER:], resumed))
        print(f"{title}: {equal} of {len(resumed)} masks are equal after the save")


def masks_of(own_generator: bool) -> tuple[list, list]:
    """Return the masks of an uninterrupted epoch, and of one that is resumed after the save."""
    torch.manual_seed(7)
    generator = torch.Generator() if own_generator else None
    loader = DataLoader(range(BATCHES), generator=generator)
    full = []
    for number in loader:
        full.append(dropout(torch.ones(99)))
        if number + 1 == SAVE_AFTER:
            saved = torch.get_rng_state()
    torch.set_rng_state(saved)
    return full, [dropout(torch.ones(99)) for number in loader if number >= SAVE_AFTER]


def draw(masks: dict, path: Path) -> None:
    """Draw a box for each mask, and for each seed that the loader draws."""
    figure = show.new_figure(6.5, 4.6)
    panels = figure.subplots(2, 1, sharex=True)
    for panel, (own, (full, resumed)) in zip(panels, masks.items(), strict=True):
        panel.set_title(TITLES[own], fontsize=11, loc="left")
        box(panel, 0, 0, "seed", SEED)
        for batch in range(1, BATCHES + 1):
            box(panel, 0, column(batch), batch, EQUAL)
        box(panel, 1, RESTART, "seed", SEED)
        for batch, mask in enumerate(resumed, start=SAVE_AFTER + 1):
            is_equal = torch.equal(mask, full[batch - 1])
            text, kind = (batch, EQUAL) if is_equal else ("≠", DIFFERENT)
            box(panel, 1, column(batch), text, kind)
        panel.plot([SAVE_AFTER + 0.5] * 2, [-0.5, 1.5], color="black", linewidth=2)
        panel.text(SAVE_AFTER + 0.3, 1, "load_state →", fontsize=10, ha="right", va="center")
        panel.set(xlim=(-0.6, BATCHES + 1.6), ylim=(1.55, -0.55))
        panel.set_yticks([0, 1], ["uninterrupted", "resumed"], fontsize=11)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    batches = range(1, BATCHES + 1)
    panels[1].set_xticks([0, *map(column, batches)], ["start", *batches], fontsize=10)
    panels[1].set_xlabel("batch of the second epoch; black line: the save", fontsize=11)
    for kind, color in COLORS.items():
        panels[0].bar(0, 0, color=color, label=kind)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    show.save(figure, path)


def column(batch: int) -> int:
    """Return the place of a batch. Between the save and the next batch is the restart."""
    return batch + (batch > SAVE_AFTER)


def box(panel, row: int, column: int, text, kind: str) -> None:
    panel.barh(row, 0.9, left=column - 0.45, height=0.7, color=COLORS[kind])
    fontsize = 9 if text == "seed" else 11
    panel.text(column, row, text, ha="center", va="center", fontsize=fontsize)


if __name__ == "__main__":
    main()
