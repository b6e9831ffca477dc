"""The pictures of the concepts are what the code draws today, and each is shown."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib import image

from examples.pictures.__main__ import PICTURES, picture
from tests.docs.blocks import ROOT, pages
from tests.sample import some

FOLDER = ROOT / "docs" / "pictures" / "concepts"
SAME = 0.01
"""The mean difference of colours, from 0 to 1, that fonts of another version may make."""


def test_no_picture_is_left_over_or_shown_nowhere() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PICTURES)
    text = "".join(page.read_text() for page in pages())
    assert all(f"concepts/{name}.png" in text for name in PICTURES)


@pytest.mark.parametrize("name", some(some(list(PICTURES))))
def test_it_is_what_the_code_draws(name: str) -> None:
    drawn, kept = image.imread(io.BytesIO(picture(name))), image.imread(FOLDER / f"{name}.png")
    assert drawn.shape == kept.shape
    assert np.abs(drawn - kept).mean() < SAME, "Maybe 'make pictures' draws them anew."
