"""Running servables of the user's own: rows, missing inputs, rows that raise, chains, many kinds of wrong answers."""

import numpy as np
import pyarrow as pa
import pytest
from servable_runs import own_maker, png, run_servables

from embedder.servables import make_servable
from embedder.servables.running_servable import RunningServable
from embedder.servables.servable_errors import ServableError, one_line

SOURCE = '''
import numpy as np
import pyarrow as pa


class Brightness:
    """Mean of each image's pixels."""

    def load(self, device):
        self.device = device

    def __call__(self, batch):
        pixels = batch.column("image").to_numpy_ndarray()
        assert self.device == "cpu" and pixels.dtype == np.uint8 and pixels.shape[1:] == (8, 8, 3)
        return {"mean": pixels.reshape(len(pixels), -1).mean(1).astype(np.float32)}


class Lengths:
    def __init__(self, poison=()):
        self.poison, self.calls = set(poison), 0

    def load(self, device):
        pass

    def __call__(self, batch):
        texts = batch.column("text").to_pylist()
        assert None not in texts
        if self.poison & set(texts):
            raise ValueError("can't read " + sorted(self.poison & set(texts))[0] + "\\nsecond line")
        return pa.table({"length": pa.array([len(text) for text in texts], pa.int64())})


class Upper:
    def load(self, device):
        pass

    def __call__(self, batch):
        return pa.record_batch({"text": pa.array([text.upper() for text in batch.column("text").to_pylist()])})


class Sizes:
    def load(self, device):
        pass

    def __call__(self, batch):
        column = batch.column("image")
        flat, heights, widths = column.field("pixels"), column.field("height"), column.field("width")
        for row in range(len(column)):
            assert len(flat[row].as_py()) == heights[row].as_py() * widths[row].as_py() * 3
        return {"size": np.stack([widths.to_numpy(), heights.to_numpy()], 1)}


class Cropper:
    """A PNG of each image's left half, as bytes."""

    def load(self, device):
        pass

    def __call__(self, batch):
        import io
        from PIL import Image

        found = []
        for each in batch.column("file").to_pylist():
            image = Image.open(io.BytesIO(each)).convert("RGB")
            buffer = io.BytesIO()
            image.crop((0, 0, image.width // 2, image.height)).save(buffer, "PNG")
            found.append(buffer.getvalue())
        return {"crop": pa.array(found, pa.large_binary())}


class Exits:
    def load(self, device):
        pass

    def __call__(self, batch):
        raise SystemExit("usage: exits")


class Finds:
    def load(self, device):
        pass

    def __call__(self, batch):
        import os

        raise FileNotFoundError(os.fsdecode(b"caf\\xe9.txt"))


class Wrong:
    def __init__(self, how):
        self.how = how

    def load(self, device):
        pass

    def __call__(self, batch):
        rows = batch.num_rows
        return {
            "rows": {"length": pa.array([1] * (rows + 1), pa.int64())},
            "type": {"length": pa.array(["a"] * rows)},
            "none": None,
            "nothing": {},
            "nulls": {"length": pa.nulls(rows, pa.int64())},
            "other": {"size": pa.array([1] * rows, pa.int64())},
        }[self.how]
'''
LENGTH = {"length": {"type": "int64"}}
TEXT = {"text": {"make": "text"}}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def own(file):
    """Makes a servable of the user's file: by default one that counts the letters of captions."""
    return own_maker(file, "Lengths", TEXT, LENGTH)


def test_outputs_stand_beside_the_datasets_columns_row_by_row(own):
    table = pa.table({"caption": ["a", "bb", "", None, "ccc"], "price": [1, 2, 3, 4, 5]})
    found = run_servables(table, own(batch_size=2))
    assert found["own.length"].to_pylist() == [1, 2, None, None, 3]
    assert found["own.error"].to_pylist() == [None] * 5
    assert found.select(["caption", "price"]).equals(table)


