"""Compare the number formats float32, bf16 and fp16, and show what autocast does with them.

python tutorials/33_numbers.py --plot numbers.svg
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from accel_demo import show
from accel_demo.config import TrainConfig
from accel_demo.errors import UserError
from accel_demo.models import make_model
from accel_demo.options import Parser
from accel_demo.processes.launch_checks import check_launch

BITS = {  # stored bits: sign, exponent, significand (without its first bit, which is implicit)
    torch.float32: (1, 8, 23),
    torch.bfloat16: (1, 8, 7),
    torch.float16: (1, 5, 10),
}
TF32_BITS = (1, 8, 10)  # a format inside GPUs, without a torch.dtype
BATCH = 128
ACTIVATIONS, COPIES = "activations for backward", "copies of weights"
INDICES = "indices of max pooling"


def main() -> None:
    options = Parser(__doc__, plot=True).parse_args()
    print("The formats that are dtypes:\n")
    head = ["format", "bits", "significand bits", "epsilon", "smallest > 0", "largest"]
    print(show.table(head, [describe(dtype) for dtype in BITS]))
    print("\nGradients after backward through a linear layer under autocast:\n")
    print(show.table(["gradient", "fp32", "bf16", "fp16", "fp16, `GradScaler`"], gradients()))
    full, low = bytes_of_step(torch.float32), bytes_of_step(torch.bfloat16)
    print(f"\nBytes in memory for a training step of `small_cnn` with {BATCH} images:\n")
    rows = [[kind, size, low[kind]] for kind, size in full.items()]
    print(show.table(["memory", "fp32", "bf16 autocast", "ratio"], [ratio(*r) for r in rows]))
    print("\nEffect of `Accelerator(mixed_precision=…)` on a CPU:\n")
    head = ["`mixed_precision`", "first layer's output", "scaler", "our train files"]
    print(show.table(head, [effect_of(precision) for precision in ("no", "bf16", "fp16")]))
    if options.plot:
        draw(rows, options.plot)


def describe(dtype: torch.dtype) -> list:
    """Return a format's precision and range. Epsilon is the distance from 1 to the next number."""
    info, zero = torch.finfo(dtype), torch.zeros((), dtype=dtype)
    smallest = torch.nextafter(zero, zero + 1).item()
    bits = BITS[dtype][2] + 1
    assert info.eps == 2 ** (1 - bits) and info.bits == sum(BITS[dtype])
    epsilon = f"2^-{bits - 1} ≈ {info.eps:.0e}"
    largest = f"{info.max:,.0f}" if info.max < 1e6 else f"{info.max:.0e}"
    return [name(dtype), info.bits, bits, epsilon, f"{smallest:.0e}", largest]


def gradients() -> list[list[str]]:
    """Compute gradients of three magnitudes in each number format. Return a row per magnitude."""
    rows = []
    for size in (1e-3, 1e-7, 1e-8):
        row = [f"{size:.0e}"]
        for dtype, scale in [*((dtype, 1) for dtype in BITS), (torch.float16, 2**16)]:
            inputs, weight = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                output = F.linear(inputs, weight)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
            scaler.scale((output.float() * size).sum()).backward()
            result = inputs.grad.item() / scale
            digits = "kept" if abs(result / size - 1) < torch.finfo(dtype).eps else f"{result:.1e}"
            row.append(digits if result else "0: lost")
        rows.append(row)
    return rows


