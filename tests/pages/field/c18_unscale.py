import torch

s = torch.amp.GradScaler("cpu")
p = torch.nn.Linear(1, 1)
o = torch.optim.SGD(p.parameters(), 0.1)
for i in range(2):
    s.scale(p(torch.ones(1, 1)).sum()).backward()
    try:
        s.unscale_(o)
        print(i, "ok")
    except RuntimeError as e:
        print(i, "RuntimeError:", e)
