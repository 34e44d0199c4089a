"""Compare the time and memory of eight methods for the distance between all kernels of a layer.

The distance of n kernels is the sum of ‖wᵢ − wⱼ‖ over all i and j. ‖·‖ is the sum of the absolute
differences (p=1) or the Euclidean length (p=2). Some methods keep all differences for backward;
others recompute the differences, split them among processes or devices, or avoid them.

python tutorials/kernel_distance
python tutorials/kernel_distance --layers 60x16 --processes 3
"""

import re

from costs import measure_all

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.group import run_in_group


def shape_of(layer: str) -> tuple[int, int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", layer)
    if not match or not 1 <= int(match[1]) <= 512 or not 1 <= int(match[2]) <= 512:
        raise UserError(f"--layers takes NxC, each from 1 to 512, as in 128x64, got {layer}")
    return int(match[1]), int(match[2]), 3, 3


with one_line_errors():
    parser = Parser(__doc__, processes=2)
    help = "layers with 3 × 3 kernels, as kernels x input channels (default: 128x64 512x512)"
    parser.add_argument("--layers", nargs="+", metavar="NxC", help=help)
    options = parser.parse_args()
    shapes = [shape_of(layer) for layer in options.layers or ["128x64", "512x512"]]
    run_in_group(measure_all, options.processes, shapes)
