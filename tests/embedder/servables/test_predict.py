"""Servables on any Ray dataset: one read and one decode, then what separate runs give, row by row."""

import re
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from servable_runs import png, run_servables, vectors

import embedder
from embedder.errors import ConfigError, EmbedderError, RunFailedError
from embedder.executors.ray_session import ray_session
from embedder.media.sandbox import SandboxedDecoder
from embedder.media.sniff import HEAD_BYTES
from embedder.servables import make_servable
from embedder.servables.packing import pack_servables, reserved_cpus
from embedder.servables.predict import encoded_image
from embedder.servables.servable_errors import ServableError
from embedder.sources.fetch import Fetcher, FetchError

SOURCE = '''
import os

import numpy as np
import pyarrow as pa


class Colour:
    """Number of the strongest channel, and mean of each, of an image."""

    def load(self, device):
        pass

    def __call__(self, batch):
        means = batch.column("image").to_numpy_ndarray().mean((1, 2)).astype(np.float32)
        return {"means": means, "strongest": means.argmax(1)}


class Caption:
    """A caption made of the strongest channel."""

    def load(self, device):
        pass

    def __call__(self, batch):
        names = ("a red car", "fruit on a table", "rain")
        return pa.table({"text": [names[each] for each in batch.column("number").to_pylist()]})


class Deadly:
    """Kills its process on one text."""

    def load(self, device):
        pass

    def __call__(self, batch):
        if "poison" in batch.column("text").to_pylist():
            os.kill(os.getpid(), 9)
        return {"length": [len(each) for each in batch.column("text").to_pylist()]}
'''
PIXELS = {"image": {"make": "pixels", "preprocess": {"image_size": 32, "resize": "crop", "interpolation": "bicubic"}}}


@pytest.fixture(scope="module")
def sections(tmp_path_factory, tiny_model):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(SOURCE)

    def own(name, class_name, inputs, outputs):
        return {"name": name, "kind": "python", "uri": f"{path}:{class_name}", "inputs": inputs, "outputs": outputs}

    number = {"number": {"make": "column", "of": "colour.strongest", "type": "int64"}}
    return {
        "tower": {"name": "tower", "uri": str(tiny_model)},
        "colour": own("colour", "Colour", PIXELS, {"means": {"shape": [3]}, "strongest": {"type": "int64"}}),
        "caption": own("caption", "Caption", number, {"text": {"type": "string"}}),
        "words": {"name": "words", "uri": str(tiny_model), "sides": ["text"], "text_of": "caption.text"},
        "deadly": own("deadly", "Deadly", {"text": {"make": "text"}}, {"length": {"type": "int64"}}),
    }


def several(sections, *names, **keys):
    return [sections[name] | keys for name in names]


@pytest.mark.slow
def test_models_of_one_run_give_what_separate_runs_give(ray_cluster, sections):
    """Two towers, a classifier and a caption made of what it found, with rows that lack a side or are broken."""
    images = [png(seed, (40 + seed, 30)) for seed in range(150)]
    images[7], images[99] = None, b"\x89PNG\r\n\x1a\nbroken"
    captions = [f"a red car {number}" if number % 3 else None for number in range(150)]
    table = pa.table({"image": images, "caption": captions, "price": list(range(150))})
    dataset = ray_cluster.data.from_arrow(table).repartition(3)
    predictor = embedder.BatchPredictor.from_servables(several(sections, "words", "caption", "colour", "tower"))
    found = pa.concat_tables(ray_cluster.get(predictor.predict(dataset).to_arrow_refs())).sort_by("price")
    assert found.select(table.column_names).equals(table)
    apart = run_servables(table, *several(sections, "colour", "caption")), run_servables(table, sections["tower"])
    for name in ("tower.image_embedding", "tower.text_embedding"):
        there = [row for row in range(150) if found[name][row].as_py() is not None]
        assert len(there) == (148 if "image" in name else 100)
        ours, theirs = (np.array(each[name].take(there).to_pylist()) for each in (found, apart[1]))
        assert np.abs(ours - theirs).max() < 1e-6
    for name in ("colour.means", "colour.strongest", "caption.text"):
        assert found[name].to_pylist() == apart[0][name].to_pylist()
    has_image = [row for row in range(150) if row not in (7, 99)]
    texts = found["caption.text"].take(has_image).to_pylist()
    assert len(set(texts)) == 3
    expected = run_servables(pa.table({"caption": texts}), several(sections, "tower", sides=["text"])[0])
    embedded = vectors(found.take(has_image), "words.text_embedding")
    assert np.abs(embedded - vectors(expected, "tower.text_embedding")).max() < 1e-6
    assert [row for row in range(150) if found["decode_error"][row].as_py()] == [99]
    for name in ("tower", "colour", "caption", "words"):
        assert found[f"{name}.error"].null_count == 150
    assert not any(name.startswith(("input:", "carried:")) for name in found.column_names)


def failure_of(sections):
    """What a prediction of two rows fails with; as in a run, Ray's actors end with it."""
    import ray

    with ray_session(None, no_progress_timeout_s=60):
        dataset = ray.data.from_items([{"caption": "a"}, {"caption": "poison"}])
        with pytest.raises((EmbedderError, RunFailedError)) as failed:
            embedder.BatchPredictor.from_servables(sections).predict(dataset).take_all()
    return str(failed.value)


