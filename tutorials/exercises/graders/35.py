"""Grade exercise 35: kill `save` at every point, and check what `latest` returns.

python tutorials/exercises/graders/35.py FILE

A save is killed before it opens, renames, creates or deletes a file or folder, and before and in
the middle of every write. Each call of the answer runs in a process of its own. It is forked after
the answer was imported, so it knows nothing of the calls before.
"""

import _pyio
import builtins
import io
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from accel_demo.lab import grading
from accel_demo.lab.grading import Wrong

TIME_LIMIT = 100  # seconds; a correct answer takes a few seconds
PATIENCE = float(os.environ.get("ACCEL_DEMO_PATIENCE", 20))  # seconds for one call
SEED = 7
KILLS = 25  # in a row, to see whether leftovers accumulate
SIZES = {"model.bin": 20_000, "optimizer.bin": 9_000}  # in bytes; every checkpoint has these
SMALL = {"scaler.bin": 0, "scheduler.bin": 40, "random_0.bin": 300, "config.bin": 2}  # three each
MOST_GROWTH = 1.3  # of the folder's size after two saves; a third checkpoint makes it 1.5
PROCESSES = multiprocessing.get_context("fork")
MIXTURE = "Why an incomplete checkpoint is worse than none"
MANIFEST = "The manifest"
RIGHT = (
    "latest returned a complete checkpoint after each of {} kills, also when a file was damaged, "
    "and nothing was left behind"
)

Checkpoint = tuple[int, dict[str, bytes]]  # step and files


def judge(answer: Path) -> str:
    # If possible, use a file system other than /tmp's, so that no rename from /tmp works.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        flags = f"--folder {folder}"
        outcome = grading.run_answer(__file__, answer, flags=flags, time_limit=TIME_LIMIT)
        grading.check(outcome, (1,))
    return RIGHT.format(outcome.reports["1-0"]["seen"][0])


def observe(answer: Path, folder: Path) -> Iterator[int]:
    """Grade the answer, and yield the number of kills."""
    run = Run(grading.import_answer(answer), folder / "checkpoints", folder / "states")
    run.without_kills()
    run.kill_everywhere(run.states["3, 6"], run.saved[6])
    run.kill_everywhere(run.states["empty"], None)
    run.kill_repeatedly()
    run.damage()
    yield run.kills