def bytes_of_step(dtype: torch.dtype) -> dict[str, int]:
    """Run a training step of small_cnn. Return the bytes of each kind of tensor in memory."""
    torch.manual_seed(0)
    model, images = make_model(TrainConfig()), torch.randn(BATCH, 1, 28, 28)
    images, labels = images.to(memory_format=torch.channels_last), torch.arange(BATCH) % 10
    optimizer, saved = torch.optim.AdamW(model.parameters()), {}
    weights = list(model.parameters())
    always_kept = {tensor.data_ptr() for tensor in (*weights, *model.buffers(), images, labels)}
    copies = [weight.detach().to(dtype) for weight in weights]
    copies += [copy.t() for copy in copies if copy.dim() == 2]  # `linear` saves a transposed copy

    def keep(tensor):  # called for each tensor that forward saves for backward
        is_copy = any(tensor.shape == copy.shape and tensor.equal(copy) for copy in copies)
        kind = COPIES if is_copy else ACTIVATIONS if tensor.is_floating_point() else INDICES
        if tensor.data_ptr() not in always_kept:
            saved[tensor.untyped_storage().data_ptr()] = kind, tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(images).float()
        F.cross_entropy(logits, labels).backward()
    optimizer.step()
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    size = {
        "weights": bytes_of(weights),
        "gradients": bytes_of(weight.grad for weight in weights),
        "AdamW's state": bytes_of(state),
    }
    for kind in (COPIES, ACTIVATIONS, INDICES):
        size[kind] = sum(nbytes for saved_as, nbytes in saved.values() if saved_as == kind)
    return size


def ratio(kind: str, before: int, after: int) -> list[str]:
    return [kind, f"{before:,}", f"{after:,}", f"{after / before:.2f}" if before else "new"]


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def effect_of(precision: str) -> list[str]:
    """Return what Accelerate and our train files do on a CPU with this `mixed_precision`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, dtypes = Accelerator(mixed_precision=precision, cpu=True), []
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer)
    layer.register_forward_hook(lambda layer, inputs, output: dtypes.append(name(output.dtype)))
    accelerator.prepare(model)(torch.ones(1, 2))
    try:
        check_launch(1, accelerator.device, precision)  # our train files call this first
        reaction = "train"
    except UserError:
        reaction = "stop with an error"
    return [precision, dtypes[0], "none" if accelerator.scaler is None else "yes", reaction]


def draw(rows: list[list], path) -> None:
    """Draw the bits of each format, and the memory use of a step in fp32 and under autocast."""
    figure = show.new_figure(5.2, 6.4)
    upper, lower = figure.subplots(2, 1, height_ratios=[2, 3])
    fp32, bf16, fp16 = BITS.values()
    formats = {"fp32": fp32, "TF32": TF32_BITS, "bf16": bf16, "fp16": fp16}
    for place, parts in enumerate(formats.values()):
        start, labels = 0, ("sign: 1 bit", "exponent: range", "significand: digits")
        colors = (show.COLORS[7], show.COLORS[4], show.COLORS[2])
        for part, color, label in zip(parts, colors, labels, strict=True):
            label = None if place else label
            options = {"color": color, "edgecolor": "white", "height": 0.6, "label": label}
            upper.barh(place, part, left=start, **options)
            if part > 1:
                upper.text(start + part / 2, place, part, ha="center", va="center", fontsize=9)
            start += part
    upper.set_yticks(range(len(formats)), list(formats))
    upper.invert_yaxis()
    upper.set_title("Bits of a number", loc="left", fontsize=10)
    upper.set_xlim(right=36)  # make room for the legend to the right of the shorter formats
    upper.legend(frameon=False, fontsize=9, loc="lower right", handlelength=1)
    for offset, column, label in ((-0.2, 1, "fp32"), (0.2, 2, "bf16 autocast")):
        places = [place + offset for place in range(len(rows))]
        sizes = [row[column] / 1e6 for row in rows]
        lower.barh(places, sizes, height=0.4, label=label, color=show.COLORS[column - 1])
        for place, size in zip(places, sizes, strict=True):
            lower.text(size + 0.2, place, f"{size:.2f}", va="center", fontsize=9)
    lower.set_yticks(range(len(rows)), [row[0].replace(" for ", "\nfor ") for row in rows])
    lower.invert_yaxis()
    lower.set_title(f"Memory of a step, {BATCH} images", loc="left", fontsize=10)
    lower.margins(x=0.15)
    lower.legend(frameon=False, fontsize=9, loc="upper right")
    upper.set_xlabel("bits", fontsize=9)
    lower.set_xlabel("MB", fontsize=9)
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    show.save(figure, path)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
