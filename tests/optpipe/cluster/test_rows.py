"""Tables of measured steps: what a row says, what is assumed, and why one is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.cluster.rows import Row, Skipped, read_rows
from optpipe.errors import InputError

HEAD = (
    "id,model,machine,gpus,sequence,global_batch,microbatch,tp,pp,vpp,seconds_per_step,tokens_per_s_per_gpu,notes,"
    "task,ep,overlap,precision\n"
)


def read(path: Path, *lines: str) -> tuple[list[Row], list[Skipped]]:
    table = path / "rows.csv"
    table.write_text(HEAD + "\n".join(lines) + "\n")
    return read_rows(table)


def test_a_row_is_a_strategy(tmp_path: Path) -> None:
    [row], skipped = read(tmp_path, "a,llama-3.1-70b,h100-sxm,64,8192,128,1,4,4,5,14.66,,,")
    assert (row.strategy.tensor, row.strategy.pipeline, row.strategy.virtual, row.strategy.data) == (4, 4, 5, 4)
    assert (row.machine, row.seconds, row.strategy.schedule, skipped) == ("h100", 14.66, "interleaved-1f1b", [])


@pytest.mark.parametrize(
    ("cell", "overlap"), [("", "no"), ("ep a2a (1f1b)", "yes"), ('"ep, delayed wgrad"', "yes"), ("none (a2a)", "no")]
)
def test_exchanges_of_experts_are_hidden_where_a_row_says_so(tmp_path: Path, cell: str, overlap: str) -> None:
    [row], _ = read(tmp_path, f"a,mixtral-8x7b,h100,8,4096,64,1,1,1,,14,,,,8,{cell}")
    assert row.strategy.overlap == overlap


def test_time_follows_from_tokens(tmp_path: Path) -> None:
    [row], _ = read(tmp_path, "a,llama-3.1-8b,h100,8,8192,128,1,1,1,,,10000,,")
    assert row.seconds == pytest.approx(128 * 8192 / 8 / 10_000)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a,unknown,h100,8,8192,8,1,1,1,,1,,,", "model 'unknown' is not known"),
        ("a,llama-3.1-8b,h100,12,8192,8,1,8,1,,1,,,", "tp x cp x pp = 8 does not divide 12 GPUs"),
        ("a,llama-3.1-8b,h100,8,,8,1,1,1,,1,,,", "sequence is not stated"),
        ("a,llama-3.1-8b,h100,8,8192,12,1,1,1,,1,,,", "global_batch 12 is no multiple of dp x microbatch = 8"),
        ("a,llama-3.1-8b,h100,8,8192,8,1,1,1,,1,,,lora", "task 'lora' does not train all parameters"),
        (
            "a,gpt2-xl,h100,8,4096,8,1,1,1,,,,,",
            "sequence 4096 is longer than the 1024 learned positions of the model",
        ),
        ("a,llama-3.1-8b,h100,1.5,8192,8,1,1,1,,1,,,", "gpus is 1.5, which is no whole number"),
        ("a,llama-3.1-8b,h100,8,8192,8,1,two,1,,1,,,", "tp is 'two', but must be a number between 0 and 1,000,000,000"),
        (
            "a,llama-3.1-8b,h100,8,8192,8,1,1,1,,-3,,,",
            "seconds_per_step is '-3', but must be a number between 0 and 1,000,000,000",
        ),
        (
            "a,llama-3.1-8b,h100,8,8192,8,1,1,1,,1,,,,,,int4",
            "precision is 'int4', but must be bf16, fp16, or name fp8 or fp4",
        ),
    ],
)
def test_what_cannot_be_predicted_is_skipped_with_the_reason(tmp_path: Path, line: str, reason: str) -> None:
    rows, skipped = read(tmp_path, line)
    assert (rows, skipped) == ([], [Skipped("a", reason)])


def test_a_measured_row_had_the_positions(tmp_path: Path) -> None:
    rows, skipped = read(tmp_path, "a,gpt2-xl,h100,8,4096,8,1,1,1,,1,,,")
    assert ([row.sequence for row in rows], skipped) == ([4096], [])


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("hello\n1\n")
    with pytest.raises(InputError, match=r"has no column 'model' but 'hello'\. Maybe its first line is no head"):
        read_rows(path)
    path.write_text('{"format": "optpipe.plan/1"}')
    with pytest.raises(InputError, match=r"is a plan but a table of measured steps \(CSV\) is needed\. Maybe write"):
        read_rows(path)
    path.write_text(HEAD + "a" * 200_000)
    with pytest.raises(InputError, match="field larger than field limit"):
        read_rows(path)