class Run:
    """Calls of the answer, always with the same folder. `states` are copies of it."""

    def __init__(self, module: ModuleType, folder: Path, copies: Path):
        self.module, self.folder, self.copies = module, folder, copies
        self.kills, self.points = 0, 0  # kills until now, and kill points of one save
        self.size_of_two = 0  # bytes in the folder after two saves
        self.states: dict[str, Path] = {}
        self.saved: dict[int, Checkpoint] = {}  # by step, the checkpoints in `states`
        self.known_files: set[tuple[str, bytes]] = (
            set()
        )  # names and contents of all files ever saved
        self.random = random.Random(SEED)
        folder.mkdir()

    def without_kills(self) -> None:
        self.keep("empty")
        self.expect("no checkpoint was saved yet", None)
        for step in (3, 6, 9, 12, 15):
            self.saved[step] = self.save_completely(step, f"step {step} was saved without a kill")
            self.keep(", ".join(str(earlier) for earlier in self.saved))

    def kill_everywhere(
        self, state: Path, before: Checkpoint | None, earlier_kill: str = ""
    ) -> None:
        """Save in `state`, and kill this save at each point. After each kill, save again.

        Also kill this second save at each point, once for each kind of state of the folder.
        """
        known, old_names = set(), set(os.listdir(state))
        step = before[0] + 3 if before else 3
        for point in itertools.count(1):
            self.restore(state)
            new = self.new_checkpoint(step)
            saved = f"{earlier_kill}step {step} was saved"
            killed = self.save(new, point, when=saved)
            if killed is None:
                self.points = point - 1
                self.expect(saved, new)
                self.check_size(saved)
                return
            this_kill = f"{earlier_kill}a save of step {step} was killed {killed}"
            after = self.expect(this_kill, before, new)
            if earlier_kill:
                continue
            # Names of temporary files may be random, so only count the new names.
            names = set(os.listdir(self.folder))
            kind = (after == new, frozenset(names & old_names), len(names - old_names))
            if kind not in known:
                known.add(kind)
                self.kill_everywhere(self.keep("after a kill"), after, f"{this_kill}, and then ")
            else:
                next_step = after[0] + 3 if after else 3
                self.save_completely(next_step, f"{this_kill}, and then step {next_step} was saved")

    def kill_repeatedly(self) -> None:
        """Kill many saves, one after the other, and then save completely."""
        self.restore(self.states["3, 6"])
        before: Checkpoint | None = self.saved[6]
        for _ in range(KILLS):
            new = self.new_checkpoint(before[0] + self.random.randint(1, 3) if before else 3)
            killed = self.save(new, self.random.randint(1, self.points), when="after other kills")
            when = f"step {new[0]} was saved" if killed is None else f"a save was killed {killed}"
            before = self.expect(f"after other kills, {when}", before, new)
        step = before[0] + 1 if before else 3
        self.save_completely(step, f"after {KILLS} killed saves, step {step} was saved")

    def damage(self) -> None:
        """Damage the files of the newest checkpoint on the disk, one after the other."""
        state, before, newest = self.states["3, 6, 9, 12, 15"], self.saved[12], self.saved[15]
        for name, content in newest[1].items():
            if len(content) < 20:  # too short to find it
                continue
            for how, change in DAMAGE.items():
                self.restore(state)
                path, place = self.find(content)
                change(path, place)
                where = f"{how} in {path.relative_to(self.folder)}, the file with {name} of step 15"
                # A checkpoint that is stored twice may be still complete.
                after = self.expect(where, before, newest, read=MANIFEST)
        if after == before:
            self.save_completely(15, "after step 15 was damaged, it was saved again")

    def find(self, content: bytes) -> tuple[Path, int]:
        """Return the file that contains `content`, and the place of its middle in the file."""
        middle = content[len(content) // 2 :][:20]
        files = sorted(self.all_files(), key=lambda path: path.stat().st_mtime_ns)
        for path in files:
            if (place := path.read_bytes().find(middle)) >= 0:
                return path, place
        return files[-1], files[-1].stat().st_size // 2  # the content is encoded

    def save_completely(self, step: int, when: str) -> Checkpoint:
        new = self.new_checkpoint(step)
        self.save(new, when=when)
        self.expect(when, new)
        self.check_size(when)
        return new

    def save(self, new: Checkpoint, kill_at: int | None = None, when: str = "") -> str | None:
        """Call `save`. Return where it was killed, or None if it was not killed."""
        step, files = new
        call = f"save(folder, {step}, files)"
        killed, report = call_in_process(
            lambda: self.module.save(self.folder, step, dict(files)), call, self.folder, kill_at
        )
        self.kills += killed is not None
        if killed is None and report["mistake"]:
            raise Wrong(f"{when}: {report['mistake']}" if when else report["mistake"])
        return killed

    def expect(self, when: str, *allowed: Checkpoint | None, read: str = "") -> Checkpoint | None:
        """Call `latest` and return its result. Raise `Wrong` if it is not one of `allowed`."""
        _, report = call_in_process(self.latest, "latest(folder)", self.folder)
        if report["mistake"]:
            raise Wrong(f"{when}: {report['mistake']}", read)
        [seen] = report["seen"]
        if seen not in allowed:
            message, heading = self.difference(seen, allowed)
            raise Wrong(f"{when}: latest(folder) returns {message}", read or heading)
        return seen

    def latest(self) -> Iterator[Checkpoint | None]:
        result = self.module.latest(self.folder)
        if result is None:
            yield None
            return
        is_pair = isinstance(result, tuple | list) and len(result) == 2
        if not is_pair or not isinstance(result[1], dict):
            raise Wrong("latest(folder) must return a tuple (step, files), or None")
        step, files = result
        if not all(isinstance(content, bytes | bytearray) for content in files.values()):
            raise Wrong("latest(folder) must return the contents of the files as bytes")
        yield step, {str(name): bytes(content) for name, content in files.items()}

    def difference(self, seen: Checkpoint | None, allowed: tuple) -> tuple[str, str]:
        """Return a description of a wrong result of `latest`, and the heading to read."""
        complete = [checkpoint for checkpoint in allowed if checkpoint]
        if seen is None:
            return f"None, although step {complete[0][0]} was complete", ""
        step, files = seen
        expected = next((files for number, files in complete if number == step), None)
        if expected is None:
            if not complete:
                return f"step {step}, although no save was complete", ""
            steps = " or ".join(str(number) for number, _ in complete)
            return f"step {step}, not {steps}. Which checkpoint is the newest complete one?", ""
        if missing := sorted(expected.keys() - files.keys()):
            return f"step {step} without its file {missing[0]}", ""
        if extra := sorted(files.keys() - expected.keys()):
            return f"step {step} with {extra[0]}, which is not one of its files", MIXTURE
        name = next(name for name in expected if files[name] != expected[name])
        if files[name] and (name, files[name]) in self.known_files:
            return f"a mixture: step {step}, but {name} is from another save", MIXTURE
        if expected[name].startswith(files[name]):
            size, full = len(files[name]), len(expected[name])
            return f"step {step} with only {size:,} of the {full:,} bytes of {name}", ""
        return f"step {step} with changed bytes in {name}", ""

    def new_checkpoint(self, step: int) -> Checkpoint:
        """Return random files. Each save has different contents and different small files."""
        small = dict(self.random.sample(sorted(SMALL.items()), 3))
        sizes = {**SIZES, **small}
        files = {name: self.random.randbytes(size) for name, size in sizes.items()}
        self.known_files.update(files.items())
        return step, files

    def check_size(self, when: str) -> None:
        """Check that no more than two checkpoints are left, whatever their format is."""
        files = {path.lstat().st_ino: path.lstat().st_size for path in self.all_files()}
        size = sum(files.values())
        if len(self.saved) == 1:  # this is the second save
            self.size_of_two = size
        elif len(self.saved) > 1 and size > MOST_GROWTH * self.size_of_two:
            raise Wrong(
                f"{when}: folder contains {size:,} bytes, but after the first two saves it had "
                f"{self.size_of_two:,}. What should be deleted, and when?"
            )

    def all_files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def keep(self, name: str) -> Path:
        """Copy the folder, so that `restore` can bring it back."""
        copy = self.states[name] = self.copies / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy, symlinks=True)
        return copy

    def restore(self, copy: Path) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(copy, self.folder, symlinks=True)


