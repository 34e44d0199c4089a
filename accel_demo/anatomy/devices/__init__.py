"""Which GPU is which, and how CUDA_VISIBLE_DEVICES renumbers them."""
