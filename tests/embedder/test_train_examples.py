"""The decode step of training gives each item one row: pixels, all its captions, or what is wrong with it."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import train_samples
from train_samples import training

from embedder.config import RunConfig
from embedder.run.job import decode_spec, open_model
from embedder.training.examples import ExampleSpec, decode_examples, examples_of
from embedder.training.items import list_items


def listed(tiny_model, tmp_path, rows, **columns):
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    config = training(source, tmp_path / "out", model=str(tiny_model), **columns)
    model = open_model(str(tiny_model))
    spec = ExampleSpec(decode_spec(RunConfig(), model), config.texts, config.tag_sets)
    return model, list_items(config).listing, spec


def examples(*arguments, **columns):
    model, listing, spec = listed(*arguments, **columns)
    return model, [each for table in decode_examples(listing, spec=spec) for each in examples_of(table, 32)]


def test_several_workers_share_one_stream_and_one_worker_gets_it_in_order(tiny_model, tmp_path, ray_cluster):
    from embedder.training.stream import decode_on_ray, example_stream, shares

    _, listing, spec = listed(tiny_model, tmp_path, train_samples.rows_of(range(40)))
    ids = listing["item_id"].to_pylist()
    tables = list(decode_on_ray(listing, spec, 3, 0.5))
    assert [item_id for table in tables for item_id in table["item_id"].to_pylist()] == ids

    def read(share):
        blocks = share.iter_batches(batch_size=None, batch_format="pyarrow")
        return [item_id for block in blocks for item_id in block["item_id"].to_pylist()]

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(read, shares(example_stream(listing, spec, 3, 0.5), 2)))
    assert sorted([*parts[0], *parts[1]]) == ids
    assert all(parts)
    assert not ray_cluster.data.DataContext.get_current().execution_options.preserve_order


def test_titles_lists_and_tag_sets_become_captions_each_once(tiny_model, tmp_path):
    from embedder.steps.captions import CaptionEncoder

    rows = train_samples.rows_of(range(2))
    rows[1]["title"] = rows[1]["tags"] = None
    columns = {"texts": ("also", "colour"), "tag_sets": ("tags",)}
    model, found = examples(tiny_model, tmp_path, rows, **columns)
    encoder = CaptionEncoder(model.tokenizer_json, model.config.preprocess.max_caption_tokens)
    texts = [["a red square", "red box", "red", "red, shape"], ["green box", "green"]]
    for example, expected in zip(found, texts, strict=True):
        assert [caption.tolist() for caption in example.captions] == [
            encoder.encode(text).tolist() for text in expected
        ]
        assert example.is_pair


def test_pixels_are_those_that_embedding_sees(tiny_model, tmp_path):
    from embedder.media.door import DecodeDoor
    from embedder.run.job import picture_fit

    model, found = examples(tiny_model, tmp_path, train_samples.rows_of(range(3)))
    with DecodeDoor() as door:
        for number, example in enumerate(found):
            expected = door.picture(train_samples.square(number), picture_fit(model))
            assert np.array_equal(example.pixels, np.asarray(expected).reshape(32, 32, 3))


def test_a_broken_picture_is_a_problem_and_a_missing_side_is_no_pair(tiny_model, tmp_path):
    rows = train_samples.rows_of(range(4))
    rows[0]["photo"] = b"no picture"
    rows[1]["photo"] = None
    rows[2]["title"] = None
    _, found = examples(tiny_model, tmp_path, rows)
    assert [example.item_id for example in found] == [row["sku"] for row in rows]
    assert [example.is_pair for example in found] == [False, False, False, True]
    assert [example.problem is None for example in found] == [False, True, True, True]
    assert found[0].problem[0] == "decode"
