"""Text that launch files share: what a file starts and what it loses, as comments, and the lines of torchrun."""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import wrap

from optpipe.export.launch.reading import Launch
from optpipe.units import time_text

WIDTH = 118


def header(launch: Launch, cut: Sequence[int], lost: Sequence[str], seconds: float) -> str:
    """Comments on the job, the predicted step, and what the trainer does not run of the plan."""
    lines = wrap(launch.title(cut), WIDTH)
    lines.append(
        f"Predicted for what this file starts: {time_text(seconds * 1e6)} a step, by formula; nothing was measured."
    )
    if lost:
        lines.append("Lost against the plan:")
        for sentence in lost:
            lines += wrap(sentence, WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)


def script(launch: Launch, comments: str, before: Sequence[str], command: Sequence[str]) -> str:
    """Shell script that runs a command by torchrun, on each host with its NODE_RANK; `before`: lines in front of it.

    ``$folder`` is that of the script.
    """
    hosts = -(-launch.plan.gpus // launch.host_gpus)
    lines = [
        "#!/bin/sh",
        comments.rstrip("\n"),
        f"# To be run on each of {hosts:,} hosts with MASTER_ADDR, and NODE_RANK from 0 to {hosts - 1:,}.",
        "set -e",
        'folder=$(cd "$(dirname "$0")" && pwd)',
        *before,
        f'torchrun --nproc-per-node {launch.host_gpus} --nnodes {hosts} --node-rank "${{NODE_RANK:-0}}" \\',
        '    --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \\',
        " \\\n".join(f"    {part}" for part in command),
    ]
    return "".join(f"{line}\n" for line in lines)


def config_json(launch: Launch, architecture: str = "") -> dict[str, str]:
    """The model's config.json, where the plan has it and not a name on the hub."""
    if launch.hub_name:
        return {}
    config = {name: value for name, value in launch.plan.config.items() if name != "source"}
    if architecture:
        config.setdefault("architectures", [architecture])
    return {"config.json": json.dumps(config, indent=2) + "\n"}