def test_images_arrive_resized_and_broken_ones_are_told(own):
    images = [png(0), None, b"\x89PNG\r\n\x1a\nbroken", png(3), b"text"]
    servable = own("Brightness", "light", {"image": {"make": "pixels", "preprocess": {"image_size": 8}}}, {"mean": {}})
    found = run_servables(pa.table({"image": images}), servable)
    means = found["light.mean"].to_pylist()
    assert [mean is None for mean in means] == [False, True, True, False, True]
    assert means[0] != means[3]
    errors = found["decode_error"].to_pylist()
    assert [error is None for error in errors] == [True, True, False, True, False]


def test_cells_of_another_type_are_told_row_by_row(own):
    light = own("Brightness", "light", {"image": {"make": "pixels", "preprocess": {"image_size": 8}}}, {"mean": {}})
    table = pa.table({"image": pa.array([1, 2]), "caption": pa.array([3, None])})
    found = run_servables(table, light, own())
    assert found["light.mean"].to_pylist() == [None, None]
    assert found["own.length"].to_pylist() == [None, None]
    assert "found int; give a path, the bytes of a file" in found["decode_error"][0].as_py()
    table = pa.table({"caption": pa.array([3, None])})
    assert run_servables(table, own())["decode_error"].to_pylist() == ["found int, expected a text", None]


def test_whole_images_keep_their_proportions(own):
    images = [png(0, (40, 30)), png(1, (100, 20)), png(2, (7, 9))]
    servable = own(
        "Sizes",
        inputs={"image": {"make": "image", "max_side_px": 50}},
        outputs={"size": {"type": "int32", "shape": [2]}},
    )
    found = run_servables(pa.table({"image": images}), servable)
    assert found["own.size"].to_pylist() == [[40, 30], [50, 10], [7, 9]]


def test_rows_that_raise_are_alone_in_having_no_output(own):
    captions = [f"caption {number}" for number in range(40)]
    poison = [captions[3], captions[17], captions[18]]
    found = run_servables(pa.table({"caption": captions}), own(settings={"poison": poison}, batch_size=16))
    lengths, errors = found["own.length"].to_pylist(), found["own.error"].to_pylist()
    for number, caption in enumerate(captions):
        if caption in poison:
            assert lengths[number] is None
            assert errors[number].endswith(f"ValueError: can't read {caption} second line")
        else:
            assert (lengths[number], errors[number]) == (len(caption), None)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("rows", "it returned 4 rows for 3"),
        ("type", "length: it returned string, and declares int64"),
        ("none", "it returned NoneType; return a pyarrow.Table"),
        ("nothing", "it returned no column, and declares 'length'"),
        ("nulls", "length: found nothing"),
        ("other", "it returned size, and declares 'length'"),
    ],
)
def test_a_wrong_answer_costs_its_own_columns_alone(own, how, message):
    captions = ["a", "bb", "ccc"]
    wrong = own("Wrong", "wrong", settings={"how": how})
    found = run_servables(pa.table({"caption": captions}), wrong, own(name="right"))
    assert found["right.length"].to_pylist() == [1, 2, 3]
    assert found["wrong.length"].to_pylist() == [None] * 3
    for error in found["wrong.error"].to_pylist():
        assert message in error
        assert "\n" not in error


def test_code_that_ends_the_process_fails_its_rows_and_not_the_run(own):
    found = run_servables(pa.table({"caption": ["a", "bb"]}), own("Exits", "exits"), own(name="right"))
    assert found["right.length"].to_pylist() == [1, 2]
    assert [error.partition(": ")[2] for error in found["exits.error"].to_pylist()] == ["SystemExit: usage: exits"] * 2


def test_an_error_that_quotes_a_name_which_is_no_utf8_fails_its_rows_and_not_the_run(own):
    found = run_servables(pa.table({"caption": ["a", "bb"]}), own("Finds", "finds"), own(name="right"))
    assert found["right.length"].to_pylist() == [1, 2]
    errors = [error.partition(": ")[2] for error in found["finds.error"].to_pylist()]
    assert errors == ["FileNotFoundError: caf\\xe9.txt"] * 2


