"""How fine and how small are the numbers of bf16 and fp16, and what becomes of a network in them?

python tutorials/10_numbers.py --plot numbers.svg
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from accel_demo import show
from accel_demo.anatomy.flags import command_line, read
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.models import make_model
from accel_demo.processes.connect import check_processes

BITS = {  # of sign, exponent and significand; the first bit of a significand is not stored
    torch.float32: (1, 8, 23),
    torch.bfloat16: (1, 8, 7),
    torch.float16: (1, 5, 10),
}
BATCH = 128
ACTIVATIONS, COPIES = "activations for backward", "copies of weights"
INDICES = "indices of max pooling"


def main() -> None:
    options = read(command_line(__doc__))
    print("The three formats:\n")
    head = ["format", "bits", "of the significand", "epsilon", "smallest", "largest"]
    print(show.table(head, [describe(dtype) for dtype in BITS]))
    print("\nA gradient, after a linear layer under autocast has handed it back:\n")
    print(show.table(["gradient", "float32", "bf16", "fp16", "fp16, `GradScaler`"], gradients()))
    print("\nWhat a function under autocast to bf16 gives, on a CPU:\n")
    print(show.table(["function", "given float32", "given bfloat16"], functions()))
    exact, low = step(torch.float32), step(torch.bfloat16)
    print("\n`small_cnn` in bf16 against float32, differences in epsilons of bf16:\n")
    print(show.table(["what", "differs by"], differences(exact, low)))
    print(f"\nBytes of a training step of `small_cnn`, {BATCH} images:\n")
    rows = [[kind, size, low["bytes"][kind]] for kind, size in exact["bytes"].items()]
    print(show.table(["what", "float32", "bf16 autocast", "share"], [share(*row) for row in rows]))
    print("\nWhat `Accelerator(mixed_precision=…)` does on a CPU:\n")
    head = ["`mixed_precision`", "its first layer gives", "scaler", "our train files say"]
    print(show.table(head, [asked_for(precision) for precision in ("no", "bf16", "fp16")]))
    if options.plot:
        draw(rows, options.plot)


def describe(dtype: torch.dtype) -> list:
    """What a format can hold. Epsilon is the distance from 1 to the next larger number."""
    info, zero = torch.finfo(dtype), torch.zeros((), dtype=dtype)
    smallest = torch.nextafter(zero, zero + 1).item()
    bits = BITS[dtype][2] + 1
    assert info.eps == 2 ** (1 - bits) and info.bits == sum(BITS[dtype])
    epsilon = f"2^-{bits - 1} = {info.eps:.0e}"
    return [name(dtype), info.bits, bits, epsilon, f"{smallest:.0e}", f"{info.max:.0e}"]


def gradients() -> list[list[str]]:
    """A layer with the weight 1 hands back the gradient it is given, in the autocast dtype."""
    rows = []
    for size in (1e-3, 1e-7, 1e-8):
        row = [f"{size:.0e}"]
        for dtype, scale in [*((dtype, 1) for dtype in BITS), (torch.float16, 2**16)]:
            inputs, weight = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                output = F.linear(inputs, weight)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
            scaler.scale((output.float() * size).sum()).backward()
            left = inputs.grad.item() / scale
            digits = "kept" if abs(left / size - 1) < torch.finfo(dtype).eps else f"{left:.1e}"
            row.append(digits if left else "0: lost")
        rows.append(row)
    return rows


def functions() -> list[list[str]]:
    """The dtypes of what functions give, whatever the layers around them."""
    images, kernel, labels = torch.rand(4, 6, 8, 8), torch.rand(3, 6, 3, 3), torch.arange(4)
    weight, statistics = torch.rand(6, 6), (torch.zeros(6), torch.ones(6))
    calls = {
        "`conv2d`": lambda x: F.conv2d(x, kernel),
        "`linear`": lambda x: F.linear(x[:, :, 0, 0], weight),
        "`max_pool2d`": lambda x: F.max_pool2d(x, 2),
        "`batch_norm`": lambda x: F.batch_norm(x, *statistics, training=True),
        "`relu`": F.relu,
        "`softmax`": lambda x: F.softmax(x[:, :, 0, 0], dim=1),
        "`x + y`, with a float32 `y`": lambda x: x + images,
        "`cross_entropy`": lambda x: F.cross_entropy(x[:, :, 0, 0], labels),
        "`mse_loss`": lambda x: F.mse_loss(x, images.to(x.dtype)),
    }
    with torch.autocast("cpu", torch.bfloat16):
        return [
            [
                label,
                *(name(call(images.to(dtype)).dtype) for dtype in (torch.float32, torch.bfloat16)),
            ]
            for label, call in calls.items()
        ]


def step(dtype: torch.dtype) -> dict:
    """One training step of small_cnn under autocast: its numbers, and the bytes of each kind."""
    torch.manual_seed(0)
    model, images = make_model(TrainConfig()), torch.randn(BATCH, 1, 28, 28)
    images, labels = images.to(memory_format=torch.channels_last), torch.arange(BATCH) % 10
    optimizer, saved = torch.optim.AdamW(model.parameters()), {}
    weights = list(model.parameters())
    kept_anyway = {tensor.data_ptr() for tensor in (*weights, *model.buffers(), images, labels)}
    copies = [weight.detach().to(dtype) for weight in weights]

    def keep(tensor):  # called with each tensor that forward keeps for backward
        is_copy = any(tensor.shape == copy.shape and tensor.equal(copy) for copy in copies)
        kind = COPIES if is_copy else ACTIVATIONS if tensor.is_floating_point() else INDICES
        if tensor.data_ptr() not in kept_anyway:
            saved[tensor.untyped_storage().data_ptr()] = kind, tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(images).float()
        F.cross_entropy(logits, labels).backward()
    optimizer.step()
    size = {
        "weights": bytes_of(weights),
        "gradients": bytes_of(weight.grad for weight in weights),
        "AdamW's state": bytes_of(
            v for values in optimizer.state.values() for v in values.values()
        ),
    }
    for kind in (COPIES, ACTIVATIONS, INDICES):
        size[kind] = sum(number for one, number in saved.values() if one == kind)
    return {
        "bytes": size,
        "logits": logits.detach(),
        "first gradient": weights[0].grad,
        "last gradient": weights[-2].grad,
    }


def differences(exact: dict, low: dict) -> list[list[str]]:
    """Length of the difference over the length of what float32 gives, over bf16's epsilon."""
    alone, layers = [], [(torch.nn.Conv2d(24, 64, 3), (8, 24, 9, 9))]
    for layer, shape in (*layers, (torch.nn.Linear(2048, 10), (8, 2048))):
        inputs = torch.randn(shape)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            alone.append(off(layer(inputs).float(), layer.double()(inputs.double())))
    rows = [["a convolution or a linear layer alone", within(max(alone), 1 / 8, 1)]]
    for label, key, most in (
        ("logits", "logits", 4),
        ("gradient of the last layer's weights", "last gradient", 4),
        ("gradient of the first layer's weights", "first gradient", 32),
    ):
        rows.append([label, within(off(low[key], exact[key]), 1 / 8, most)])
    return rows


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found - right).norm() / right.norm() / torch.finfo(torch.bfloat16).eps).item()


