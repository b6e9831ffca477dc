"""`optpipe machines`, `fits` and `calibrate`: tables, documents, exit codes and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from optpipe.cluster.machine import Machine, named_machines
from tests.optpipe.cli.conftest import Cli

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
LLAMA = ("llama-3.1-70b", "--gpus", 64, "--machine", "h100", "--sequence", 8192, "--global-batch", 128)


def test_every_named_machine_is_listed(cli: Cli) -> None:
    run = cli("machines")
    assert [line.split()[0] for line in run.out.splitlines()[1:-1]] == list(named_machines())
    [machine] = cli("machines", "h200", "--json").document["machines"]
    assert machine["facts"]["memory_bytes"] == 141 * 2**30
    assert "no source seen" not in cli("machines", "h200").out
    assert cli("machines", "h201").err.endswith("Maybe 'h200'.\n")


def test_a_job_that_fits(cli: Cli) -> None:
    run = cli("fits", *LLAMA, "--tp", 4, "--cp", 2, "--pp", 4, "--vpp", 5, "--json")
    document = run.document
    assert (run.code, document["fits"], document["change"]) == (0, True, None)
    assert [rank["device"] for rank in document["ranks"]] == [0, 1, 2, 3]
    for rank in document["ranks"]:
        kinds = ("weights", "gradients", "optimizer", "activations", "fragments", "context")
        assert sum(rank[f"{kind}_bytes"] for kind in kinds) == pytest.approx(rank["total_bytes"], abs=6)
        assert rank["left_bytes"] == document["memory_bytes"] - rank["total_bytes"]
    assert document["ranks"][0]["activations_bytes"] > document["ranks"][3]["activations_bytes"]


def test_a_job_that_does_not_fit_is_told_the_cheapest_change(cli: Cli) -> None:
    run = cli("fits", *LLAMA, "--tp", 4, "--pp", 2, "--json")
    assert (run.code, run.document["fits"]) == (1, False)
    option, value = run.document["change"]["option"].split()
    changed = ["--tp", 4, "--pp", 2]
    changed[changed.index(option) + 1 if option in changed else slice(2, 2)] = value if option in changed else ()  # type: ignore[call-overload]
    again = cli("fits", *LLAMA, *changed, *([] if option in changed else [option, value]))
    assert (again.code, "fits:" in again.out) == (0, True)


def test_a_schedule_from_a_file_is_held_as_it_is(cli: Cli, tmp_path: Path) -> None:
    """GPipe holds every microbatch."""
    job = (*LLAMA, "--tp", 8, "--pp", 8)
    cli("solve", *_problem(cli, tmp_path), "-o", tmp_path / "gpipe.json", "--method", "gpipe")
    held = [
        cli("fits", *job, "--schedule", schedule, "--json").document["ranks"][7]["activations_bytes"]
        for schedule in ("gpipe", tmp_path / "gpipe.json", "1f1b")
    ]
    assert held[0] == held[1] > 8 * held[2]


def _problem(cli: Cli, folder: Path) -> tuple[Path]:
    from instances import uniform

    path = folder / "problem.json"
    path.write_text(uniform(8, 128).to_json())
    return (path,)


def test_calibration_writes_a_machine_and_checks_it(cli: Cli, tmp_path: Path) -> None:
    rows, models, ours = PUBLISHED / "steps.csv", PUBLISHED / "models.json", tmp_path / "ours.toml"
    run = cli("calibrate", rows, "--machine", "b200", "--models", models, "-o", ours)
    assert (run.code, f"wrote {ours}" in run.out) == (0, True)
    assert Machine.load(ours).facts == named_machines()["b200"].facts
    document = cli("calibrate", rows, "--machine", ours, "--models", models, "--check", "--json").document
    errors = sorted(abs(row["error"]) for row in document["rows"] if row["error"] is not None)
    assert document["median_error"] == pytest.approx(errors[len(errors) // 2], abs=0.002)
    assert document["median_error"] < 0.03
    assert document["median_memory_error"] < 0.03
    assert {"id", "predicted_s", "measured_s", "error", "predicted_peak_gib", "measured_peak_gib", "fits"} <= set(
        document["rows"][0]
    )
    reasons = {one["reason"] for one in document["skipped"]}
    assert {"does not name its machine", "was measured on h100", "sequence is not stated"} <= reasons


def test_what_cannot_be_calibrated(cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("model,gpus,sequence,global_batch,seconds_per_step\nllama-3.1-8b,8,8192,64,3\n")
    run = cli("calibrate", rows, "--machine", "h100")
    assert (run.code, "has 1 rows of h100 with a time" in run.err) == (2, True)
    checked = cli("calibrate", rows, "--machine", "h100", "--check", "--json")
    assert (checked.code, len(checked.document["rows"])) == (0, 1)
    assert cli("calibrate", rows, "--machine", "h100", "--check", "-o", tmp_path / "x.toml").code == 2
    assert cli("calibrate", tmp_path / "none.csv", "--machine", "h100").code == 2
