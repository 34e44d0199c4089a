"""Average gradients in several ways, and compare the final weights with DDP's, bit for bit.

The methods range from one all-reduce per parameter to DDP rebuilt by hand, with buckets and hooks.
Each method trains a small model on 2, 3 and 4 processes.

python -m accel_demo.anatomy.ddp
"""

from accel_demo.anatomy.ddp import comparison
from accel_demo.errors import one_line_errors
from accel_demo.options import Parser

with one_line_errors():
    Parser(__doc__).parse_args()
    comparison.print_comparison()
