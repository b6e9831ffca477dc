"""The problem document: what is read back, what is refused, and in which words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from instances import INSTANCES, uniform
from optpipe.errors import InputError
from optpipe.problem import Problem
from tests.problems import problems

Edit = Callable[[dict[str, Any]], Any]
FILES = sorted(path for path in INSTANCES.glob("*.json") if path.name != "reference.json")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_round_trip_is_identical(path: Path) -> None:
    assert Problem.load(path).to_json() == path.read_text()


def test_there_are_instances() -> None:
    assert len(FILES) >= 80


@given(problems())
def test_random_problems_round_trip(problem: Problem) -> None:
    assert Problem.from_json(problem.to_json()) == problem


EXAMPLE = uniform(2, 2, budget=9, offload={"bytes": 1, "offload_us": 5, "reload_us": 5}).to_data()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda d: d["stages"][0].update(foward_us=1),
            "stages[0].foward_us is not a field. Maybe you meant forward_us.",
        ),
        (lambda d: d.update(microbatchs=1), "microbatchs is not a field. Maybe you meant microbatches."),
        (lambda d: d.update(memory_bytes=1), "memory_bytes is not a field. Maybe you meant host_memory_bytes."),
        (
            lambda d: d.update(transfer_us=[{"foward": 1}]),
            "transfer_us[0].foward is not a field. Maybe you meant forward.",
        ),
        (lambda d: d.update(transfer_us=[[1]]), "transfer_us[0] is [1] but must be a finite number of microseconds."),
        (lambda d: d["devices"].append(3), "devices[2] is 3: input should be a valid dictionary."),
        (lambda d: d.update(devices=[]), "devices is []: list should have at least 1 item."),
        (lambda d: d["stages"][1].update(forward_us=-1), "stages[1].forward_us is -1 but must be at least 0. Maybe"),
        (lambda d: d["stages"][1].update(forward_us=float("nan")), "stages[1].forward_us is NaN but must be a finite"),
        (lambda d: d["stages"][1].update(forward_us=True), "stages[1].forward_us is true but must be a finite"),
        (lambda d: d["stages"][1].update(forward_us=10**399), "... but at most 1000000000000 us are allowed. Maybe"),
        (
            lambda d: d["stages"][1].update(forward_us=1e31),
            "stages[1].forward_us is 1e+31 but at most 1000000000000 us",
        ),
        (lambda d: d["stages"][1].update(activation_bytes=10**399), "but must be from 0 to"),
        (lambda d: d["stages"][1].update(forward_us="10"), "stages[1].forward_us is '10' but must be a finite"),
        (lambda d: d["stages"][1].update(forward_us=1e13), "stages[1].forward_us is 10000000000000.0 but at most"),
        (
            lambda d: d["stages"][0]["offload"].update(bytes=3),
            "stages[0] has offload.bytes 3 but activation_bytes is 2.",
        ),
        (lambda d: d["stages"][0].update(device=2), "stages[0].device is 2 but there are 2 devices"),
        (
            lambda d: d["stages"][0].update(activation_bytes=1.5),
            "stages[0].activation_bytes is 1.5 but must be an integer",
        ),
        (
            lambda d: d["devices"][0].update(memory_bytes=8e9),
            "must be an integer (bytes). Maybe 8000000000, without a point or an exponent.",
        ),
        (lambda d: d["stages"][0].update(activation_bytes=2**53), "stages[0].activation_bytes is 9007199254740992 but"),
        (lambda d: d.update(microbatches=0), "microbatches is 0 but must be from 1 to"),
        (
            lambda d: d.update(transfer_us=[1, 1]),
            "transfer_us has 2 entries but 2 stages have 1 boundaries. Maybe one entry too many",
        ),
        (
            lambda d: d.update(transfer_us=[]),
            "transfer_us has 0 entries but 2 stages have 1 boundaries. Maybe one was left out: ",
        ),
        (lambda d: d.update(transfer_us=[{"forward": 1}]), "transfer_us[0].backward is missing."),
        (
            lambda d: d.update(transfer_us={"forward": 1, "backward": -2}),
            "transfer_us.backward is -2 but must be at least",
        ),
        (
            lambda d: d.update(copy_channels={"shared_by": [[0, 1], [1]]}),
            "copy_channels.shared_by[1] names device 1, which",
        ),
        (
            lambda d: d.update(copy_channels={"shared_by": [[4]]}),
            "copy_channels.shared_by[0] names device 4 of 2, counted from 0. Maybe a device is missing from devices.",
        ),
        (lambda d: d.update(objective="bubble"), "objective is 'bubble'"),
        (lambda d: d.update(format="optpipe.problem/2"), "format is 'optpipe.problem/2'"),
        (lambda d: d.pop("devices"), "devices is missing."),
        (lambda d: d.pop("format"), "format is missing. Maybe optpipe.problem/1."),
        (
            lambda d: d["stages"][0].update(backward_us=1),
            "stages[0].backward_us is not a field. Maybe you meant backward_input_us.",
        ),
        (
            lambda d: d["devices"][0].update(memory_bytes="40 GB"),
            "devices[0].memory_bytes is '40 GB' but must be an integer (bytes). Maybe 40000000000.",
        ),
        (lambda d: d.update(stages=[]), "stages is []"),
        (lambda d: d["stages"][0].update(workspace_bytes={"X": 1}), "stages[0].workspace_bytes.X is not a field."),
    ],
)
def test_says_what_is_wrong(edit: Edit, message: str) -> None:
    data = copy.deepcopy(EXAMPLE)
    edit(data)
    with pytest.raises(InputError) as caught:
        Problem.from_data(data)
    assert message in str(caught.value)


def test_lists_everything_that_is_wrong() -> None:
    data = copy.deepcopy(EXAMPLE)
    data["stages"][0]["forward_us"] = -1
    data["stages"][1]["backward_weight_us"] = None
    data["extra"] = 1
    with pytest.raises(InputError) as caught:
        Problem.from_data(data)
    pointers = {issue.pointer for issue in caught.value.issues}
    assert pointers == {"stages[0].forward_us", "stages[1].backward_weight_us", "extra"}


def test_what_was_derived_from_problems_says_nothing_of_their_equality() -> None:
    one, same, other = uniform(3, 4), uniform(3, 4), uniform(3, 5)
    for problem in (one, other):
        for name, derived in vars(Problem).items():
            if isinstance(derived, cached_property):
                getattr(problem, name)
    assert (one == same, one == other, one == one.to_data()) == (True, False, False)


def test_delays_vanish_on_one_device_and_follow_direction() -> None:
    data = uniform(2, 1, v_shape=True).to_data() | {"transfer_us": [{"forward": 1, "backward": 2}, 7, 3]}
    problem = Problem.from_data(data)
    assert problem.forward_delay_us == [1, 0, 3]
    assert problem.backward_delay_us == [2, 0, 3]


def test_a_schedule_is_not_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"format": "optpipe.schedule/1"}')
    with pytest.raises(InputError, match="is a schedule but a problem is needed"):
        Problem.load(path)


def test_a_field_of_another_place_is_not_proposed_for_itself() -> None:
    data = copy.deepcopy(EXAMPLE)
    data["stages"][0]["memory_bytes"] = 1
    with pytest.raises(InputError, match=r"^stages\[0\]\.memory_bytes is not a field\.$"):
        Problem.from_data(data)
