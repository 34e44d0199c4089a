"""Which sample did each rank read? Read from the batches that came out of the loaders.

accel-demo shards
accel-demo shards --processes 3 --batch-size 5 --plot shards.png
accel-demo shards --no-set-epoch
accel-demo shards --way Accelerate --no-even-batches

Both ways pad, so that all ranks have equally many batches: `DistributedSampler` the dataset,
Accelerate the last batches. So some samples are read twice, and a metric must not count them twice.
"""

import textwrap
from collections import Counter
from itertools import chain

from accel_demo.errors import UserError
from accel_demo.lab import flags
from accel_demo.lab.shards.reading import (
    ACCELERATE,
    TORCH,
    Dealing,
    in_words,
    metric_table,
    read_all,
    reading_table,
    what_would_hang,
)
from accel_demo.processes.group import results_by_rank
from accel_demo.show import save
from accel_demo.wording import counted

QUICK_EPOCHS = 2
MOST_SAMPLES, MOST_EPOCHS = 10_000, 100  # a gather for each batch: more would take minutes
MOST_DRAWN_SAMPLES, MOST_DRAWN_EPOCHS = 400, 20


def main(arguments: list[str]) -> int:
    """Read, and print who read what and what a metric would count."""
    dealings, options = read_options(arguments)
    preloaded = ("torch", read_all.__module__)  # no optimizer, so no torch._dynamo
    found = merge(results_by_rank(read_all, options.processes, dealings, preloaded=preloaded))
    print(f"{counted(found['processes'], 'connected process')} on {found['device']}: ", end="")
    print(f"{in_words(dealings[0], found['processes'])}\n")
    print(reading_table(found["ways"]))
    print("\nWhat a metric counts in an epoch:\n")
    print(metric_table(found["ways"]))
    for way in found["ways"]:
        if "gather" not in way:
            said = f"{way['name']}: {what_would_hang(way['epochs'][0]['batches'])}"
            print(f"\n{textwrap.fill(said, 100)}")
    if options.plot:
        from accel_demo.lab.shards.picture import draw

        save(draw(found["ways"]), options.plot)
    if options.json:
        flags.write_json(options.json, found)
    return 0


def read_options(arguments: list[str]):
    """What to deal out, and the options. Raises `UserError` for what cannot be dealt."""
    parser = flags.parser_of("shards", __doc__, quick=f"reads {QUICK_EPOCHS} epochs at most")
    numbers = {
        "--samples": (22, "how many samples the dataset has"),
        "--batch-size": (4, "of the DataLoader: samples per process, or of all with split_batches"),
        "--epochs": (3, "how many epochs they read"),
    }
    flags.add_processes(parser, 2, "how many processes read")
    for flag, (default, help) in numbers.items():
        help += f" (default: {default})"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=help)
    parser.add_argument("--way", choices=[TORCH, ACCELERATE, "both"], default="both")
    switches = {
        "--no-set-epoch": "do not call set_epoch before each epoch",
        "--split-batches": "Accelerate cuts each batch of the DataLoader into one for each process",
        "--dispatch-batches": "Accelerate reads on rank 0 alone, and sends each rank its part",
        "--no-even-batches": "Accelerate does not pad (even_batches=False)",
        "--drop-last": "leave the last samples out instead of padding",
        "--no-shuffle": "read in the order of the dataset",
    }
    for flag, help in switches.items():
        parser.add_argument(flag, action="store_true", help=help)
    options = flags.read(parser, arguments)
    check(options)
    common = {
        "samples": options.samples,
        "epochs": min(options.epochs, QUICK_EPOCHS) if options.quick else options.epochs,
        "set_epoch": not options.no_set_epoch,
        "shuffle": not options.no_shuffle,
        "drop_last": options.drop_last,
    }
    parts = options.processes if options.split_batches else 1  # both get the same global batch
    by_torch = Dealing(TORCH, batch_size=options.batch_size // parts, **common)
    by_accelerate = Dealing(
        ACCELERATE,
        batch_size=options.batch_size,
        **common,
        split_batches=options.split_batches,
        dispatch_batches=options.dispatch_batches,
        even_batches=not options.no_even_batches,
    )
    dealings = {TORCH: [by_torch], ACCELERATE: [by_accelerate], "both": [by_torch, by_accelerate]}
    return dealings[options.way], options


def check(options) -> None:
    flags.process_counts(str(options.processes))
    limits = {"samples": MOST_SAMPLES, "batch_size": MOST_SAMPLES, "epochs": MOST_EPOCHS}
    for name, most in limits.items():
        if not 1 <= getattr(options, name) <= most:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} must be from 1 to {most}, got {getattr(options, name)}")
    if options.way == TORCH:
        for name in ("split_batches", "dispatch_batches", "no_even_batches"):
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} is Accelerate's: {TORCH} has no such option, leave it out")
    if options.dispatch_batches and options.no_even_batches:
        raise UserError(
            "--dispatch-batches always gives every rank equally much, and Accelerate ignores "
            "even_batches=False there: leave one of the two out"
        )
    if options.split_batches and options.batch_size % options.processes:
        raise UserError(
            f"--split-batches cuts a batch into {options.processes} equal parts: --batch-size must "
            f"be a multiple of {options.processes}, got {options.batch_size}"
        )
    a_round = options.batch_size * (1 if options.split_batches else options.processes)
    if options.drop_last and options.samples < a_round:
        raise UserError(
            f"--drop-last would leave nothing: a batch for every process takes {a_round} samples, "
            f"and --samples is {options.samples}"
        )
    if options.plot and (
        options.samples > MOST_DRAWN_SAMPLES or options.epochs > MOST_DRAWN_EPOCHS
    ):
        raise UserError(
            f"--plot draws at most {MOST_DRAWN_SAMPLES} samples and {MOST_DRAWN_EPOCHS} epochs: "
            "ask for fewer, or take --json"
        )


def merge(ranks: list[dict]) -> dict:
    """What the ranks have found, as one: for each way and epoch the batches of all, by rank."""
    ways = []
    for own in zip(*(rank["found"] for rank in ranks), strict=True):
        way = {name: value for name, value in own[0].items() if name != "batches"}
        orders = list(zip(*(rank["batches"] for rank in own), strict=True))
        way["epochs"] = [
            {
                "epoch": number,
                **readings(order, way["samples"]),
                "same_order_as_epoch_1": order == orders[0] if number > 1 else None,
                "batches": list(order),
            }
            for number, order in enumerate(orders, start=1)
        ]
        ways.append(way)
    return {"processes": ranks[0]["processes"], "device": ranks[0]["device"], "ways": ways}


def readings(ranks, samples: int) -> dict[str, list[int]]:
    """Which samples were read more than once, and which never; `ranks` has the batches of each."""
    times = Counter(chain.from_iterable(chain.from_iterable(ranks)))
    return {
        "more_than_once": [sample for sample in range(samples) if times[sample] > 1],
        "never": [sample for sample in range(samples) if not times[sample]],
    }
