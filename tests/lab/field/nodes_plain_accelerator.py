# An ordinary Accelerate script, as in Accelerate's quick tour: Accelerator() without arguments
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (x,) in data:
    accelerator.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
place = f"process {accelerator.process_index} of {accelerator.num_processes}"
print(f"{place}, main={accelerator.is_main_process}, {len(data)} batches", flush=True)
