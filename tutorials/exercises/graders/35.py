"""Grade exercise 35: kill `save` at every point, and check what `latest` returns.

A save is killed before it opens, renames, creates or deletes a file or folder, and before and in
the middle of every write. Each call of the answer runs in a separate process, which is forked after
the answer was imported, so no state is carried over from earlier calls.
"""

import itertools
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import grading
from grading import Wrong
from kill_points import call_in_process, files_in

TIME_LIMIT = 100  # seconds; a correct answer takes a few seconds
SEED = 7
KILLS = 25  # in a row, to see whether leftovers accumulate
SIZES = {"model.bin": 20_000, "optimizer.bin": 9_000}  # in bytes; every checkpoint has these
OTHERS = {
    "scaler.bin": 0,
    "scheduler.bin": 40,
    "random_0.bin": 12_000,
    "config.bin": 2,
}  # every checkpoint has three of these
MOST_GROWTH = 1.1  # factor on the size of two checkpoints; a leftover random_0.bin makes it 1.14
MIXTURE = "Why an incomplete checkpoint is worse than none"
MANIFEST = "Detect damage with a manifest"
RIGHT = (
    "latest returned a complete checkpoint after each of {} kills and after damage to each file, "
    "and no leftover files took up space"
)

Checkpoint = tuple[int, dict[str, bytes]]  # step and files


def judge(answer: Path) -> str:
    # If possible, use a different file system than /tmp, so that a rename from /tmp fails.
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
    run.check_that_two_are_kept()
    run.damage()
    yield run.kills


