"""Run lines from old code and the lines that replace them, and compare the results.

python tutorials/92_old_idioms.py
python tutorials/92_old_idioms.py --cuda    # print only the result of .cuda()
"""

import re
import warnings

import numpy
import torch
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader

from accel_demo.errors import one_line_errors
from accel_demo.options import Parser

IDIOMS = {  # (line you find, line to write instead, expression to evaluate after either line)
    "Moving": [
        ("net.cuda()", "net.to(device)", "net.weight.device"),
        ("images = images.cuda()", "images = images.to(device)", "images.device"),
        ("images.to(device)", "images = images.to(device)", "images.device"),
        ("labels = inputs['label']", "labels = batch['label']", "labels.shape"),
        (
            "batch.to(device)",
            "batch = {k: v.to(device) for k, v in batch.items()}",
            "devices(batch)",
        ),
    ],
    "Converting": [
        ("images = Variable(images)", "", "type(images).__name__"),
        (
            "x = Variable(images, requires_grad=True)",
            "x = images.detach().requires_grad_()",
            "(x.requires_grad, images.requires_grad)",
        ),
        ("h = Variable(output)", "h = output", "h.requires_grad"),
        ("values = output.data", "values = output.detach()", "values.requires_grad"),
        ("net.bias.data.zero_()", "with torch.no_grad(): net.bias.zero_()", "net.bias.tolist()"),
        ("labels = on_gpu.type(torch.LongTensor)", "labels = on_gpu.long()", "labels.device"),
        ("labels = labels.resize(BATCH_SIZE)", "labels = labels.reshape(-1)", "labels.shape"),
    ],
    "Getting numbers out": [
        ("pred = torch.max(output, 1)[1]", "pred = output.argmax(dim=1)", "pred.tolist()"),
        ("n = sum(pred == labels)", "n = (pred == labels).sum()", "n / len(labels)"),
        ("value = loss.data[0]", "value = loss.item()", "type(value).__name__"),
        ("values = on_gpu.numpy()", "values = on_gpu.cpu().numpy()", "values.shape"),
        ("values = output.numpy()", "values = output.detach().cpu().numpy()", "values.shape"),
        ("values = bf16.numpy()", "values = bf16.float().numpy()", "values.dtype"),
        (
            "curve = np.array([loss] * 9)",
            "curve = torch.stack([loss.detach()] * 9).cpu().numpy()",
            "curve.shape",
        ),
    ],
}


def main() -> None:
    for title, lines in IDIOMS.items():
        blocks = []
        for old, new, look in lines:
            before, after = result(old, look), result(new, look)
            after = after if after != before else "the same"
            blocks.append(f"-{old}  # {before}" + (f"\n+{new}  # {after}" if new else ""))
        print(f"{title}:\n\n```diff\n" + "\n\n".join(blocks) + "\n```\n")
    samples = [{"image": torch.rand(5), "more": {"label": 1, "name": "shirt"}}] * 4
    loader = prepare_data_loader(
        DataLoader(samples, 4), device=torch.device("meta"), put_on_device=True
    )
    for batch in loader:
        print(f"A batch from a prepared loader: {devices(batch)}")


def result(line: str, look: str) -> str:
    """Execute the line and return the value of `look`, or the error if there is one."""
    if ".cuda()" in line:  # what it does depends on the machine: see --cuda
        return "needs a GPU"
    names = {**new_variables(), "torch": torch, "devices": devices}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(line, names)
            return f"{look} is {eval(look, names)!s}"
        except NotImplementedError:  # meta has no data to copy
            return "needs a GPU"
        except Exception as error:
            return first_sentence(error)


def new_variables() -> dict:
    """Return the variables used by the lines."""
    Variable, np = torch.autograd.Variable, numpy
    torch.manual_seed(0)
    BATCH_SIZE = 8
    device = torch.device("meta")  # not a GPU, but not the CPU either
    net = nn.Linear(5, 3)
    images = torch.rand(4, 5)  # the last batch of an epoch is often short: here 4 of 8
    labels = torch.tensor([0, 1, 2, 1])
    batch = {"image": images, "label": labels}
    on_gpu = labels.to(device)
    bf16 = images.bfloat16()
    output = net(images)
    pred = output.argmax(dim=1)
    loss = F.cross_entropy(output, labels)
    return locals()


def devices(batch):
    """Replace each tensor in nested dicts by its device, and anything else by its type."""
    if isinstance(batch, dict):
        return {name: devices(value) for name, value in batch.items()}
    return str(batch.device) if isinstance(batch, torch.Tensor) else type(batch).__name__


def first_sentence(error: Exception) -> str:
    """Return the type and the first sentence of the error, without the parts in parentheses."""
    text = f"{type(error).__name__}: {error}".split(". ")[0].removesuffix(".")
    return re.sub(r" \(.*?\)", "", text)


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
