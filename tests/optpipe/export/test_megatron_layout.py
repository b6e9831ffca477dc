"""Layout strings of Megatron-LM are read as it reads them and written as it takes them; others are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe.errors import InputError
from optpipe.export.megatron_layout import layout_text, parse_layout, partition_of_layout
from optpipe.layers import LayerProfile


@pytest.mark.parametrize(
    ("text", "stages", "t", "m"),
    [
        ("Et|(tt|)*30L", 32, 61, 0),  # Kimi K2
        ("Et*4|(tttt|)*14tmL", 16, 61, 1),  # DeepSeek V4
        ("E(|tt)*30,|mL", 32, 60, 1),  # GLM, with a stage of the embedding alone
        ("Ettt|(tt|)*29,m|L", 32, 61, 1),  # Megatron-LM's own example
        ("E|t*2||tL", 4, 3, 0),
    ],
)
def test_published_layouts(text: str, stages: int, t: int, m: int) -> None:
    found = parse_layout(text, "--layout")
    letters = "".join(found)
    assert (len(found), letters.count("t"), letters.count("m")) == (stages, t, m)
    assert (letters[0], letters[-1]) == ("E", "L")


@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.booleans(), st.booleans())
def test_what_is_written_is_read(sizes: list[int], has_embedding: bool, has_head: bool) -> None:
    text = layout_text(sizes, has_embedding=has_embedding, has_head=has_head)
    found = parse_layout(text, "--layout") if sum(sizes) > has_embedding + has_head else []
    for s, stage in enumerate(found):
        own = (s > 0 or has_embedding) and "E" in stage, (s + 1 < len(sizes) or has_head) and "L" in stage
        assert stage.count("t") + sum(own) == sizes[s]


@pytest.mark.parametrize("text", ["Ettt|(tt|)*29m|L", "Et*4|(t*4|)*14tmL", "E|(t|)*2tmm|L"])
def test_layers_of_multi_token_prediction_are_layers_of_the_cut(text: str) -> None:
    stages = parse_layout(text, "--layout")
    assert layout_text([len(stage) for stage in stages], predicted="".join(stages).count("m")) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EtX|L", "in which 'X' has no meaning"),
        ("Et|t", "is one E, layers t, perhaps m, and one L. Maybe"),
        ("t|L", "is one E, layers t, perhaps m, and one L. Maybe"),
        ("EtLt", "is one E, layers t, perhaps m, and one L. Maybe"),
        ("", "is one E, layers t, perhaps m, and one L. Maybe"),
        ("E(t*999|)*999L", "at most 4000 letters and bars are read. Maybe a number has a digit too many."),
        ("E(t*99|)*99L", "at most 4000 letters and bars are read. Maybe a number has a digit too many."),
        ("E(t|)*10000L", "at most 4000 letters"),
        ("(t|)*999999999999999999L", "at most 4000 letters"),
        ("Et*00000000001001|" * 4, "at most 4000 letters"),
        ("E" + "t" * 10**6 + "L", "is 'Ettt"),
        ("E((t|)*2)*2L", "'( ) * 2' has no meaning"),
    ],
)
def test_strings_that_are_no_layout(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_layout(text, "--layout")
    assert message in str(caught.value)
    assert str(caught.value).startswith("--layout is ")
    assert len(str(caught.value)) < 300


def profile(*layers: tuple[str, int]) -> LayerProfile:
    costs = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
    costs |= {"activation_bytes": 1, "backward_weight_bytes": 1}
    rows = [{"name": name, "repeat": count, **costs} for name, count in layers]
    return LayerProfile.from_data({"format": "optpipe.layers/1", "layers": rows})


def test_a_layout_cuts_the_layers_of_a_profile() -> None:
    whole = profile(("embedding", 1), ("layer", 5), ("head", 1))
    layout = partition_of_layout("Et|t|tt|tL", whole, 2, "--layout")
    assert (layout.sizes, layout.placement) == ((2, 1, 2, 2), (0, 1, 0, 1))
    assert partition_of_layout("Et|t|tt|tL", profile(("layer", 5)), 4, "--layout").sizes == (1, 1, 2, 1)


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ([("embedding", 1), ("layer", 5), ("head", 1)], (2, 1, 2, 2)),
        ([("embedding", 1), ("layer", 5), ("mtp", 1), ("head", 1)], (2, 1, 2, 3)),
        ([("embedding", 1), ("layer", 5)], (2, 1, 2, 1)),
        ([("layer", 5), ("head", 1)], (1, 1, 2, 2)),
        ([("block", 7)], (2, 1, 2, 2)),
    ],
)
def test_multi_token_prediction_may_have_no_layer_in_the_profile(
    layers: list[tuple[str, int]], sizes: tuple[int, ...]
) -> None:
    assert partition_of_layout("Et|t|tt|tmL", profile(*layers), 2, "--layout").sizes == sizes


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("Et|tt|ttL", 2, "has 3 stages, which 2 devices do not divide. Maybe --devices 1."),
        ("Et|ttL", 2, "has 5 layers (1 E, 3 t, 0 m, 1 L), but the profile has 7. Maybe it is of another model."),
        ("Et||ttttL", 3, "gives stage 1 no layers, but each stage needs a layer"),
    ],
)
def test_layouts_that_do_not_fit(text: str, devices: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        partition_of_layout(text, profile(("embedding", 1), ("layer", 5), ("head", 1)), devices, "--layout")
    assert message in str(caught.value)
