"""Metrics as totals, which can be added up over batches and over processes."""

import torch
import torch.nn.functional as F


def batch_totals(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed loss, the correct predictions and the images of a batch: float32 [3].

    Totals can be added up over batches and processes. Means cannot be averaged, because batches may
    differ in size. `logits` is [B, classes], `labels` int64 [B]. Nothing here waits for the device.
    Float32 counts exactly up to 16.7 million images.
    """
    logits = logits.detach().float()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack((loss, correct.float(), torch.full_like(loss, len(labels))))


def means(totals: torch.Tensor, prefix: str) -> dict[str, float]:
    """Return the mean loss and the accuracy from totals, as `PREFIX_loss` and `PREFIX_accuracy`."""
    loss, correct, images = totals.tolist()
    return {f"{prefix}_loss": loss / images, f"{prefix}_accuracy": correct / images}
