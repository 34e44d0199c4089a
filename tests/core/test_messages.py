"""Test that all messages of `UserError` have the same form."""

import ast
import re

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


def has_the_common_form(text: str) -> bool:
    """A message names a problem, without a full stop, or a problem and advice, with full stops."""
    sentences = re.split(r"(?<=[^.]\.) (?=[A-Z])", text)
    first_word = text.split()[0]
    is_name = first_word.startswith("…") or re.search(r"[-_./…A-Z]", first_word[1:])
    return (
        len(sentences) <= 2
        and (len(sentences) == 2) == text.endswith(".")
        and bool(first_word[0].islower() or is_name)  # only names start with a capital letter
        and not re.search(r"\b(please|wrong|whole number|oops)\b|!", text)
        and len(text) < 240
    )


def test_all_messages_have_the_common_form():
    messages = [(place, text) for place, text in user_messages() if text != "…"]
    assert len(messages) > 100
    assert "MASTER_PORT must be from 0 to 65535, got …" in [text for _, text in messages]
    assert [message for message in messages if not has_the_common_form(message[1])] == []


def test_no_message_about_a_run_suggests_deleting_it():
    messages = [text for place, text in user_messages() if place.startswith("accel_demo/run/")]
    assert len(messages) > 15
    assert [text for text in messages if re.search("delete|remove", text, re.IGNORECASE)] == []
