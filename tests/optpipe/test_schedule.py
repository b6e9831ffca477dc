"""A stream of planned ops: columns inside, a list of ops to whoever reads it, and nothing lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from instances import uniform
from optpipe.document import UNION_TAG
from optpipe.errors import InputError
from optpipe.ops import Op
from optpipe.schedule import PlannedOps, Schedule, ScheduledOp
from solver.solve import solve

STREAM: TypeAdapter[PlannedOps] = TypeAdapter(PlannedOps)


def row(**changes: Any) -> dict[str, Any]:
    return {"op": "F", "stage": 1, "microbatch": 2, "start_us": 0, "end_us": 10.5, "waits": []} | changes


def test_reads_like_a_list_of_ops() -> None:
    planned = STREAM.validate_python([row(), row(op="B", waits=["O1.2"])])
    assert len(planned) == 2
    assert planned[-1] == ScheduledOp(op="B", stage=1, microbatch=2, start_us=0, end_us=10.5, waits=["O1.2"])
    assert [op.key for op in planned] == [Op("F", 1, 2), Op("B", 1, 2)]
    assert planned[:1] == [planned[0]]
    assert planned.waits_of() == {Op("B", 1, 2): [Op("O", 1, 2)]}


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(), row(start_us=10**25, waits=["O1.2", "R0.0"])],
        [{key: value for key, value in row().items() if key != "waits"}, row()],
    ],
)
def test_what_is_written_is_what_was_read(rows: list[dict[str, Any]]) -> None:
    written = STREAM.dump_python(STREAM.validate_python(rows))
    assert written == rows
    assert [list(map(type, entry.values())) for entry in written] == [list(map(type, e.values())) for e in rows]


def test_ops_one_by_one_make_the_same_stream() -> None:
    planned = STREAM.validate_python([row(), row(waits=["O1.2"])])
    again = STREAM.validate_python(list(planned))
    assert again == planned
    assert again.to_data() == planned.to_data()
    assert planned != STREAM.validate_python([row(), row(waits=["O1.3"])])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"op": "X"}, "op"),
        ({"op": ["F"]}, "op"),
        ({"stage": True}, "stage"),
        ({"stage": -1}, "stage"),
        ({"microbatch": 10**6}, "microbatch"),
        ({"microbatch": 2.0}, "microbatch"),
        ({"start_us": float("nan")}, "start_us"),
        ({"end_us": 10**400}, "end_us"),
        ({"end_us": "1"}, "end_us"),
        ({"waits": None}, "waits"),
        ({"waits": ["Q1"]}, "waits"),
        ({"waits": "O1.2"}, "waits"),
        ({"extra": 1}, "extra"),
    ],
)
def test_one_wrong_op_among_right_ones_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        STREAM.validate_python([row(), row(**changes), row()])
    assert path(caught.value.errors()[0]["loc"])[:2] == [1, field]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValidationError) as caught:
        STREAM.validate_python([{"op": "F"}])
    assert [0, "stage"] in [path(error["loc"]) for error in caught.value.errors()]


def path(loc: tuple[int | str, ...]) -> list[int | str]:
    """Where an error is, without the names of alternatives."""
    return [part for part in loc if not str(part).startswith(UNION_TAG)]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_its_schema_is_that_of_a_list_of_ops(mode: Any) -> None:
    schema = STREAM.json_schema(mode=mode)
    assert schema["type"] == "array"
    kinds = {"$ref": "#/$defs/ScheduledOp"}, {"$ref": "#/$defs/ScheduledPass"}
    assert schema["items"] == {"oneOf": [*kinds]}


def test_times_of_numpy_are_plain_numbers() -> None:
    """Whoever makes a schedule in Python may have them; written to a file they must read as numbers."""
    planned = STREAM.validate_python([row(start_us=np.float64(0.25))])
    assert type(planned.starts[0]) is float
    assert planned[0].start_us == 0.25


@pytest.mark.parametrize("mode", [{}, [], 3, "x" * 101])
def test_a_mode_that_is_no_name_is_refused(mode: Any) -> None:
    data = solve(uniform(2, 2), "1f1b").to_data()
    data["devices"][0]["compute"][0]["mode"] = mode
    with pytest.raises(InputError, match=r"devices\[0\]\.compute\[0\]\.mode is "):
        Schedule.from_data(data)
