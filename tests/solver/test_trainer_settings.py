"""Settings of Megatron-LM and torchtitan that come nearest to a schedule."""

from __future__ import annotations

from typing import Any

import pytest

from instances import uniform
from instances.schedules import v_wave
from optpipe.errors import InputError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe.simulate import simulate
from solver.build import build_schedule
from solver.microbatch_orders import in_order, with_own_numbers
from solver.published.interleaved import interleaved_1f1b
from solver.published.one_stage import one_f_one_b as fused
from solver.solve import solve
from solver.trainer_settings import Setting, Trainer, left_to_the_user, nearest_settings, pipeline_settings
from tests.optpipe.test_spread import vocabulary
from tests.recomputing import one_f_one_b, recomputing, with_frozen
from tests.sliced_schedules import seq1f1b_schedule
from tests.unequal import times, unequal

TRAINERS: tuple[Trainer, ...] = ("megatron", "torchtitan")

P, M = 4, 8
BLOCKS = [
    {"name": f"selective-{n}", "kept_bytes": 10 - 2 * n, "recompute_us": n / 4, "segment_bytes": 2} for n in (1, 2, 3)
]
MODES = [
    {"name": "full", "kept_bytes": 1, "recompute_us": 1, "segment_bytes": 9},
    *BLOCKS,
    {"name": "selective", "kept_bytes": 2, "recompute_us": 1, "segment_bytes": 3},
    {"name": "selective-groups-2", "kept_bytes": 1, "recompute_us": 1, "segment_bytes": 5},
    {"name": "selective:mlp", "kept_bytes": 6, "recompute_us": 0.5, "segment_bytes": 1},
    {"name": "ahead", "kept_bytes": 1, "recompute_us": 1},
]
OFFLOAD = {"bytes": 8, "offload_us": 0.5, "reload_us": 0.5}


def schedule(budget: int | None, **stage: Any) -> Schedule:
    """1F1B that recomputes ahead, on blocks of four layers a stage, in which every op takes 1 us."""
    problem = recomputing(P, M, MODES, budget, **stage)
    return build_schedule(problem, one_f_one_b(problem, lambda _s, _i: "C BW"), 0.0, "by hand", 0.0)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_spread_passes_are_refused(trainer: Trainer) -> None:
    given = solve(Problem.from_data(vocabulary(2, 4)), "vocab-2")
    with pytest.raises(InputError, match=r"spread has S, T, but .* runs no passes of all devices\. Maybe train with"):
        nearest_settings(given, trainer)


def by_mode(found: list[Setting]) -> dict[str, Setting]:
    return {one.mode: one for one in found}


def test_flags_of_megatron_and_what_a_step_takes_by_them() -> None:
    """Closed forms of 1F1B: (m + p - 1)(F + C + BW), and p - i microbatches on stage i."""
    found = by_mode(nearest_settings(schedule(None, offload=OFFLOAD), "megatron"))
    assert found["kept"].settings == []
    assert (found["kept"].value_us, found["kept"].peak_bytes) == ((M + P - 1) * 3, [40, 30, 20, 10])
    assert found["full"].settings == [
        *("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 4")
    ]
    assert (found["full"].value_us, found["full"].peak_bytes) == ((M + P - 1) * 4, [13, 12, 11, 10])
    assert found["full"].bubble == pytest.approx(1 - 3 * M / ((M + P - 1) * 4))
    assert found["selective"].settings[1:] == ["--recompute-method uniform", "--recompute-num-layers 1"]
    assert found["selective-groups-2"].settings[1:] == ["--recompute-method uniform", "--recompute-num-layers 2"]
    assert found["selective"].peak_bytes[0] == P * 2 + 8, "at the start of F a whole activation is there"
    assert found["selective-3"].settings[1:] == ["--recompute-method block", "--recompute-num-layers 3"]
    assert found["selective-3"].value_us == (M + P - 1) * 3.75
    assert found["selective:mlp"].settings == ["--recompute-granularity selective", "--recompute-modules mlp"]
    assert found["offload"].settings[0] == "--fine-grained-activation-offloading"
    assert "ahead" not in found


