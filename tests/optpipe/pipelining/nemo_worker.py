"""NeMo AutoModel's AutoPipeline by torch's 1F1B and by a planned schedule: usage nemo_worker.py SCHEDULE FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from optpipe.pipelining import PlannedSchedule

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
ENTRIES = 64


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def gradients(path: Path | None) -> tuple[list[Tensor], list[float]]:
    """Gradients of one step by the schedule of a file, in the place of the one that AutoPipeline has made."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=ENTRIES, use_cache=False))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pipeline = AutoPipeline(
        world_mesh=mesh,
        pp_microbatch_size=2,
        pp_batch_size=8,
        device=torch.device("cpu"),
        scale_grads_in_schedule=True,
    ).build(model, loss_fn=loss_of)
    if path is not None:
        pipeline.info.schedule = PlannedSchedule(pipeline.info.stages, path, loss_fn=loss_of)
    x, losses = torch.randint(ENTRIES, (8, 16)), []
    last = {"target": x, "losses": losses} if pipeline.info.has_last_stage else {}
    pipeline.step(x, **last)
    found = [p.grad for part in pipeline.parts for p in part.parameters() if p.grad is not None]
    return found, [float(loss.detach()) for loss in losses]


def main(schedule: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (expected, expected_losses), (found, losses) = gradients(None), gradients(schedule)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
    result = {"error": error, "compared": len(found), "losses": losses, "expected": expected_losses}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
