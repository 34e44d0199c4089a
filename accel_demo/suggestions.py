"""Suggest the command or the flag that a user probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches

CUTOFF = 0.7  # of difflib's similarity, from 0 to 1; foo and doctor have 0.44
LEAST_PREFIX = 3  # letters; with fewer, the user may have meant anything
SYNONYMS = {  # {flag of other programs: what we call it, in the order in which we suggest it}
    "lr": ["--learning-rate"],
    "bs": ["--batch-size", "--global-batch"],
    "wd": ["--weight-decay"],
    "arch": ["--model", "--models"],
    "workers": ["--num-workers"],
    "gradient-accumulation-steps": ["--accumulate"],
    "max-grad-norm": ["--clip-norm"],
    "output-dir": ["--run-dir", "--output"],
    "steps": ["--max-steps"],
    "gpus": ["--processes", "--nproc", "--num-processes", "--processes-per-node"],
    "world-size": ["--processes", "--nproc", "--num-processes", "--processes-per-node"],
    "amp": ["--mixed-precision"],
    "bf16": ["--mixed-precision"],
    "fp16": ["--mixed-precision"],
}


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the word in `known` that is spelled nearly like `word`, or begins with it, or None."""
    longer = [each for each in known if each.startswith(word)] if len(word) >= LEAST_PREFIX else []
    near = longer if len(longer) == 1 else get_close_matches(word, known, n=1, cutoff=CUTOFF)
    return near[0] if near else None


def flag_meant(word: str, flags: Iterable[str]) -> str | None:
    """Return the flag that the user meant with `word`, such as "--lr" or "--lr=0.1", or None.

    `flags` are the flags of the program, with their hyphens.
    """
    name = word.partition("=")[0].lstrip("-").replace("_", "-").lower()
    for flag in SYNONYMS.get(name, []):
        if flag in flags:
            return flag
    by_name = {flag.lstrip("-"): flag for flag in flags if flag.startswith("--")}
    near = did_you_mean(name, by_name)
    return near and by_name[near]