def test_the_fastest_setting_within_the_budgets_comes_first() -> None:
    unlimited = nearest_settings(schedule(None), "megatron")
    assert unlimited[0].mode == "kept"
    first, *others = nearest_settings(schedule(28), "megatron")
    assert (first.mode, first.short_bytes) == ("selective-2", 0)
    assert [one.short_bytes for one in others] == sorted(one.short_bytes for one in others)
    assert by_mode(others)["kept"].short_bytes == 40 - 28


def test_an_offload_keeps_the_budget_by_copies() -> None:
    found = by_mode(nearest_settings(schedule(30, offload=OFFLOAD), "megatron"))
    assert max(found["offload"].peak_bytes) <= 30
    assert found["offload"].value_us >= (M + P - 1) * 3


def test_settings_of_torchtitan_with_the_schedules_order_or_its_own() -> None:
    found = nearest_settings(schedule(None), "torchtitan")
    csv, name = (
        "--parallelism.pipeline_parallel_schedule_csv schedule.csv",
        "--parallelism.pipeline_parallel_schedule 1F1B",
    )
    activations = {tuple(flag for flag in one.settings if flag not in (csv, name)) for one in found}
    frequency = "--activation_checkpoint.selective_ac_option"
    assert all(name in one.settings for one in found), "it says which stages a rank makes, whichever order they run in"
    assert activations == {
        ("--activation_checkpoint.mode none",),
        ("--activation_checkpoint.mode full",),
        ("--activation_checkpoint.mode selective", f"{frequency} 2"),
        ("--activation_checkpoint.mode selective", f"{frequency} 3"),
    }
    assert {one.mode for one in found} == {"kept", "selective", "selective-2", "selective-1"}
    own = [one.value_us for one in found if one.settings[0] == csv]
    assert sorted(own) == sorted(one.value_us for one in found if one.settings[0] == name), "the order is 1F1B"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_stage_without_the_mode_of_others_leaves_it_out(trainer: Trainer) -> None:
    data = recomputing(2, 4, MODES).to_data()
    data["stages"][1]["modes"] = [mode for mode in MODES if mode["name"] != "selective"]
    problem = Problem.from_data(data)
    given = build_schedule(problem, one_f_one_b(problem, lambda _s, _i: "BW"), 0.0, "by hand", 0.0)
    modes = {one.mode for one in nearest_settings(given, trainer)}
    assert "selective" not in modes
    assert "full" not in modes, "nothing says the layers of a stage"


@pytest.mark.parametrize(("cut", "layers"), [("4,4", "3"), ("4,5", None), ("5,5", "4"), ("", None)])
def test_full_recomputation_of_megatron_needs_equal_stages(cut: str, layers: str | None) -> None:
    """The first layer of a cut is the embedding, the last one the head."""
    name = {"name": f"a model, cut {cut}"} if cut else {}
    problem = Problem.from_data(recomputing(2, 4, MODES[:1]).to_data() | name)
    given = build_schedule(problem, one_f_one_b(problem, lambda _s, _i: "BW"), 0.0, "by hand", 0.0)
    full = by_mode(nearest_settings(given, "megatron")).get("full")
    assert (full and full.settings[-1]) == (layers and f"--recompute-num-layers {layers}")


def test_megatron_recomputes_multi_token_prediction_layer_by_layer() -> None:
    for name, whole in (("a model, cut 4,3,3,4", True), ("a model, mtp1, cut 4,3,3,4", False)):
        problem = Problem.from_data(recomputing(P, M, MODES).to_data() | {"name": name})
        given = build_schedule(problem, one_f_one_b(problem, lambda _s, _i: "BW"), 0.0, "by hand", 0.0)
        modes = by_mode(nearest_settings(given, "megatron"))
        assert ("full" in modes, "selective-1" in modes, "selective" in modes) == (whole, whole, True)