def within(value: float, least: float, most: float) -> str:
    """As coarse as it is the same on every machine."""
    return f"{least:g} to {most:g}" if least < value < most else f"{value:.2g}"


def share(kind: str, before: int, after: int) -> list[str]:
    return [kind, f"{before:,}", f"{after:,}", f"{after / before:.2f}" if before else "new"]


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def asked_for(precision: str) -> list[str]:
    """What Accelerate computes in on a CPU, and what the train files of this repository say."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, gave = Accelerator(mixed_precision=precision, cpu=True), []
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer)
    layer.register_forward_hook(lambda layer, inputs, output: gave.append(name(output.dtype)))
    accelerator.prepare(model)(torch.ones(1, 2))
    try:
        check_processes(1, accelerator.device, precision)  # the train files call it first
        said = "nothing, and trains"
    except UserError as error:
        said = f"error: {error}"
    return [precision, gave[0], "none" if accelerator.scaler is None else "yes", said]


def draw(rows: list[list], path) -> None:
    """The bits of each format; the bytes of a step in float32 and under autocast."""
    figure = show.new_figure(9, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=[4, 5])
    for place, parts in enumerate(BITS.values()):
        start, labels = 0, ("sign", "exponent: range", "significand: digits")
        colours = (show.COLOURS[7], show.COLOURS[4], show.COLOURS[2])
        for part, colour, label in zip(parts, colours, labels, strict=True):
            label = None if place else label
            options = {"color": colour, "edgecolor": "white", "height": 0.6, "label": label}
            left.barh(place, part, left=start, **options)
            if part > 1:
                left.text(start + part / 2, place, part, ha="center", va="center", fontsize=9)
            start += part
    left.set_yticks(range(len(BITS)), [name(dtype) for dtype in BITS])
    left.invert_yaxis()
    left.set_title("Bits of a number", loc="left", fontsize=10)
    left.set_xlim(right=38)  # room for the legend beside the shorter formats
    left.legend(frameon=False, fontsize=9, loc="lower right", handlelength=1)
    for offset, column, label in ((-0.2, 1, "float32"), (0.2, 2, "bf16 autocast")):
        places = [place + offset for place in range(len(rows))]
        sizes = [row[column] / 1e6 for row in rows]
        right.barh(places, sizes, height=0.4, label=label, color=show.COLOURS[column - 1])
        for place, size in zip(places, sizes, strict=True):
            right.text(size + 0.2, place, f"{size:.2f}", va="center", fontsize=8)
    right.set_yticks(range(len(rows)), [row[0] for row in rows])
    right.invert_yaxis()
    right.set_title(f"MB of a step, {BATCH} images", loc="left", fontsize=10)
    right.margins(x=0.15)
    right.legend(frameon=False, fontsize=9, loc="upper right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    show.save(figure, path)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
