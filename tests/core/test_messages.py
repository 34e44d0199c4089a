"""Test that all messages of `UserError` have the same form.

`python -m tests.core.test_messages` lists them.
"""

import ast
import re

import pytest

from tests.conftest import REPOSITORY

FOLDERS = ("accel_demo", "tutorials")


def user_messages() -> list[tuple[str, str]]:
    """Return the location and text of each `UserError` message. `…` replaces inserted values."""
    messages = []
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError":
                    place = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                    messages.append((place, text_of(node.args[0])))
    return messages


def text_of(expression: ast.expr) -> str:
    if isinstance(expression, ast.Constant):
        return str(expression.value)
    if isinstance(expression, ast.JoinedStr):
        return "".join(map(text_of, expression.values))
    return "…"


MESSAGES = [message for message in user_messages() if message[1] != "…"]


def test_the_messages_are_found():
    texts = [text for _, text in MESSAGES]
    assert len(texts) > 100
    assert "MASTER_PORT must be from 0 to 65535, got …" in texts


@pytest.mark.parametrize(("place", "text"), MESSAGES)
def test_a_message_has_the_common_form(place, text):
    """A message names a problem, without a full stop, or a problem and advice, with full stops."""
    sentences = re.split(r"(?<=[^.]\.) (?=[A-Z])", text)
    assert len(sentences) <= 2
    assert (len(sentences) == 2) == text.endswith(".")
    first_word = text.split()[0]
    is_name = first_word.startswith("…") or re.search(r"[-_./…A-Z]", first_word[1:])
    assert first_word[0].islower() or is_name, "only names start with a capital letter"
    assert not re.search(r"\b(please|wrong|whole number|oops)\b|!", text)
    assert len(text) < 240


if __name__ == "__main__":
    for place, text in MESSAGES:
        print(f"{place}: {text}")