def test_flags_of_the_pipeline_itself() -> None:
    def named(stages: int, name: str) -> Problem:
        data = uniform(2, 4).to_data()
        return Problem.from_data(data | {"stages": data["stages"] * (stages // 2), "name": name})

    size = "--pipeline-model-parallel-size 2"
    assert pipeline_settings(named(2, "x"), "megatron") == [size]
    assert pipeline_settings(named(4, "x"), "megatron") == [size, "--num-virtual-stages-per-pipeline-rank 2"]
    layout = "--pipeline-model-parallel-layout Et|(tt|)*2tL"
    assert pipeline_settings(named(4, "x, cut 2,2,2,2"), "megatron") == [size, layout]
    assert pipeline_settings(named(4, "x, mtp1, cut 2,2,2,3"), "megatron") == [size, layout[:-1] + "mL"]
    alone = "--pipeline-model-parallel-layout Et|tt|m|L"
    assert pipeline_settings(named(4, "x, mtp1, cut 2,2,1,1"), "megatron") == [size, alone]
    assert pipeline_settings(named(2, "x"), "torchtitan") == ["--parallelism.pipeline_parallel_degree 2"]


def looped(devices: int, chunks: int, microbatches: int, name: str = "") -> Problem:
    data = uniform(devices * chunks, microbatches).to_data()
    stages = [stage | {"device": s % devices} for s, stage in enumerate(data["stages"])]
    return Problem.from_data(data | {"devices": data["devices"][:devices], "stages": stages, "name": name})


@pytest.mark.parametrize(("microbatches", "group"), [(8, None), (9, 5), (10, 5), (13, 7)])
def test_megatron_is_told_of_groups_that_it_does_not_make_by_itself(microbatches: int, group: int | None) -> None:
    """Its own are of 4, and it refuses a last one of fewer. The order simulated has the same groups."""
    problem = looped(4, 2, microbatches)
    flags = pipeline_settings(problem, "megatron")[2:]
    assert flags == ([] if group is None else [f"--microbatch-group-size-per-virtual-pipeline-stage {group}"])
    orders = interleaved_1f1b(problem, group)
    assert {op.microbatch for op in [*orders.devices[0].compute][: group or 4]} == {*range(group or 4)}
    [found] = nearest_settings(build_schedule(problem, orders, 0.0, "by hand", 0.0), "megatron")
    assert found.value_us == simulate(problem, orders).value_us


def test_megatron_interleaves_no_fewer_microbatches_than_devices() -> None:
    with pytest.raises(InputError, match=r"^problem\.microbatches is 3, but Megatron-LM interleaves .* with 4 or more"):
        pipeline_settings(looped(4, 2, 3), "megatron")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (build_schedule(looped(4, 2, 8), interleaved_1f1b(looped(4, 2, 8)), 0.0, "", 0.0), "Interleaved1F1B"),
        (v_wave(4, 8), "ZBVZeroBubble"),
    ],
    ids=["loop", "v"],
)
def test_torchtitan_places_stages_by_the_name_of_a_schedule(given: Schedule, name: str) -> None:
    flag = f"--parallelism.pipeline_parallel_schedule {name}"
    assert all(flag in one.settings for one in nearest_settings(given, "torchtitan"))


@pytest.mark.parametrize(("trainer", "name"), [("torchtitan", "torchtitan"), ("megatron", "Megatron-LM")])
def test_trainers_have_no_other_placements(trainer: Trainer, name: str) -> None:
    data = looped(2, 2, 4).to_data()
    data["stages"] = [stage | {"device": device} for stage, device in zip(data["stages"], (0, 0, 1, 1), strict=True)]
    with pytest.raises(InputError, match=rf"stages is placed as {name} does not: .* Maybe train with Planned"):
        nearest_settings(solve(Problem.from_data(data), "ada-offload"), trainer)


@pytest.mark.parametrize(("devices", "chunks", "microbatches", "takes"), [(4, 1, 3, 0), (4, 2, 9, 0), (4, 2, 10, 1)])
def test_orders_of_torch_that_it_refuses_for_such_microbatches_are_no_setting(
    devices: int, chunks: int, microbatches: int, takes: int
) -> None:
    problem = looped(devices, chunks, microbatches)
    given = build_schedule(problem, (interleaved_1f1b if chunks > 1 else fused)(problem), 0.0, "by hand", 0.0)
    found = nearest_settings(given, "torchtitan")
    assert [any("csv" in flag for flag in one.settings) for one in found].count(False) == takes


def test_stages_that_no_flag_of_torchtitan_states_are_named() -> None:
    assert not [*left_to_the_user(looped(2, 2, 4), "torchtitan")]
    assert not [*left_to_the_user(looped(2, 2, 4, "x, cut 2,2,2,2"), "megatron")]
    [cut] = left_to_the_user(looped(2, 2, 4, "x, cut 2,3,2,2"), "torchtitan")
    assert "to 4 stages of 2,3,2,2 layers, embedding and output layer among them, else layers are spread evenly" in cut
    [many] = left_to_the_user(looped(2, 3, 4), "torchtitan")
    assert many.endswith("module_fqns_per_model_part to 6 stages, else layers are spread evenly over 4")


@pytest.mark.parametrize(("trainer", "name"), [("megatron", "Megatron-LM"), ("torchtitan", "torchtitan")])
def test_slices_and_stages_without_a_backward_are_refused(trainer: Trainer, name: str) -> None:
    with pytest.raises(InputError, match=rf"^problem\.stages\[0\]\.backward is 'none', but {name} sends every stage"):
        nearest_settings(with_frozen(v_wave(2, 4), 1), trainer)
    with pytest.raises(InputError, match=rf"^problem\.slices\.count is 2, but {name} runs microbatches whole\. Maybe"):
        nearest_settings(seq1f1b_schedule(2, 4, 2), trainer)


def test_unequal_microbatches_come_in_the_schedules_order() -> None:
    """1F1B of costs 1 to 4 twice takes 106 in the order given, 82 in the best."""
    eight = unequal(4, 8, microbatch_factors=times(1, 2, 3, 4, 1, 2, 3, 4), microbatch_order="free")
    best = [0, 1, 2, 3, 7, 6, 5, 4]
    orders = with_own_numbers(eight, fused(in_order(eight, best)), best)
    assert nearest_settings(build_schedule(eight, fused(eight), 0.0, "", 0.0), "megatron")[0].value_us == 106
    given = build_schedule(eight, orders, 0.0, "by hand", 0.0)
    assert {one.value_us for name in TRAINERS for one in nearest_settings(given, name)} == {82}


def test_torchtitan_runs_no_microbatches_of_other_sizes() -> None:
    longer = unequal(2, 4, microbatch_factors=[{}, {"time": 2, "transfer": 2}, {}, {}])
    given = build_schedule(longer, fused(longer), 0.0, "by hand", 0.0)
    with pytest.raises(InputError, match=r"^problem\.microbatch_factors\[1\] makes this microbatch of another size"):
        nearest_settings(given, "torchtitan")
    assert nearest_settings(given, "megatron")[0].value_us == given.value_us


def test_blocks_of_megatron_are_interleaved_1f1b_with_a_flag() -> None:
    pairs = [(f, b) for f in range(8) for b in range(8) if f % 4 == b % 4]
    blocks = [{"forward_stage": f, "backward_stage": b, "us": 24} for f, b in pairs]
    problem = uniform(8, M, transfer_us=0)
    devices = [{"memory_bytes": None}] * 4
    stages = [stage.to_data() | {"device": s % 4} for s, stage in enumerate(problem.stages)]
    problem = Problem.from_data(problem.to_data() | {"devices": devices, "stages": stages, "overlaps": blocks})
    hidden, plain = nearest_settings(
        build_schedule(problem, interleaved_1f1b(problem), 0.0, "by hand", 0.0), "megatron"
    )
    assert (hidden.settings, hidden.blocks, hidden.value_us) == (["--overlap-moe-expert-parallel-comm"], True, 504)
    assert hidden.bubble == pytest.approx(1 - (480 - 5 * 6) / 504)  # the first device has the longest warm-up
    assert (plain.settings, plain.blocks, plain.value_us) == ([], False, 570)


def test_megatron_has_no_v() -> None:
    with pytest.raises(InputError, match=r"is placed as Megatron-LM does not.* Maybe use --to torchtitan"):
        nearest_settings(v_wave(2, 4), "megatron")
