"""Compute metrics as totals, which can be summed over batches and processes."""

import torch
import torch.nn.functional as F


def batch_totals(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed loss, and the numbers of correct predictions and of labels, as float32 [3].

    The loss is without label smoothing, so training and test losses are comparable. We sum totals
    instead of averaging means, because batches may differ in size. `logits` is [B, classes] and
    `labels` is int64 [B]. For text, they are [B, classes, T] and [B, T]. This function does not
    wait for the device. Float32 can count up to 16.7 million labels exactly.
    """
    logits = logits.detach().float()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack((loss, correct.float(), torch.full_like(loss, labels.numel())))


def means(totals: torch.Tensor, prefix: str) -> dict[str, float]:
    """Return the mean loss and the accuracy under the keys `PREFIX_loss` and `PREFIX_accuracy`."""
    loss, correct, labels = totals.tolist()
    return {f"{prefix}_loss": loss / labels, f"{prefix}_accuracy": correct / labels}
