"""Runs under torchrun: the command line, with the arguments given."""

from __future__ import annotations

import torch

from optpipe.cli import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
