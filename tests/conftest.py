"""Nothing is shared by all tests but this: no network, and Triton's interpreter where there is no GPU to compile for."""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
