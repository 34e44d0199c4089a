"""Train as the port of exercise 91 should, in one process, and with typical mistakes."""

import runpy
import zlib
from functools import cache
from pathlib import Path

from grading import flatten, torch

OLD_SCRIPT = Path(__file__).parents[1] / "old_script_91.py"
EPOCHS, KILL_AFTER = 4, 1
TRAIN, TEST, BATCH = 1024, 501, 32  # images, and the batch size per process
LEARNING_RATE, MOMENTUM = 0.01, 0.9
NEAR = 1e-3  # if the two largest logits are closer, rounding may change the prediction
# {mistake: what it does}. `reference` trains with a mistake to find the weights that it leads to.
MISTAKES = {
    "sum": "the gradients of the processes are added up instead of averaged",
    "no reset": "the gradients of each batch are added to those of the previous batch",
}
MISTAKES_AFTER_KILL = {
    "no momentum": "the optimizer starts without its momentum: what does the checkpoint need "
    "besides the weights?",
    "new weights": "the training starts with new weights: does every process load the checkpoint?",
    "new weights, old momentum": "the training starts with new weights, although the optimizer "
    "continues",
}


@cache
def image_numbers() -> dict[int, int]:
    """Return {CRC of a training image: its number}."""
    images, _ = data("train")
    rows = images.reshape(TRAIN, -1).numpy()
    return {zlib.crc32(row.tobytes()): number for number, row in enumerate(rows)}


@cache
def data(split: str):
    from accel_demo.data import packaged_set

    return packaged_set(split)[: TRAIN if split == "train" else TEST]


def order_of(epoch: int):
    """Return the order of the training images, as in `DistributedSampler` with seed 0."""
    return torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))


def global_batches(epoch: int, size: int) -> list[list[int]]:
    """Return the images of each optimizer step, sorted, over all processes."""
    return [sorted(batch.tolist()) for batch in order_of(epoch).split(BATCH * size)]


def new_network():
    network = runpy.run_path(str(OLD_SCRIPT))["Net"]
    torch.manual_seed(0)
    return network()


@cache
def reference(size: int, mistake: str = ""):
    """Train in one process on the global batches of `size` processes, with a key of MISTAKES or "".

    Return the weights, and for each epoch the least and the most correct predictions: rounding may
    decide between two classes with nearly equal logits.
    """
    torch.set_num_threads(1)
    images, labels = data("train")

    def new_optimizer():
        return torch.optim.SGD(network.parameters(), LEARNING_RATE, MOMENTUM)

    network, scores = new_network(), []
    optimizer = new_optimizer()
    for epoch in range(EPOCHS):
        if epoch == KILL_AFTER + 1 and "new weights" in mistake:
            network.load_state_dict(new_network().state_dict())
        if epoch == KILL_AFTER + 1 and mistake in ("no momentum", "new weights"):
            optimizer = new_optimizer()
        for batch in order_of(epoch).split(BATCH * size):
            if mistake != "no reset":
                optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(images[batch]), labels[batch])
            (loss * size if mistake == "sum" else loss).backward()
            optimizer.step()
        scores.append(score(network))
    return flatten(network.state_dict().values()), scores


def score(network) -> tuple[int, int]:
    """Return the least and the most correct predictions of the network."""
    images, labels = data("test")
    with torch.no_grad():
        logits = network(images)
    best = logits.topk(2).values
    is_near = best[:, 0] - best[:, 1] < NEAR
    is_correct = logits.argmax(dim=1) == labels
    return int((is_correct & ~is_near).sum()), int((is_correct | is_near).sum())
