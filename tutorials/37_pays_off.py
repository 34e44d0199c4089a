"""Train two networks with and without torch.compile, and say when compiling has paid off.

python tutorials/37_pays_off.py
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn
from tqdm import tqdm

from accel_demo.errors import UserError, one_line_errors
from accel_demo.lab import load, machine
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.output import warn
from accel_demo.options import Parser
from accel_demo.show import table

REPEATS = 15
WIDTH, TOKENS, BLOCKS = 32, 8192, 4  # of the network of small operations
LAYER, BATCH, LAYERS = 512, 512, 4  # of the network of matrix products


class Block(nn.Module):
    """RMSNorm and SwiGLU as in a Llama block, written by hand: more than a dozen operations."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, inputs):
        normal = inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = self.gate(normal)
        return inputs + self.down(gate * torch.sigmoid(gate) * self.up(normal))


def small_operations() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(TOKENS, WIDTH)


def matrix_products() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(LAYER, LAYER), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(BATCH, LAYER)


NETWORKS = {"many small operations": small_operations, "few large ones": matrix_products}


def main() -> None:
    load.begin()
    seconds_to_start = start_compiler()
    rows = []
    for name, make in NETWORKS.items():
        eager, outputs = make_step(make, is_compiled=False)
        compiled, outputs_compiled = make_step(make, is_compiled=True)
        seconds_to_compile = seconds(compiled)
        seconds(eager)
        pairs = []
        for repeat in tqdm(range(REPEATS), desc=name, unit="repeat", disable=None):
            order = (eager, compiled)[:: -1 if repeat % 2 else 1]
            times = {step: seconds(step) for step in order}
            pairs.append((times[eager], times[compiled]))
        seconds_again = seconds_in_another_run(name)
        difference = (outputs_compiled[0] - outputs[0]).norm() / outputs[0].norm()
        cells = describe(seconds_to_compile, pairs)
        rows.append([name, *cells, f"{seconds_again:.1f} s", f"{difference:.0e}"])
    head = ["network", "ms per step, before → after", "times as fast", "90 % interval", "compiling"]
    print(table([*head, "pays off after", "compiling again", "outputs differ by"], rows))
    print(f"\nNot included: the start of the compiler in this process, {seconds_to_start:.1f} s.")
    print(f"With one thread. {machine.sentence()}")
    warn("slower")


def start_compiler() -> float:
    """Compile a tiny network. Return the seconds."""
    tiny, _ = make_step(lambda: (nn.Linear(2, 2), torch.ones(2, 2)), is_compiled=True)
    return seconds(tiny)


def seconds_in_another_run(name: str) -> float:
    """Compile a network again in a new process, which finds the compiled code on disk."""
    command = [sys.executable, __file__, "--compile", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def make_step(make: Callable, is_compiled: bool) -> tuple[Callable[[], None], list]:
    """Return a function that trains a new network for a step, and the list of its outputs."""
    torch.manual_seed(0)
    model, inputs = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_compiled:
        model.compile()

    outputs = []

    def step() -> None:
        output = model(inputs)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs[1:] = [output.detach()]  # the first one stays

    return step, outputs


def seconds(step: Callable[[], None]) -> float:
    started_at = time.perf_counter()
    step()
    return time.perf_counter() - started_at


def describe(first: float, pairs: list[tuple[float, float]]) -> list[str]:
    """Describe the effect of compiling. Each pair is the time of a step before and after.

    The numbers of steps are those for both ends of the interval.
    """
    before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [eager / compiled for eager, compiled in pairs]
    low, high = median_interval(ratios)
    pays_off = "never"
    if low > 1:
        fewest, most = ((first - after) / (before * (1 - 1 / ratio)) for ratio in (high, low))
        pays_off = f"{fewest:,.0f} – {most:,.0f} steps"
    return [
        f"{1000 * before:.1f} → {1000 * after:.1f}",
        f"{statistics.median(ratios):.2f}",
        f"{low:.2f} – {high:.2f}",
        f"{first - after:.1f} s",
        pays_off,
    ]


if __name__ == "__main__":
    with one_line_errors(), tempfile.TemporaryDirectory() as cache:
        parser = Parser(__doc__)
        help = "only print the seconds that compiling one of the networks takes"
        parser.add_argument("--compile", choices=NETWORKS, help=help)
        network = parser.parse_args().compile
        if network is None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # nothing is compiled yet
        torch.set_num_threads(1)
        try:
            if network:
                start_compiler()
                print(seconds(make_step(NETWORKS[network], is_compiled=True)[0]))
            else:
                main()
        except RuntimeError as error:
            if "InvalidCxxCompiler" not in str(error):
                raise
            raise UserError("torch.compile needs a C++ compiler on a CPU: install g++") from None
