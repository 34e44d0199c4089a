"""Record the measured outputs and pictures of pages 20, 25, 40, 41, 44 and 45 again.

python tutorials/40_record.py              # everything; takes minutes, and needs an idle machine
python tutorials/40_record.py scaling      # or alpha_beta (page 20), dp_or_ddp (25), timeline (40),
                                           # slower (41); as root on Linux: two_machines,
                                           # two_worlds, rates (44), lost_machine (45)
python tutorials/40_record.py --quick      # a preview only: the tests need the full results
"""

import shlex
import sys
from pathlib import Path

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser
from accel_demo.processes.launch import REPOSITORY, run_to_end

TIME_LIMIT = 1800  # seconds per command
RECORDS = {
    "alpha_beta": ["python tutorials/alpha_beta.py --plot tutorials/20_alpha_beta.svg"],
    "dp_or_ddp": ["accel-demo bench dataparallel --forward --repeats 25"],
    "timeline": [
        "accel-demo timeline --plot tutorials/40_timeline.svg",
        "accel-demo timeline --bucket-mb 0.5,2,8,25,100",
        "accel-demo timeline --straggler 1:20ms --plot tutorials/40_straggler.svg",
    ],
    "scaling": ["accel-demo scaling --repeats 25 --plot tutorials/41_scaling.svg"],
    "slower": ["python tutorials/41_slower.py"],
    "two_machines": ["accel-demo nodes -- torchrun tutorials/44_two_machines.py"],
    "two_worlds": ["accel-demo nodes --processes-per-node 1 -- python tutorials/44_two_worlds.py"],
    "rates": ["python tutorials/44_rates.py"],
    "lost_machine": ["python tutorials/45_lost_machine.py --plot tutorials/45_lost_machine.svg"],
}


def record(name: str, option: str = "") -> None:
    """Run one transcript's commands, and write the commands and their output to transcripts/."""
    parts = []
    for command in RECORDS[name]:
        command += option
        print(command, flush=True)
        result = run_to_end(command, TIME_LIMIT)
        if result.returncode != 0:
            sys.exit(f"{shlex.split(command)[0]} returned {result.returncode}\n{result.stderr}")
        parts.append(f"$ {command}\n{result.stdout.rstrip()}\n")
    Path(REPOSITORY, "tutorials", "transcripts", f"{name}.txt").write_text("\n".join(parts))


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECORDS)}")
        parser.add_argument("--quick", action="store_true", help="add --quick to each command")
        options = parser.parse_args()
        if unknown := set(options.names) - set(RECORDS):
            parser.error(f"no such transcript: {', '.join(unknown)}")
        for name in options.names or RECORDS:
            record(name, " --quick" if options.quick else "")
