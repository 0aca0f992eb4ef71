"""Order of servables by what they need, and the mistakes that make none."""

import pytest

from embedder.servables import make_servable
from embedder.servables.order import order_servables
from embedder.servables.servable_errors import ServableError


def python(name, of=None, output=None, **declared):
    inputs = {"x": {"make": "text", "of": of} if of else {"make": "text"}} | declared.pop("inputs", {})
    outputs = {"out": output or {"type": "string"}}
    return make_servable(
        {"name": name, "kind": "python", "uri": "s.py:S", "inputs": inputs, "outputs": outputs} | declared
    )


def names(servables):
    return [each.name for each in servables]


def test_each_comes_after_what_it_needs():
    assert names(order_servables([python("c", "b.out"), python("b", "a.out"), python("a")])) == ["a", "b", "c"]
    assert names(order_servables([python("x"), python("b", "a.out"), python("a")])) == ["x", "a", "b"]


@pytest.mark.parametrize(
    ("servables", "message"),
    [
        ([python("a"), python("a")], r"there is servable a \(python, s.py:S\) already"),
        ([python("a", "b.out"), python("b", "a.out")], r"in a ring \((a -> b -> a|b -> a -> b)\)"),
        ([python("a", "a.out")], r"in a ring \(a -> a\)"),
        ([python("a", "b.out")], "there is no servable 'b'; there are a"),
        ([python("a"), python("b", "a.other")], "that servable has no such output; it has out"),
        (
            [python("a", output={"shape": [4]}), python("b", "a.out")],
            r"it is float32 of shape \[4\], and the input takes string",
        ),
        ([python("a", "missing")], "the dataset has no such column; it has image, caption, taken.out"),
        ([python("taken")], "the dataset has a column 'taken.out' already"),
        ([python("told")], "the dataset has a column 'told.error' already"),
        ([python("a", outputs={"error": {"type": "string"}})], "output 'error'"),
        (
            [
                python("a", output={"shape": ["any", 4]}),
                python("b", inputs={"y": {"make": "column", "of": "a.out", "shape": [2, 4]}}),
            ],
            r"its shape is \[any, 4\], and the input takes \[2, 4\]",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(servables, message):
    with pytest.raises(ServableError, match=message) as refused:
        order_servables(servables, ["image", "caption", "taken.out", "told.error"])
    assert "\n" not in str(refused.value)


def test_a_declared_shape_takes_what_is_no_wider():
    given = python("a", output={"shape": [2, 4]})
    taken = python("b", inputs={"y": {"make": "column", "of": "a.out", "shape": ["any", 4]}})
    assert names(order_servables([taken, given])) == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "keras"}, "kind = 'keras': found no such kind; write one of towers, hf"),
        ({"name": "a.b"}, "name = 'a.b'"),
        ({"inputs": {}}, "inputs"),
        ({"inputs": {"x": {"make": "magic"}}}, "magic"),
        ({"inputs": {"a b": {"make": "text"}}}, "a b"),
        ({"outputs": {"out": {"type": "float16"}}}, "float16"),
        ({"outputs": {"out": {"shape": [0]}}}, "shape"),
        ({"outputs": {"out": {"of": ["y"]}}}, "is `of` 'y', which is no input"),
        ({"uri": "s.py"}, "expected FILE.py:Class or package.module:Class"),
        ({"model": "s.py"}, "model"),
        (
            {"inputs": {"x": {"make": "pixels", "preprocess": {"resize": "patches"}}}},
            "which only the kind towers takes",
        ),
        ({"inputs": {"x": {"make": "column", "of": "../a"}}}, "of"),
    ],
)
def test_a_wrong_section_is_refused_with_its_key(settings, message):
    whole = {
        "name": "a",
        "kind": "python",
        "uri": "s.py:S",
        "inputs": {"x": {"make": "text"}},
        "outputs": {"out": {"type": "string"}},
    }
    with pytest.raises(ServableError, match=message) as refused:
        make_servable(whole | settings)
    assert "\n" not in str(refused.value)
