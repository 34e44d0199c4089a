"""A text as sequences of characters, for models that predict the next character."""

from array import array

import torch
from torch.utils.data import Dataset

LENGTH = 64  # characters per sequence
CHARACTERS = (  # all characters of the packaged text; a character's number is its index here
    "\n !\"'()*,-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_`abcdefghijklmnopqrstuvwxyz"
)
NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}


class TextSet(Dataset):
    """Sequences of `LENGTH` characters, read in batches, and for each character the one after it.

    A batch is a tuple `(inputs, labels)` of int64 tensors [B, T] with the numbers of characters:
    `labels[b, t]` follows `inputs[b, t]`. The interface is the same as that of `ImageSet`.
    """

    def __init__(self, text: str):
        numbers = encode(text)
        end = (len(numbers) - 1) // LENGTH * LENGTH  # the last label needs a character, too
        self.inputs = numbers[:end].view(-1, LENGTH)
        self.labels = numbers[1 : end + 1].view(-1, LENGTH)
        self.class_names = list(CHARACTERS)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: every epoch has the same sequences."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        inputs, labels = self.__getitems__([index])
        return inputs[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole batch at once. DataLoader calls this method instead of `__getitem__`."""
        chosen = torch.frombuffer(array("q", indices), dtype=torch.int64)
        return self.inputs.index_select(0, chosen), self.labels.index_select(0, chosen)


def encode(text: str) -> torch.Tensor:
    """Return the numbers of the characters, int64 [N]. Raises `KeyError` for an unknown one."""
    return torch.tensor([NUMBERS[character] for character in text])


def decode(numbers: torch.Tensor) -> str:
    """Return the characters with these numbers, int64 [N], as a text."""
    return "".join(CHARACTERS[number] for number in numbers.tolist())
