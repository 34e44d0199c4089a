"""Run the old loop without .cuda(), fix what fails, and run it again.

python tutorials/92_old_loop_today.py
"""

import warnings
from pathlib import Path

OLD_LOOP = Path(__file__).with_name("92_old_loop.py")
NO_CUDA = [("    cnn.cuda()\n", ""), (".cuda()", "")]
FIXES = {"loss.data[0]": "loss.item()", ".resize(BATCH_SIZE)": ""}


def main() -> None:
    warnings.filterwarnings("ignore", "non-inplace resize is deprecated")
    text = OLD_LOOP.read_text()
    for old, new in NO_CUDA:
        text = text.replace(old, new)
    print(f"Without .cuda(): {outcome(text)}")
    for old, new in FIXES.items():
        assert old in text
        text = text.replace(old, new)
        name = f"{old} replaced by {new}" if new else f"{old} deleted"
        print(f"\n{name}: {outcome(text)}")


def outcome(text: str) -> str:
    """Train with the program `text`. Return the number of steps, or where and how it fails."""
    names = {"__name__": "old_loop"}
    exec(text, names)
    try:
        return f"{len(names['train']())} steps, no error"
    except Exception as error:
        frame = error.__traceback__.tb_next  # the call of train
        step = len(frame.tb_frame.f_locals["losses"]) + 1
        line = text.splitlines()[frame.tb_lineno - 1].strip()
        message = str(error).split(". ")[0]
        return f"step {step} fails\n  {line}\n  {type(error).__name__}: {message}"


if __name__ == "__main__":
    main()
