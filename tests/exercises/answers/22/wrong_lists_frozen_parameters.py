# wrong: adapter.weight, which is frozen
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def unused_parameters(model, loss):
    used, nodes, seen = set(), [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            used.add(getattr(node, "variable", None))
            nodes += [following for following, _ in node.next_functions]
    return [name for name, parameter in model.named_parameters() if parameter not in used]


def train(model, batches, learning_rate):
    model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets, task in batches:
        loss = mse_loss(model(inputs, task), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
