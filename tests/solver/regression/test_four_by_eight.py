"""The suite `four-by-eight` solves what its generator draws, seed by seed."""

from __future__ import annotations

from instances.four_by_eight import DEVICES, MICROBATCHES, SEEDS, four_by_eight
from solver.regression.run import Suite, suites_folder


def test_each_file_is_the_problem_of_its_seed() -> None:
    folder = suites_folder()
    problems = [entry.load_problem(folder) for entry in Suite.load(folder / "four-by-eight.json").entries]
    assert problems == [four_by_eight(seed) for seed in SEEDS]


def test_all_that_is_asked_for_is_drawn() -> None:
    problems = [four_by_eight(seed) for seed in SEEDS]
    assert {(len(problem.devices), problem.microbatches) for problem in problems} == {(DEVICES, MICROBATCHES)}
    assert {problem.objective for problem in problems} == {"makespan", "device_span"}
    assert {len(problem.stages) for problem in problems} == {4, 8, 16}
    assert len({problem.devices[0].memory_bytes for problem in problems}) == 5
    copies = {stage.offload.offload_us / stage.forward_us for p in problems for stage in p.stages[:1] if stage.offload}
    assert min(copies) < 0.3
    assert max(copies) > 2.4
