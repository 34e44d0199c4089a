"""Run lines from old GPU scripts and the lines that replace them, and compare the results.

python tutorials/92_old_idioms.py
python tutorials/92_old_idioms.py --cuda    # print only the result of .cuda()
"""

import warnings

import numpy
import torch
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader

from accel_demo import show
from accel_demo.errors import Parser, one_line_errors

DEVICE = torch.device("meta")  # stands in for a GPU, because its tensors aren't on the CPU either
MOVING = [  # (old line, line to write instead, expression to evaluate after either line)
    ("net.cuda()", "net.to(device)", "net.weight.device"),
    ("images.to(device)", "images = images.to(device)", "images.device"),
    ("labels = inputs['label']", "labels = batch['label']", "labels.shape"),
    ("batch.to(device)", "batch = {k: v.to(device) for k, v in batch.items()}", "devices(batch)"),
    ("images = Variable(images)", "", "type(images).__name__"),
    ("labels = on_gpu.type(torch.LongTensor)", "labels = on_gpu.long()", "labels.device"),
    ("labels = labels.resize(BATCH_SIZE)", "", "labels.shape"),
    ("y.data.zero_()", "y.detach().zero_()", "gradient_of(y)"),
    ("output = data_parallel(net, images, [0, 1])", "output = net(images)", "output.shape"),
]
READING = [
    ("pred = torch.max(output, 1)[1]", "pred = output.argmax(dim=1)", "pred"),
    ("n = sum(pred == labels)", "n = (pred == labels).sum().item()", "n / len(labels)"),
    ("value = loss.data[0]", "value = loss.item()", "type(value).__name__"),
    ("values = on_gpu.numpy()", "values = output.detach().cpu().numpy()", "values.shape"),
    ("values = output.numpy()", "values = output.detach().cpu().numpy()", "values.shape"),
    ("values = bf16.numpy()", "values = bf16.float().numpy()", "values.dtype"),
    ("curve = np.array([loss] * 9)", "curve = np.array([loss.item()] * 9)", "curve.shape"),
]


def main() -> None:
    for title, idioms in (("Moving and converting", MOVING), ("Getting numbers out", READING)):
        print(f"{title}:\n")
        rows = [
            [
                f"`{old}`",
                result(old, look),
                f"`{today}`" if today else "nothing",
                result(today, look),
            ]
            for old, today, look in idioms
        ]
        print(show.table(["old", "result", "write instead", "result"], rows), end="\n\n")
    samples = [{"image": torch.rand(5), "more": {"label": 1, "name": "shirt"}}] * 4
    loader = prepare_data_loader(DataLoader(samples, 4), device=DEVICE, put_on_device=True)
    for batch in loader:
        print(f"A batch from a prepared loader: {devices(batch)}")


def result(line: str, look: str) -> str:
    """Execute the line and return the value of `look`, or the error if there is one."""
    names = {**new_variables(), "torch": torch, "devices": devices}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(line, names)
            text = f"`{look}` is {eval(look, names)!s}"
        except Exception as error:
            text = first_sentence(error)
            if ".cuda()" in line and not torch.cuda.is_available():
                text = "an error if there's no GPU"  # its text depends on the installation
    return "; ".join([text, *(f"warning: {warning.message}" for warning in caught)])


def new_variables() -> dict:
    """Return the variables used by the lines. The batch is short, as the last one often is."""
    torch.manual_seed(0)
    BATCH_SIZE, device, np = 8, DEVICE, numpy
    Variable, data_parallel = torch.autograd.Variable, nn.parallel.data_parallel
    net, images, labels = nn.Linear(5, 3), torch.rand(4, 5), torch.tensor([0, 1, 2, 1])
    batch, on_gpu, bf16 = {"image": images, "label": labels}, labels.to(device), images.bfloat16()
    output = net(images)
    loss, pred = F.cross_entropy(output, labels), output.argmax(dim=1)
    x = torch.zeros(2, requires_grad=True)
    y = x.exp()  # the gradient of the sum of y is y itself: 1, 1

    def gradient_of(y):
        return torch.autograd.grad(y.sum(), x)[0]

    return locals()


def devices(batch):
    """Replace each tensor in nested dicts by its device, and anything else by its type."""
    if isinstance(batch, dict):
        return {name: devices(value) for name, value in batch.items()}
    return str(batch.device) if isinstance(batch, torch.Tensor) else type(batch).__name__


def first_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split(". ")[0].removesuffix(".")


if __name__ == "__main__":
    with one_line_errors():
        parser = Parser(__doc__)
        parser.add_argument("--cuda", action="store_true", help="print only the result of .cuda()")
        if parser.parse_args().cuda:
            try:
                print(nn.Linear(5, 3).cuda().weight.device)
            except (AssertionError, RuntimeError) as error:
                print(f"{type(error).__name__}: {error}")
        else:
            main()
