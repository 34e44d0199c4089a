"""Totals that add up over batches and processes: loss, correct predictions, images."""

import torch
import torch.nn.functional as F


def batch_totals(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses, of correct predictions and of images in a batch: float32 [3].

    Totals may be added up over batches and over processes; means may not, because the parts need
    not be equally large. Nothing here waits for the device. `logits` is [B, classes], `labels`
    int64 [B]. Float32 counts exactly up to 16.7 million images.
    """
    logits = logits.detach().float()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack((loss, correct.float(), torch.full_like(loss, len(labels))))


def means(totals: torch.Tensor, prefix: str) -> dict[str, float]:
    """Return the mean loss and the accuracy from totals, under names that begin with `prefix`."""
    loss, correct, images = totals.tolist()
    return {f"{prefix}_loss": loss / images, f"{prefix}_accuracy": correct / images}
