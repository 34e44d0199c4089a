import sys
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn

a = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=15))])
m = nn.Sequential(
    nn.Linear(4, 4), nn.BatchNorm1d(4) if "bn" in sys.argv else nn.Identity(), nn.Linear(4, 1)
)
o = torch.optim.SGD(m.parameters(), 0.1)
m, o = a.prepare(m, o)
try:
    for _ in range(3):
        m.train()
        for _ in range(2):
            a.backward(m(torch.randn(4, 4)).mean())
            o.step()
            o.zero_grad()
        if a.is_main_process:
            m.eval()
            with torch.no_grad():
                m(torch.randn(4, 4))
        a.wait_for_everyone()
    print(a.process_index, "finished", flush=True)
except RuntimeError as e:
    print(a.process_index, "RuntimeError:", str(e).splitlines()[0][:200], flush=True)
a.end_training()
