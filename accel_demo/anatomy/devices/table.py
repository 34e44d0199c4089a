"""The command line of `devices`: what this machine has, or how ids renumber its GPUs."""

from accel_demo import show
from accel_demo.anatomy.devices import gpus, picture
from accel_demo.anatomy.group import command_line, read
from accel_demo.errors import UserError


def print_map(values: list[str], physical: int) -> None:
    """Which GPU each device of PyTorch is, for each value of CUDA_VISIBLE_DEVICES."""
    maps = [gpus.visible_devices(value, physical) for value in values]
    words = [", ".join(f"{name}: {gpu}" for name, gpu in one.items()) for one in maps]
    head = ["CUDA_VISIBLE_DEVICES", "visible", "PyTorch's device: the GPU"]
    print(show.table(head, [list(row) for row in zip(values, map(len, maps), words, strict=True)]))


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(gpus.__doc__)
    help = "a value of CUDA_VISIBLE_DEVICES to explain instead; may come several times"
    parser.add_argument("--visible", metavar="IDS", action="append", help=help)
    help = "how many GPUs the machine is to have, for --visible (default: 8)"
    parser.add_argument("--physical", metavar="N", type=int, default=8, help=help)
    options = read(parser, arguments)
    if options.plot and options.visible is None:
        raise UserError("--plot draws what --visible asks for: name some ids, as in 0,4")
    if options.visible is None:
        print(show.table(["what", "here"], [*gpus.machine_rows(), *gpus.gloo_rows()]))
        return
    if options.physical not in range(1, 17):
        raise UserError(f"--physical must be from 1 to 16, got {options.physical}")
    for value in options.visible if options.plot else []:
        picture.check_drawable(value)
    print_map(options.visible, options.physical)
    if options.plot:
        picture.draw_map(options.visible, options.physical, options.plot)
