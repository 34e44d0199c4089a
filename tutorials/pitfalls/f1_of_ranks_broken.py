"""Compute an F1 score as the mean of the ranks' F1 scores.

accelerate launch --config_file accelerate_configs/cpu_two_processes.yaml \
    tutorials/pitfalls/f1_of_ranks_broken.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def f1_score(predicted, positive):
    true_positives = (predicted & positive).sum()
    return 2 * true_positives / (predicted.sum() + positive.sum())


def main():
    accelerator = Accelerator(cpu=True)
    predicted = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0]).bool()
    positive = torch.tensor([1, 0, 0, 0, 0, 1, 1, 1]).bool()
    loader = accelerator.prepare(DataLoader(TensorDataset(predicted, positive), batch_size=2))
    predictions, labels = [], []
    for prediction, label in loader:
        predictions.append(prediction)
        labels.append(label)
    score = f1_score(torch.cat(predictions), torch.cat(labels))
    score = accelerator.reduce(score, "mean")
    whole = f1_score(predicted, positive)
    accelerator.print(f"{accelerator.num_processes} processes: the F1 score is {score:.2f}")
    accelerator.print(f"that of all samples is {whole:.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