def test_what_one_returns_feeds_another_in_the_same_run(own):
    upper = own("Upper", "upper", outputs={"text": {"type": "string"}})
    lengths = own(name="lengths", inputs={"text": {"make": "text", "of": "upper.text"}}, settings={"poison": ["BB"]})
    found = run_servables(pa.table({"caption": ["a", "bb", None]}), lengths, upper)
    assert found["upper.text"].to_pylist() == ["A", "BB", None]
    assert found["lengths.length"].to_pylist() == [1, None, None]
    assert "can't read BB" in found["lengths.error"].to_pylist()[1]


def test_a_row_that_failed_upstream_says_so_downstream(own):
    upper = own("Lengths", "first", settings={"poison": ["bb"]})
    column = {"text": {"make": "text"}, "number": {"make": "column", "of": "first.length", "type": "int64"}}
    found = run_servables(pa.table({"caption": ["a", "bb"]}), upper, own(name="second", inputs=column))
    assert found["second.length"].to_pylist() == [1, None]
    assert "no input, as first failed on this row" in found["second.error"].to_pylist()[1]


def test_crops_of_one_are_decoded_for_the_next(own):
    crops = own("Cropper", "crops", {"file": {"make": "bytes"}}, {"crop": {"type": "binary"}})
    sizes = own(
        "Sizes", "sizes", {"image": {"make": "image", "of": "crops.crop"}}, {"size": {"type": "int32", "shape": [2]}}
    )
    found = run_servables(pa.table({"image": [png(0, (40, 30)), png(1, (20, 10)), None]}), sizes, crops)
    assert found["sizes.size"].to_pylist() == [[20, 30], [10, 10], None]


def test_columns_of_the_dataset_are_taken_as_they_are(own):
    source = {"text": {"make": "text", "of": "title"}}
    found = run_servables(pa.table({"title": ["a", "bb", None]}), own(inputs=source))
    assert found["own.length"].to_pylist() == [1, 2, None]


@pytest.mark.parametrize("values", [[[1, 2]], [{"a": 1}], ["x"]])
def test_a_column_of_another_kind_than_declared_is_refused_in_a_line(own, values):
    column = {"text": {"make": "column", "of": "number", "type": "int64"}}
    with pytest.raises(ServableError, match=r"column 'number' of the dataset is .*, and the input takes int64"):
        run_servables(pa.table({"number": values}), own(inputs=column))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_framework\n", "it imports 'no_such_framework', which is not installed here"),
        ("class S:\n    pass\n", "class S of .* has no 'load'"),
        (
            "class S:\n    __call__ = print\n\n    def load(self, device):\n        raise OSError('disk is gone')\n",
            "OSError: disk is gone",
        ),
        ("def S(:\n", "SyntaxError"),
        ("class S:\n    load = __call__ = print\n\n    def __init__(self, size):\n        pass\n", "TypeError.*size"),
        ("raise SystemExit('usage: S')\n", "SystemExit: usage: S"),
        ("S = 3\n", "has no class or function 'S'; it has none"),
        ("class B:\n    pass\n\n\nclass A:\n    pass\n", "has no class or function 'S'; it has A, B"),
    ],
)
def test_a_file_that_can_not_be_loaded_is_refused_in_one_line(tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(source)
    servable = make_servable({"name": "s", "kind": "python", "uri": f"{path}:S", "inputs": TEXT, "outputs": LENGTH})
    with pytest.raises(ServableError, match=message) as refused:
        RunningServable(servable)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"servable s (python, {path}:S): ")


def test_of_a_long_error_both_ends_stay():
    """Libraries in C++ begin with a place in their source, and say the cause last."""
    error = ValueError("place\n" + "signature " * 1000 + "the cause")
    line = one_line(error)
    assert len(line) == 300
    assert line.startswith("ValueError: place signature")
    assert line.endswith("signature the cause")
    assert one_line(ValueError("a" * 288)) == "ValueError: " + "a" * 288


