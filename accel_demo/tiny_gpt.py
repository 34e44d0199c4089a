"""A small GPT, which predicts the next character of a text, and the texts that it continues.

Source: Radford et al., 2019, Language Models are Unsupervised Multitask Learners (GPT-2)
"""

import torch
import torch.nn.functional as F
from torch import nn

from accel_demo.text import CHARACTERS, LENGTH

WIDTH, BLOCKS, HEADS = 64, 2, 4


class TinyGPT(nn.Module):
    """A transformer for sequences of up to `LENGTH` characters, with learned positions.

    It takes the numbers of characters, int64 [B, T], and returns logits [B, V, T] for the character
    after each of them. Each position sees only itself and earlier ones. The classes come second, as
    `F.cross_entropy` and `argmax(dim=1)` expect, so the train files need no code for sequences.
    """

    def __init__(self, dropout: float):
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        for embedding in (self.characters, self.positions):  # PyTorch's default, 1, is too large
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.dropout(self.characters(characters) + self.positions(positions))
        logits = self.head(self.norm(self.blocks(x)))  # [B, T, V]
        return logits.transpose(1, 2).contiguous()  # a copy, because FSDP2 warns about a view


class Block(nn.Module):
    """Attention and two linear layers, each behind a layer norm and added to its input."""

    def __init__(self, dropout: float):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention(dropout)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(x)


class Attention(nn.Module):
    """Causal self-attention with `HEADS` heads."""

    def __init__(self, dropout: float):
        super().__init__()
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.queries_keys_values(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, T, width of a head]
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))


@torch.no_grad()
def continue_text(
    model: nn.Module, numbers: torch.Tensor, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw `count` more characters from the model's probabilities, one after the other.

    `numbers` is int64 [N], with N of at least 1. The result is int64 [N + count]. The model sees
    at most the last `LENGTH` characters.
    """
    model.eval()
    for _ in range(count):
        logits = model(numbers[None, -LENGTH:])[0, :, -1]
        drawn = torch.multinomial(logits.softmax(dim=0), 1, generator=generator)
        numbers = torch.cat((numbers, drawn))
    return numbers
