"""Bodies as documents: strict JSON, checked whole, every fault with its pointer."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from api.faults import problem_of_input, unprocessable
from optpipe.document import Document, parse_json
from optpipe.errors import InputError

D = TypeVar("D", bound=Document)

MOST_FAULTS = 20
"""Faults of one body that are told. To word one takes milliseconds, and nobody reads a thousand."""


def read_document(model: type[D], body: bytes) -> D:
    """The document in a body. Raises ProblemError with everything that is wrong."""
    try:
        return _checked(model, parse_json(body))
    except InputError as error:
        raise problem_of_input(error) from None


def _checked(model: type[D], data: Any) -> D:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        count = error.error_count()
    if count > MOST_FAULTS:
        detail = f"the document has {count:,} faults, too many to tell. Maybe it is another kind of document."
        raise unprocessable("too_many_faults", detail)
    return model.from_data(data)  # the same faults in the words of the product
