import sys

import torch
from accelerate import Accelerator
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

a = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
g, d = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
og, od = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
g, d, og, od = a.prepare(g, d, og, od)
torch.manual_seed(a.process_index)
sent = []


def hook(name):
    def h(state, bucket):
        sent.append(name)
        return allreduce_hook(None, bucket)

    return h


g.register_comm_hook(None, hook("g"))
d.register_comm_hook(None, hook("d"))
models = (g, d) if "both" in sys.argv else (g,)
for _ in range(4):
    with a.accumulate(*models):
        a.backward(g(torch.randn(3, 2)).mean() + d(torch.randn(3, 2)).mean())
        og.step()
        od.step()
        og.zero_grad()
        od.zero_grad()
w = [a.gather(next(m.parameters()).detach().reshape(1, -1)) for m in (g, d)]
if a.is_main_process:
    sizes = {n: sent.count(n) for n in "gd"}
    print("buckets sent:", sizes, "equal weights:", [bool(torch.equal(x[0], x[1])) for x in w])
a.end_training()
