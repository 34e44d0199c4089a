"""Show which of 8 GPUs are `cuda:0` and `cuda:1` for several values of CUDA_VISIBLE_DEVICES.

python tutorials/90_choosing_gpus.py
CUDA_VISIBLE_DEVICES=0,4 python tutorials/90_choosing_gpus.py --mine
"""

import os
from pathlib import Path

from accel_demo import show
from accel_demo.anatomy.devices import draw_map, visible_devices
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser

PREFIXES = "1a2b 1a9f 27c4 9d08 c46e 58b1 6c3d 7e95".split()
GPUS = [f"GPU-{prefix}-c3d2-4f60-a1b9-5e7d80924c11" for prefix in PREFIXES]
EXAMPLES = {
    None: "if the variable is not set, every GPU is visible",
    "": "if the variable is empty, no GPU is visible",
    "0,4": "`cuda:N` counts the visible GPUs from 0, without gaps",
    "4,0": "the GPUs keep the order of the list",
    "0,9,4": "there is no GPU 9, so 9 hides everything after it",
    "0,-1,4": "there is no GPU -1, so -1 hides everything after it",
    "-1": "-1 at the start hides every GPU",
    "0,4,0": "if an id occurs twice, no GPU is visible",
    "GPU-c46e,GPU-9": "a UUID is a valid id, and may be shortened",
    "GPU-c46e,GPU-1a": "two UUIDs start with GPU-1a, so GPU-1a matches no GPU",
    "4,GPU-9": "the first id is a number, so a UUID matches no GPU",
}
DRAWN = ["0,4", "0,9,4"]


def main(plot: Path | None) -> None:
    starts = ["UUID starts with", *(uuid[:8] for uuid in GPUS)]
    print(show.table(["GPU", *(str(number) for number in range(len(GPUS)))], [starts]) + "\n")
    rows = []
    for value, reason in EXAMPLES.items():
        devices = visible_devices(value, GPUS)
        setting = "not set" if value is None else f"`{value}`" if value else "empty"
        first, second = devices.get("cuda:0", "none"), devices.get("cuda:1", "none")
        rows.append([setting, len(devices), first, second, reason])
    print(show.table(["CUDA_VISIBLE_DEVICES", "visible", "cuda:0", "cuda:1", "reason"], rows))
    if plot:
        draw_map(DRAWN, len(GPUS), plot)


def print_own_device() -> None:
    """Print the physical GPU that LOCAL_RANK and CUDA_VISIBLE_DEVICES select for this process."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    gpu = visible_devices(value, GPUS).get(device, "none")
    print(f"CUDA_VISIBLE_DEVICES={value}: my device {device} is physical GPU {gpu}\n", end="")


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__, plot=True)
        parser.add_argument("--mine", action="store_true", help="print only this process's device")
        options = parser.parse_args()
        print_own_device() if options.mine else main(options.plot)