@pytest.mark.medium
def test_a_servable_that_can_not_start_ends_the_run_in_its_own_words(ray_cluster, sections, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_framework\n\n\nclass S:\n    pass\n")
    message = failure_of([sections["deadly"] | {"uri": f"{path}:S"}])
    assert "it imports 'no_such_framework', which is not installed here" in message


@pytest.mark.slow
def test_rows_that_kill_their_process_end_the_run_in_the_servables_name(ray_cluster, sections):
    message = failure_of([sections["deadly"]])
    assert re.search("servables deadly: a block of (1 row|2 rows) killed its process each time", message), message


def test_each_image_is_decoded_once_for_each_size(sections, monkeypatch):
    decoded = []
    real = SandboxedDecoder.image
    monkeypatch.setattr(SandboxedDecoder, "image", lambda *args: decoded.append(args[2].image_size) or real(*args))
    table = pa.table({"image": [png(seed) for seed in range(5)]})
    rule = {"image_size": 32, "interpolation": "bicubic", "resize": "crop"}
    same = sections["colour"] | {"inputs": {"image": {"make": "pixels", "preprocess": rule}}, "name": "same"}
    run_servables(table, sections["tower"], sections["colour"], same)
    assert decoded == [32] * 5
    decoded.clear()
    other = {"image": {"make": "pixels", "preprocess": {"image_size": 16}}}
    run_servables(table, sections["tower"], sections["colour"] | {"inputs": other})
    assert sorted(decoded) == [16] * 5 + [32] * 5


@pytest.mark.parametrize(
    ("head", "found"),
    [(b"\x89PNG\r\n\x1a\n", "TooLarge"), (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", HEAD_BYTES)],
    ids=["image", "video"],
)
def test_a_file_of_any_size_takes_no_more_memory_than_an_image_may_have(tmp_path, head, found):
    path, most = tmp_path / "large", 1 << 20
    with path.open("wb") as file:
        file.write(head)
        file.truncate(32 * most)  # sparse
    with Fetcher() as fetcher:
        tracemalloc.start()
        try:
            answer = len(encoded_image(fetcher, str(path), most))
        except FetchError as error:
            answer = error.error_type
            assert f"image of {32 * most:,} bytes; decode.max_file_bytes allows {most:,}" in error.message
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert (answer, peak_bytes < most) == (found, True)


def test_datasets_that_fit_no_servable_are_refused(sections):
    with pytest.raises(ConfigError, match=r"the dataset has columns \['photo'\], and the servables take 'image'"):
        run_servables(pa.table({"photo": [b"x"]}), sections["colour"])
    with pytest.raises(ServableError, match=r"has a column 'colour.means' already"):
        run_servables(pa.table({"image": [b"x"], "colour.means": [1]}), sections["colour"])
    with pytest.raises(ConfigError, match="has a column 'decode_error' already"):
        run_servables(pa.table({"image": [b"x"], "decode_error": [1]}), sections["colour"])
    with pytest.raises(ServableError, match="there is no servable 'colour'"):
        embedder.BatchPredictor.from_servables([sections["caption"]])
    with pytest.raises(ConfigError, match="no servables"):
        embedder.BatchPredictor.from_servables([])
    with pytest.raises(ConfigError, match="typo"):
        embedder.BatchPredictor.from_servables([sections["colour"]], typo=1)


def names(groups):
    return [[each.name for each in group.servables] for group in groups]


def sized(sections, *sizes, **keys):
    return [
        make_servable(sections["colour"] | {"name": f"s{n}", "memory_bytes": size} | keys)
        for n, size in enumerate(sizes)
    ]


def test_small_ones_share_an_actor_up_to_its_memory(sections):
    assert names(pack_servables(sized(sections, 10, 20, 30, 40), 60)) == [["s0", "s1", "s2"], ["s3"]]
    assert names(pack_servables(sized(sections, 100, 20), 60)) == [["s0"], ["s1"]]
    mixed = [
        *sized(sections, 10),
        *sized(sections, 10, num_gpus=1, name="g"),
        *sized(sections, 10, replicas=2, name="r"),
    ]
    assert names(pack_servables(mixed, 60)) == [["s0"], ["g"], ["r"]]
    (group,) = pack_servables([*sized(sections, 10, num_cpus=2), *sized(sections, 10, num_cpus=3.5, name="b")], 60)
    assert (group.memory_bytes, group.num_cpus, group.num_threads) == (20, 3.5, 3)


@pytest.mark.parametrize("cpus", [1, 2, 3.5, 16, 200])
@pytest.mark.parametrize("counts", [(1,), (1, 2, 1), (4, 4, 4, 4)])
def test_all_actors_and_a_decode_task_have_room_at_once(sections, cpus, counts):
    groups = [
        group
        for number, count in enumerate(counts)
        for group in pack_servables(sized(sections, 10, replicas=count, num_cpus=2, name=f"n{number}"), 10)
    ]
    decode, reserved = reserved_cpus(groups, cpus)
    assert decode > 0
    assert all(0 < each <= 2 for each in reserved)
    assert all(each < 1 or each == int(each) for each in reserved), "Ray counts whole CPUs above one"
    assert decode + sum(each * count for each, count in zip(reserved, counts, strict=True)) <= cpus
