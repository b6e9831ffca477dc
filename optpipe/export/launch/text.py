"""Text that launch files share: what a file starts and what it loses, as comments, and the lines of torchrun."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from textwrap import wrap

from optpipe.export.launch.reading import Launch, Untimed
from optpipe.units import time_text

WIDTH = 118


def all_lost(launch: Launch, lost: Iterable[str]) -> list[str]:
    """Sentences on what is lost in a trainer, on its hosts, and on what of that the prediction does not count."""
    every = [*lost, *launch.lost_on_hosts()]
    planned = _untimed(every)
    return [*every, f"time: predicted with {planned} as planned"] if planned else every


def _untimed(lost: Iterable[str]) -> str:
    """Names of what changes the time of a step by what is not predicted."""
    return " and ".join(sentence.partition(":")[0] for sentence in lost if isinstance(sentence, Untimed))


def header(launch: Launch, cut: Sequence[int], lost: Sequence[str], seconds: float) -> str:
    """Comments on the job, the predicted step, and what the trainer does not run of the plan."""
    lines = wrap(launch.title(cut), WIDTH)
    planned = _untimed(lost)
    what = f"with {planned} as planned, which this file starts otherwise" if planned else "for what this file starts"
    lines += wrap(f"Predicted {what}: {time_text(seconds * 1e6)} a step, by formula; nothing was measured.", WIDTH)
    if lost:
        lines.append("Lost against the plan:")
        for sentence in lost:
            lines += wrap(sentence, WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)


def script(launch: Launch, comments: str, before: Sequence[str], command: Sequence[str]) -> str:
    """Shell script that runs a command by torchrun, on each host with its NODE_RANK; `before`: lines in front of it.

    ``$folder`` is that of the script.
    """
    hosts = launch.plan.gpus // launch.host_gpus
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
