"""The ops of a schedule at their predicted times: one by one as the document has them, and a whole stream as columns.

A schedule may hold hundreds of thousands of ops. Columns are checked, kept and written at a fraction of what an object
for each op would cost; whoever reads one op gets that object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Annotated, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidatorFunctionWrapHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from optpipe.document import Document
from optpipe.fields import Index, Instant, are_indices, are_instants, reject
from optpipe.orders import KINDS, Op, OpArray, is_op_name

Floats = NDArray[np.float64]


def _op_name(name: str) -> str:
    try:
        Op.parse(name)
    except ValueError as error:
        raise reject("bad_op_name", f"is wrong: {error}") from None
    return name


def _is_list_of_names(value: Any) -> bool:
    return type(value) is list and all(isinstance(name, str) and is_op_name(name) for name in value)


class ScheduledOp(Document):
    """An op at its predicted times, with the ops of other streams that it waits for."""

    op: Literal["F", "B", "W", "BW", "O", "R"]
    stage: Index
    microbatch: Index
    start_us: Instant
    end_us: Instant
    waits: list[Annotated[str, AfterValidator(_op_name)]] = []

    @property
    def key(self) -> Op:
        """The op itself, without its times."""
        return Op(self.op, self.stage, self.microbatch)


_FIELDS = ("op", "stage", "microbatch", "start_us", "end_us")


class PlannedOps(Sequence[ScheduledOp]):
    """The ops of one stream in execution order, held as columns; reads like a list of ScheduledOp.

    `ops` are the ops, `starts` and `ends` their times in us, as they were given. `waits` holds the names of the ops
    that an op waits for, by place, where there are any. `silent` has the places where the document leaves them out.
    """

    def __init__(
        self,
        ops: OpArray | None = None,
        starts: Sequence[int | float] = (),
        ends: Sequence[int | float] = (),
        waits: Mapping[int, Sequence[str]] | None = None,
        silent: frozenset[int] = frozenset(),
    ) -> None:
        self.ops = OpArray([], [], []) if ops is None else ops
        self.starts, self.ends = starts, ends
        self.waits = waits or {}
        self.silent = silent

    @cached_property
    def start_us(self) -> Floats:
        """All starts as an array."""
        return np.asarray(self.starts, np.float64)

    @cached_property
    def end_us(self) -> Floats:
        """All ends as an array."""
        return np.asarray(self.ends, np.float64)

    def waits_of(self) -> dict[Op, list[Op]]:
        """The waits of all ops that have any."""
        return {self.ops[place]: [Op.parse(name) for name in names] for place, names in self.waits.items()}

    def to_data(self) -> list[dict[str, Any]]:
        """The ops as plain JSON values, only with the fields that were given."""
        ops = self.ops
        columns = ([KINDS[code] for code in ops.kind.tolist()], ops.stage.tolist(), ops.microbatch.tolist())
        rows = [
            {"op": kind, "stage": stage, "microbatch": microbatch, "start_us": start, "end_us": end, "waits": []}
            for kind, stage, microbatch, start, end in zip(*columns, self.starts, self.ends, strict=True)
        ]
        for place, names in self.waits.items():
            rows[place]["waits"] = list(names)
        for place in self.silent:
            del rows[place]["waits"]
        return rows

    def __len__(self) -> int:
        return len(self.ops)

    @overload
    def __getitem__(self, place: int) -> ScheduledOp: ...
    @overload
    def __getitem__(self, place: slice) -> list[ScheduledOp]: ...
    def __getitem__(self, place: int | slice) -> ScheduledOp | list[ScheduledOp]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        return self._row(range(len(self))[place], self.ops[place])

    def __iter__(self) -> Iterator[ScheduledOp]:
        return map(self._row, range(len(self)), self.ops)

    def _row(self, place: int, op: Op) -> ScheduledOp:
        values = dict(zip(_FIELDS, (*op, self.starts[place], self.ends[place]), strict=True))
        waits = list(self.waits.get(place, ()))
        given = {*_FIELDS} if place in self.silent else {*_FIELDS, "waits"}
        return ScheduledOp.model_construct(given, **values, waits=waits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlannedOps):
            return isinstance(other, list) and list(self) == other
        mine, others = ((list(p.starts), list(p.ends), dict(p.waits)) for p in (self, other))
        return self.ops == other.ops and mine == others

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PlannedOps({list(self)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A list of ScheduledOp to whoever reads or writes the document."""
        return core_schema.no_info_wrap_validator_function(
            cls._read,
            handler.generate_schema(list[ScheduledOp]),
            serialization=core_schema.plain_serializer_function_ser_schema(cls.to_data),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema["schema"])

    @classmethod
    def _read(cls, value: Any, one_by_one: ValidatorFunctionWrapHandler) -> PlannedOps:
        """Take what is there already; else check columns at once, and op by op only what that does not pass."""
        if isinstance(value, PlannedOps):
            return value
        return cls._of_rows(value) or cls._of_ops(one_by_one(value))

    @classmethod
    def _of_rows(cls, rows: Any) -> PlannedOps | None:
        """The columns of JSON objects; None where any of them might be wrong, or there are none."""
        if not isinstance(rows, list) or set(map(type, rows)) != {dict}:
            return None
        if not set(map(frozenset, rows)) <= {frozenset(_FIELDS), frozenset((*_FIELDS, "waits"))}:
            return None
        kinds, stages, microbatches, starts, ends = zip(*map(itemgetter(*_FIELDS), rows), strict=True)
        right = set(map(type, kinds)) == {str} and set(kinds) <= set(KINDS)
        right = right and are_indices(stages) and are_indices(microbatches)
        if not right or not are_instants(starts) or not are_instants(ends):
            return None
        waits = {k: row["waits"] for k, row in enumerate(rows) if row.get("waits", []) != []}
        if not all(map(_is_list_of_names, waits.values())):
            return None
        silent = frozenset(k for k, row in enumerate(rows) if "waits" not in row)
        return cls(OpArray.of_columns(kinds, stages, microbatches), starts, ends, waits, silent)

    @classmethod
    def _of_ops(cls, ops: Sequence[ScheduledOp]) -> PlannedOps:
        return cls(
            OpArray.of([op.key for op in ops]),
            [op.start_us for op in ops],
            [op.end_us for op in ops],
            {k: op.waits for k, op in enumerate(ops) if op.waits},
            frozenset(k for k, op in enumerate(ops) if "waits" not in op.model_fields_set),
        )
