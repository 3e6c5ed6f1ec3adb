"""Without a GPU the Triton kernels run in Triton's interpreter; it must be chosen before a kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