@pytest.mark.parametrize("num_gpus", [1.5, 0.00001, float("inf"), -1])
def test_gpus_that_can_not_be_reserved_are_refused_in_a_line(own, num_gpus):
    with pytest.raises(ServableError, match=f"num_gpus = {num_gpus}: ") as refused:
        own(num_gpus=num_gpus)
    assert "\n" not in str(refused.value)
    assert [own(num_gpus=each).num_gpus for each in (0, 0.25, 2)] == [0, 0.25, 2]


def test_a_missing_file_is_refused_before_anything_is_loaded(own, tmp_path):
    servable = own(uri=f"{tmp_path}/none.py:S")
    with pytest.raises(ServableError, match="there is no such file"):
        servable.fingerprint()


def test_an_own_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "numbers.py").write_text("FACTOR = 10\n")
    (tmp_path / "onnx.py").write_text(
        "from .numbers import FACTOR\nimport numbers\n\n\nclass S:\n    def load(self, device):\n"
        "        assert numbers.Number\n\n    def __call__(self, batch):\n"
        "        return {'length': [len(each) * FACTOR for each in batch.column('text').to_pylist()]}\n"
    )
    found = run_servables(
        pa.table({"caption": ["aa"]}),
        {"name": "s", "kind": "python", "uri": f"{tmp_path}/onnx.py:S", "inputs": TEXT, "outputs": LENGTH},
    )
    assert found["s.length"].to_pylist() == [20]


def test_the_fingerprint_follows_source_and_settings_and_nothing_else(own, file, tmp_path):
    first = own().fingerprint()
    assert len(first) == 16
    assert own(name="other", batch_size=3, num_cpus=2, replicas=2).fingerprint() == first
    assert own(settings={"poison": ["a"]}).fingerprint() != first
    assert own("Upper").fingerprint() != first
    copy = tmp_path / "copy.py"
    copy.write_text(SOURCE)
    assert own(uri=f"{copy}:Lengths").fingerprint() == first
    copy.write_text(SOURCE + "\n# changed\n")
    assert own(uri=f"{copy}:Lengths").fingerprint() != first
    extra = tmp_path / "weights.npy"
    extra.write_bytes(b"1")
    with_file = own(extra_files=[str(extra)]).fingerprint()
    extra.write_bytes(b"2 ")
    assert own(extra_files=[str(extra)]).fingerprint() not in (first, with_file)


def test_a_video_segments_middle_frame_is_taken():
    from embedder.servables.prepare import bind
    from embedder.servables.servable_columns import PixelsInput
    from embedder.store.tables.arrow_tensors import pack
    from shards.preprocess import PreprocessConfig

    frames = [
        np.full((count, 4, 4, 3), 1, np.uint8) * np.arange(count, dtype=np.uint8)[:, None, None, None]
        for count in (1, 3, 4)
    ]
    declared = PixelsInput(preprocess=PreprocessConfig(image_size=4))
    tensor = bind("x", declared, pack([*frames[:2], None, frames[2]]), None)["x"]
    assert tensor.null_count == 1
    assert tensor.storage.flatten().to_numpy().reshape(-1, 48)[:, 0].tolist() == [0, 1, 2]


def test_paths_become_absolute_and_other_names_stay(own, file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    (file.parent / "extra.bin").write_bytes(b"x")
    relative = own(uri="own.py:Lengths", extra_files=["extra.bin"])
    moved = relative.absolute()
    assert moved.uri == f"{file}:Lengths"
    monkeypatch.chdir(tmp_path)
    assert moved.files() == [file, file.parent / "extra.bin"]
    module = own(uri="json.decoder:JSONDecoder")
    assert module.absolute().uri == "json.decoder:JSONDecoder"
    hub = make_servable({"name": "h", "kind": "hf", "uri": "org/name", "task": "feature-extraction"})
    assert hub.absolute().uri == "org/name"
