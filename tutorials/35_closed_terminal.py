"""Close the terminals of several launches, and see which signal reaches a training process.

Needs tmux and setsid.

python tutorials/35_closed_terminal.py
"""

import os
import pty
import signal
import sys
import tempfile
import time
from pathlib import Path

from accel_demo.show import table

LAUNCHES = [
    "python train.py",
    "nohup python train.py &",
    "accelerate launch train.py",
    "nohup accelerate launch train.py &",
    "torchrun train.py",
    "nohup torchrun train.py &",
    "nohup torchrun --signals-to-handle SIGTERM,SIGINT,SIGQUIT train.py &",
    "setsid torchrun train.py &",
    "tmux new-session 'torchrun train.py'",
]
STARTED, CLOSED, SIGNAL = "started", "closed", "signal"  # files in the folder of a launch
PATIENCE = 3  # seconds that a process waits for a signal after its terminal has been closed


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = {launch: Path(folder, str(n)) for n, launch in enumerate(LAUNCHES)}
        terminals = [open_terminal(*launch) for launch in folders.items()]
        wait_for(folders.values(), STARTED)
        for terminal, folder in zip(terminals, folders.values(), strict=True):
            os.close(terminal)
            (folder / CLOSED).touch()
        wait_for(folders.values(), SIGNAL)
        rows = [(f"`{launch}`", (f / SIGNAL).read_text()) for launch, f in folders.items()]
    print(table(["command", "signal"], rows))


def open_terminal(launch: str, folder: Path) -> int:
    """Type a command in a shell in a new terminal, and return the terminal's file descriptor."""
    folder.mkdir()
    pid, terminal = pty.fork()
    if pid == 0:  # the child process is the shell
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {
            "PATH": path,
            "TERM": "xterm",
            "HF_HOME": os.devnull,
            "TMUX_TMPDIR": str(folder),
        }
        os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, **variables})
    os.set_inheritable(terminal, False)  # the other shells must not keep this terminal open
    command = launch.replace("train.py", f"{Path(__file__).resolve()} {folder} > {folder}/log 2>&1")
    os.write(terminal, f"{command}\n".encode())
    return terminal


def wait_for(folders, name: str) -> None:
    deadline = time.monotonic() + 120
    while not all((folder / name).exists() for folder in folders):
        if time.monotonic() > deadline:
            raise TimeoutError(f"a launch has not written the file {name}")
        time.sleep(0.1)


def train(folder: Path) -> None:
    """Do what a training process does about signals, and write which one it has received."""
    received = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(signal.Signals(number).name))
    (folder / STARTED).touch()
    wait_for([folder], CLOSED)
    time.sleep(PATIENCE)
    (folder / "new").write_text(received[0] if received else "none")
    (folder / "new").rename(folder / SIGNAL)


if __name__ == "__main__":
    train(Path(sys.argv[1])) if sys.argv[1:] else main()
