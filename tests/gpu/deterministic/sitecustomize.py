"""With this folder on PYTHONPATH torch's kernels add in a fixed order (flash attention's backward pass does not otherwise): torch has
no variable for it. In ranks only, which torchrun tells their number."""

import os

if "RANK" in os.environ:
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
