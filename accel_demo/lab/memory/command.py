"""Where a training's memory goes: by formula beside measured, for DataParallel, DDP and FSDP2.

accel-demo memory
accel-demo memory --model resnet18 --optimizer sgd --plot memory.svg

The formulas know the shapes of the network alone. Counted are the live tensors of a training step;
measured is the process (its resident set size), or on GPUs what CUDA's allocator has given out.
nn.DataParallel is one process, and on a CPU all of its devices are that process together.
"""

from tqdm import tqdm

from accel_demo.anatomy import gil
from accel_demo.anatomy.memory import OPTIMIZERS
from accel_demo.config import MODELS
from accel_demo.errors import UserError
from accel_demo.lab import flags
from accel_demo.lab.memory import formula, tables
from accel_demo.lab.memory.formula import KINDS, STRATEGIES, Bytes
from accel_demo.lab.memory.measure import measure_each
from accel_demo.processes.connect import own_device
from accel_demo.processes.group import PRELOADED, results_by_rank
from accel_demo.processes.launch import start_preloading

BATCH_SIZE, QUICK_BATCH_SIZE = 32, 2  # images per device
OPTIMIZER, QUICK_OPTIMIZER = "adamw", "sgd"
LEFT_OUT = [
    "BatchNorm's buffers, the images, and single numbers such as AdamW's count of steps",
    "the gradients on nn.DataParallel's further devices, there within backward alone",
    "the buffer FSDP2 gathers a layer in, as large as that layer, kept until the next one has come",
    "a GPU's CUDA context, what cuDNN keeps for itself, and pieces the allocator holds unused",
    "the pages of memory a tensor does not fill: at most 4096 bytes of each",
    "what the C library keeps of freed memory, where it is not glibc",
]


def main(arguments: list[str]) -> int:
    options = read(arguments)
    choices = (options.model, options.optimizer, options.processes, options.batch_size)
    alone, connected = STRATEGIES[:1], STRATEGIES[1:]  # nn.DataParallel is one process
    places = []
    with tqdm(total=len(STRATEGIES), desc="measuring", unit="strategy", leave=False) as bar:
        start_preloading(PRELOADED)  # it imports torch while this process is at work
        with gil.one_torch_thread():
            here = measure_each(own_device(), alone, *choices)
        bar.update(len(alone))
        ranks = results_by_rank(measure_each, options.processes, connected, *choices)
        bar.update(len(connected))
    for strategies, answers in ((alone, [here]), (connected, ranks)):
        for strategy in strategies:
            places += places_of(strategy, [one[strategy] for one in answers], *choices)
    network = formula.on_meta(options.model)
    found = {
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "optimizer": options.optimizer,
        "processes": options.processes,
        "images_per_device": options.batch_size,
        "places": places,
        "left_out": LEFT_OUT,
    }
    print(tables.text(found))
    if options.json:
        flags.write_json(options.json, found)
    if options.plot:
        tables.draw(found, options.plot)
    return 0


def read(arguments: list[str]):
    """The options. Raises `UserError` for what could not be measured."""
    quick = f"{QUICK_BATCH_SIZE} images per device instead of {BATCH_SIZE}, {QUICK_OPTIMIZER}"
    parser = flags.parser_of("memory", __doc__, quick=quick)
    flags.add_processes(parser, 2, "ranks of DDP and FSDP2, devices of nn.DataParallel")
    help = "the network to train (default: vgg11)"
    parser.add_argument("--model", choices=MODELS, default="vgg11", help=help)
    help = "what it is trained with (default: adamw)"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help=help)
    help = f"images per device (default: {BATCH_SIZE})"
    parser.add_argument("--batch-size", type=int, metavar="N", help=help)
    options = flags.read(parser, arguments)
    options.optimizer = options.optimizer or (QUICK_OPTIMIZER if options.quick else OPTIMIZER)
    if options.batch_size is None:
        options.batch_size = QUICK_BATCH_SIZE if options.quick else BATCH_SIZE
    least = 2 if options.model.startswith("resnet") else 1  # one number has no batch statistics
    if options.batch_size < least:
        raise UserError(
            f"--batch-size must be at least {least} for {options.model}, got {options.batch_size}"
        )
    return options


def places_of(
    strategy: str,
    answers: list[dict],
    model: str,
    optimizer: str,
    processes: int,
    batch_size: int,
) -> list[dict]:
    """What was predicted, counted and measured at each place, with the error of the prediction."""
    choices = (strategy, model, optimizer)
    if strategy != "nn.DataParallel":
        predicted = formula.predict(*choices, processes, batch_size)
        answers_and_sizes = [(answer, answer["measured"][0]) for answer in answers]
        names = [f"rank {rank}" for rank in range(processes)]
    else:
        on_cpu = answers[0]["device"] == "cpu"
        devices = processes if on_cpu else len(answers[0]["measured"])
        predicted = formula.predict(*choices, devices, batch_size)
        names = [f"device {device}" for device in range(devices)]
        devices_alone = predicted
        if on_cpu and devices > 1:
            predicted, names = [sum_of(predicted)], [f"all {devices} devices"]
        answers_and_sizes = [(answers[0], sizes) for sizes in answers[0]["measured"]]
    places = []
    for name, sizes, (answer, measured) in zip(names, predicted, answers_and_sizes, strict=True):
        is_whole = len(answer["measured"]) == 1  # else the tensors were counted over all devices
        places.append(
            {
                "strategy": strategy,
                "place": name,
                "device": answer["device"],
                "connected_processes": answer["connected_processes"],
                "predicted": sizes,
                "counted": answer["counted"] if is_whole else {},
                "measured": measured,
                "relative_error": {
                    kind: (sizes[kind] - measured[kind]) / measured[kind]
                    for kind in KINDS
                    if sizes[kind] and measured[kind]
                },
            }
        )
        if strategy == "nn.DataParallel":
            places[-1]["predicted_of_each_device"] = devices_alone
    return places


def sum_of(places: list[Bytes]) -> Bytes:
    """All devices together."""
    return {kind: sum(sizes[kind] for sizes in places) for kind in KINDS}
