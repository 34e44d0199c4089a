"""The files a verb is asked to write: what cannot be, is said before the work and not after it."""

import importlib.util

from accel_demo.errors import UserError


def check_outputs(options) -> None:
    """Raise `UserError` where `options.plot` or `options.json` cannot be written.

    A verb may have only one of the two.
    """
    for flag, path in (("--json", getattr(options, "json", None)), ("--plot", options.plot)):
        if path is None:
            continue
        try:
            existed = path.exists()
            path.open("ab").close()
            if not existed:
                path.unlink()
        except OSError as error:
            raise UserError(f"cannot write {flag} {path}: {error.strerror}") from None
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    if options.plot and options.plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot takes a .png, .svg or .pdf file, got {options.plot}")