def change_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, int], None]] = {
    "after a byte changed": change_byte,
    "after the end was lost": os.truncate,
}


# --- One call of the answer in a forked process, which may be killed ---


@dataclass
class Kill:
    """The next kill: the process is killed at point number `at`, counted from 1."""

    at: int
    folder: Path
    send: Callable[[str], None]
    points: int = 0


kill: Kill | None = None  # only in a process that is to be killed
write = os.write


def call_in_process(
    function: Callable, call: str, folder: Path, kill_at: int | None = None
) -> tuple[str | None, dict]:
    """Call `function` in a forked process. Return where it was killed, or None, and its report."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_call, args=(sender, function, call, folder, kill_at))
    process.start()
    sender.close()
    try:
        if not receiver.poll(PATIENCE):
            raise Wrong(
                f"{call} has not finished after {PATIENCE:g} s: is there an endless loop, or does "
                "it wait for something that a killed save has left?"
            )
        killed, report = receiver.recv()
    except EOFError:
        process.join()
        raise Wrong(f"{call} ended the process, with exit code {process.exitcode}") from None
    finally:
        if sys.exc_info()[0] is not None:
            process.kill()
        process.join(PATIENCE)
        receiver.close()
    return killed, report


def _call(sender, function: Callable, call: str, folder: Path, kill_at: int | None) -> None:
    global kill
    if kill_at is not None:
        install()
        kill = Kill(kill_at, folder, lambda where: sender.send((where, {})))
    report = grading.fill_in({}, function, failure=f"{call} fails")
    kill = None
    sender.send((None, report))


def install() -> None:
    """Make all operations of this process on files possible points for a kill."""
    # The Python versions of `open` and the file classes write with os.write.
    builtins.open = io.open = _pyio.open  # type: ignore[assignment]
    os.write = write_in_halves
    sys.addaudithook(on_event)


def on_event(event: str, arguments: tuple) -> None:
    """Count the operations that change files. Python calls this before each of them."""
    if kill is None or event not in EVENTS:
        return
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, str | bytes) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
    kill_point(EVENTS[event].format(*(short(argument) for argument in arguments)))


EVENTS = {  # {audit event: description of the moment before it}
    "open": "before it opened {0} for writing",
    "os.mkdir": "before it created the folder {0}",
    "os.rename": "before it renamed {0} to {1}",
    "os.remove": "before it deleted {0}",
    "os.rmdir": "before it deleted the folder {0}",
    "os.link": "before it linked {0} to {1}",
    "os.symlink": "before it linked {0} to {1}",
    "os.truncate": "before it shortened {0}",
    "shutil.copyfile": "before it copied {0} to {1}",
    "subprocess.Popen": "before it started {0}",
}


def write_in_halves(descriptor: int, content) -> int:
    if kill is None or len(content) < 2:
        return write(descriptor, content)
    kill_point(f"before it wrote to {name_of(descriptor)}")
    content = memoryview(content).cast("B")
    half = len(content) // 2
    if write(descriptor, content[:half]) < half:
        raise OSError("the disk is full")
    kill_point(f"in the middle of a write to {name_of(descriptor)}")
    return half + write(descriptor, content[half:])


def kill_point(where: str) -> None:
    """Kill this process with SIGKILL, if this point is the one for the kill."""
    assert kill is not None
    kill.points += 1
    if kill.points == kill.at:
        kill.send(where)
        os.kill(os.getpid(), signal.SIGKILL)


def name_of(descriptor: int) -> str:
    try:
        return short(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:  # not Linux
        return "a file"


def short(path) -> str:
    """Return a path relative to the folder with the checkpoints."""
    assert kill is not None
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
    return text.removeprefix(f"{kill.folder}/")


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="empty folder for the checkpoints")
    options = parser.parse_args()
    if options.report:
        report = grading.fill_in({}, observe, options.answer, options.folder)
        grading.write_report(options.report, "1-0", report)
    else:
        sys.exit(grading.verdict(__file__, lambda: judge(options.answer)))
