"""Resume with `automatic_checkpoint_naming`, with and without a limit, and save twice more."""

import logging
import os
import shutil

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration

logging.disable(logging.WARNING)


def new(limit):
    for s in (AcceleratorState, GradientState):
        s._reset_state()
    project = ProjectConfiguration(
        project_dir="ckpt_b", automatic_checkpoint_naming=True, total_limit=limit
    )
    a = Accelerator(cpu=True, project_config=project)
    m = torch.nn.Linear(1, 1, bias=False)
    o = torch.optim.SGD(m.parameters(), 0.1)
    m, o = a.prepare(m, o)
    return a, m


def setw(m, v):
    with torch.no_grad():
        m.weight.fill_(v)


for limit in (2, None):
    shutil.rmtree("ckpt_b", ignore_errors=True)
    a, m = new(limit)
    for k in range(3):
        setw(m, k)
        a.save_state()
    print("limit", limit, "run 1:", sorted(os.listdir("ckpt_b/checkpoints")))
    a, m = new(limit)
    a.load_state()
    print("run 2 resumes with", m.weight.item())
    try:
        for k in (3, 4):
            setw(m, k)
            a.save_state()
    except ValueError as e:
        print("run 2 save_state: ValueError:", str(e)[:120])
    print("run 2:", sorted(os.listdir("ckpt_b/checkpoints")))
    a, m = new(limit)
    a.load_state()
    print("run 3 resumes with", m.weight.item(), "(the newest weights are 4)")