class Run:
    """Calls the answer, always with the same folder. `states` are copies of this folder."""

    def __init__(self, module: ModuleType, folder: Path, copies: Path):
        self.module, self.folder, self.copies = module, folder, copies
        self.kills, self.points = 0, 0  # kills so far, and kill points of one save
        self.overhead = 1.0  # bytes in the folder after two saves, per byte of their contents
        self.states: dict[str, Path] = {}
        self.saved: dict[int, Checkpoint] = {}  # by step, the checkpoints in `states`
        self.known_files: set[tuple[str, bytes]] = set()  # name and content of each saved file
        self.random = random.Random(SEED)
        folder.mkdir()

    def without_kills(self) -> None:
        self.keep("empty")
        self.expect("no checkpoint was saved yet", None)
        before = None
        for step in (3, 6, 9, 12, 15):
            when = f"step {step} was saved without a kill"
            self.saved[step] = new = self.save_completely(step, before, when)
            if step == 6:
                self.overhead = max(1, self.size() / content_bytes(before, new))
            before = new
            self.keep(", ".join(str(earlier) for earlier in self.saved))

    def kill_everywhere(self, state: Path, before: Checkpoint | None, earlier: str = "") -> None:
        """Save in `state`, and kill this save at each kill point. After each kill, save again.

        Also kill this second save at each point, once for each kind of folder state, unless
        `earlier` is given. It describes what happened before.
        """
        known, old_names = set(), set(os.listdir(state))
        step = before[0] + 3 if before else 3
        for point in itertools.count(1):
            self.restore(state)
            new = self.new_checkpoint(step)
            saved = f"{earlier}step {step} was saved"
            killed = self.save(new, point, when=saved)
            if killed is None:
                self.points = point - 1
                self.expect(saved, new)
                self.check_size(saved, before, new)
                return
            this_kill = f"{earlier}a save of step {step} was killed {killed}"
            after = self.expect(this_kill, before, new)
            if earlier:
                continue
            # Names of temporary files may be random, so only count the new names.
            names = set(os.listdir(self.folder))
            kind = (after == new, frozenset(names & old_names), len(names - old_names))
            if kind not in known:
                known.add(kind)
                self.kill_everywhere(self.keep("after a kill"), after, f"{this_kill}, and then ")
            else:
                next_step = after[0] + 3 if after else 3
                when = f"{this_kill}, and then step {next_step} was saved"
                self.save_completely(next_step, after, when)

    def kill_repeatedly(self) -> None:
        """Kill many saves, one after another, and then save without a kill."""
        self.restore(self.states["3, 6"])
        before: Checkpoint | None = self.saved[6]
        steps = []
        for _ in range(KILLS):
            new = self.new_checkpoint(before[0] + self.random.randint(1, 3) if before else 3)
            steps.append(str(new[0]))
            killed = self.save(new, self.random.randint(1, self.points), when="after other kills")
            when = f"step {new[0]} was saved" if killed is None else f"a save was killed {killed}"
            before = self.expect(f"after other kills, {when}", before, new)
        step = before[0] + 1 if before else 3
        last = f"the last three were for steps {', '.join(steps[-3:])}"
        when = f"after {KILLS} saves, most of them killed ({last}), step {step} was saved"
        self.save_completely(step, before, when)

    def check_that_two_are_kept(self) -> None:
        """Check that the folder has the size of two checkpoints. Random bytes don't compress."""
        self.restore(self.states["3, 6, 9, 12, 15"])
        needed = content_bytes(self.saved[12], self.saved[15])
        if self.size() < needed:
            raise Wrong(
                f"after step 15 was saved without a kill, the folder contains {self.size():,} "
                f"bytes, but the checkpoints of steps 12 and 15 need {needed:,}: keep both"
            )

    def damage(self) -> None:
        """Damage the files of the newest checkpoint on disk, one at a time."""
        state, before, newest = self.states["3, 6, 9, 12, 15"], self.saved[12], self.saved[15]
        self.restore(state)
        # Contents of less than 20 bytes are too short to search for.
        places = dict(self.find(content) for content in newest[1].values() if len(content) >= 20)
        for path in self.files_of_newest():
            places.setdefault(path, path.stat().st_size // 2)
        damaged = None
        for path, how in itertools.product(places, DAMAGE):
            self.restore(state)
            DAMAGE[how](path, places[path])
            where = f"after {how} {path.relative_to(self.folder)} (a file of step 15)"
            # If a checkpoint is stored twice, it may still be complete.
            if self.expect(where, before, newest, read=MANIFEST) == before:
                damaged = self.keep("damaged")
        if damaged:  # the next save has the same step
            self.kill_everywhere(damaged, before, "step 15 was damaged, and then ")

    def files_of_newest(self) -> list[Path]:
        """Return the files that the save of step 15 added, and those that it changed in subfolders.

        A changed file directly in `folder` may belong to all checkpoints.
        """
        earlier = self.states["3, 6, 9, 12"]
        return [
            path
            for path in sorted(files_in(self.folder))
            if path.stat().st_size > 0
            and (
                not (old := earlier / path.relative_to(self.folder)).exists()
                or (path.parent != self.folder and path.read_bytes() != old.read_bytes())
            )
        ]

    def find(self, content: bytes) -> tuple[Path, int]:
        """Return the file that contains `content`, and the position of its middle in the file."""
        middle = content[len(content) // 2 :][:20]
        files = sorted(files_in(self.folder), key=lambda path: path.stat().st_mtime_ns)
        for path in files:
            if (place := path.read_bytes().find(middle)) >= 0:
                return path, place
        return files[-1], files[-1].stat().st_size // 2  # the content is encoded

    def save_completely(self, step: int, before: Checkpoint | None, when: str) -> Checkpoint:
        """Save without a kill, and check the folder. `before` is the last complete checkpoint."""
        new = self.new_checkpoint(step)
        self.save(new, when=when)
        self.expect(when, new)
        self.check_size(when, before, new)
        return new

    def save(self, new: Checkpoint, kill_at: int = 0, when: str = "") -> str | None:
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
            return f"step {step!r}, not {steps}. Which checkpoint is the newest complete one?", ""
        if missing := sorted(expected.keys() - files.keys()):
            return f"step {step} without its file {missing[0]}", ""
        if extra := sorted(files.keys() - expected.keys()):
            return f"step {step} with {extra[0]}, which is not one of its files", MIXTURE
        name = next(name for name in expected if files[name] != expected[name])
        if files[name] and (name, files[name]) in self.known_files:
            return f"a mixture: step {step}, but {name} is from a different save", MIXTURE
        if expected[name].startswith(files[name]):
            size, full = len(files[name]), len(expected[name])
            return f"step {step} with only {size:,} of the {full:,} bytes of {name}", ""
        return f"step {step} with changed bytes in {name}", ""

    def new_checkpoint(self, step: int) -> Checkpoint:
        """Return random files. Contents and the choice of `OTHERS` differ from save to save."""
        sizes = {**SIZES, **dict(self.random.sample(sorted(OTHERS.items()), 3))}
        files = {name: self.random.randbytes(size) for name, size in sizes.items()}
        self.known_files.update(files.items())
        return step, files

    def check_size(self, when: str, *kept: Checkpoint | None) -> None:
        """Check that the folder contains only the kept checkpoints, in whatever format."""
        needed = round(self.overhead * content_bytes(*kept))
        if len(self.saved) > 1 and self.size() > MOST_GROWTH * needed:
            raise Wrong(
                f"{when}: the folder contains {self.size():,} bytes, but the last two checkpoints "
                f"need only {needed:,}. What should be deleted, and when?"
            )

    def size(self) -> int:
        """Return the bytes of all files in the folder. A file with several names counts once."""
        files = {path.lstat().st_ino: path.lstat().st_size for path in files_in(self.folder)}
        return sum(files.values())

    def keep(self, name: str) -> Path:
        """Copy the folder, so that `restore` can restore it."""
        copy = self.states[name] = self.copies / name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy, symlinks=True)
        return copy

    def restore(self, copy: Path) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(copy, self.folder, symlinks=True)


def content_bytes(*checkpoints: Checkpoint | None) -> int:
    """Return the number of bytes in the files of all checkpoints."""
    complete = [checkpoint for checkpoint in checkpoints if checkpoint]
    return sum(len(content) for _, files in complete for content in files.values())


def change_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, int], None]] = {
    "changing a byte in": change_byte,
    "truncating": os.truncate,
}


if __name__ == "__main__":
    parser = grading.parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="empty folder for the checkpoints")
    options = grading.read(parser)
    if options.report:
        report = grading.fill_in({}, observe, options.answer, options.folder)
        grading.write_report(options.report, "1-0", report)
    else:
        sys.exit(grading.verdict(__file__, lambda: judge(options.answer)))
