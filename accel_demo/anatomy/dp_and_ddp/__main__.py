"""Compare DataParallel with DDP: processes, threads, bytes received and bytes held by each device.

python -m accel_demo.anatomy.dp_and_ddp
python -m accel_demo.anatomy.dp_and_ddp --processes 4 --model tiny_cnn --plot bytes.svg

Both train the same model with AdamW and the same global batch, on N devices. DataParallel is our
own (../data_parallel/phases.py), which also runs on a CPU, and its batch starts on device 0. DDP is
PyTorch's, but averages its gradients in our ring (../ring.py), which logs every message. This
program counts the bytes received in the third training step, because DDP creates its final buckets
in the second. The bytes held come from a second run without the ring (../memory.py). The most that
device 0 of DataParallel holds is that of PyTorch's: it adds up the gradients in new memory.
"""

from accel_demo.anatomy.dp_and_ddp import tables
from accel_demo.errors import one_line_errors

with one_line_errors():
    tables.main(__doc__)
