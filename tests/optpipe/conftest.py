"""One thread for torch: these tests share their machine, and tiny tensors gain nothing from more."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
