"""The decode step of training gives each item one row: pixels, all its captions, or what is wrong with it."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import train_samples
from train_samples import training

from embedder.config import RunConfig
from embedder.executors.job import decode_spec
from embedder.models.model_folder import open_model
from embedder.plugins.train.batches import ExampleCounts, SamplerConfig
from embedder.plugins.train.examples import ExampleSpec, as_texts, decode_examples, examples_of
from embedder.plugins.train.items import list_items
from embedder.plugins.train.rank_batches import cut_shares, decode_share, take_share
from embedder.plugins.train.sampler import epoch_order


def listed(tiny_model, tmp_path, rows, **columns):
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    config = training(source, tmp_path / "out", model=str(tiny_model), **columns)
    model = open_model(str(tiny_model))
    spec = ExampleSpec(decode_spec(RunConfig().rows, model), config.texts, config.tag_sets)
    return model, list_items(config), spec


def examples(*arguments, **columns):
    model, items, spec = listed(*arguments, **columns)
    return model, [each for table in decode_examples(items.listing, spec=spec) for each in examples_of(table, 32)]


@pytest.mark.slow
def test_one_worker_gets_the_stream_in_order(tiny_model, tmp_path, ray_cluster):
    from embedder.plugins.train.decode_stream import decode_on_ray

    _, items, spec = listed(tiny_model, tmp_path, train_samples.rows_of(range(40)))
    tables = list(decode_on_ray(items.listing, spec, 3, 0.5))
    found = [item_id for table in tables for item_id in table["item_id"].to_pylist()]
    assert found == items.listing["item_id"].to_pylist()
    assert not ray_cluster.data.DataContext.get_current().execution_options.preserve_order


@pytest.mark.slow
def test_several_workers_get_equal_shares_that_together_are_the_batches_of_one(tiny_model, tmp_path, ray_cluster):
    from embedder.plugins.train.decode_stream import share_stream

    _, items, spec = listed(tiny_model, tmp_path, train_samples.rows_of(range(40)))
    first = 2  # batch, where a run continues; the epoch behind begins with its first
    sampler = SamplerConfig(batch_size=8, captions_per_image=1, seed=3)
    stream = share_stream(cut_shares(items, sampler, 2, epoch=1, first=first, num_epochs=2), spec, 0.5)

    def read(rank, share):
        found, counts = [], ExampleCounts(40)
        for number, block in enumerate(share.iter_batches(batch_size=None, batch_format="pyarrow")):
            epoch, batch = divmod(number + first + 5, 5)
            found.append(take_share(block, (epoch, batch, rank), 32, counts))
        return found, counts.num_seen

    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(read, range(2), stream.streaming_split(2)))
    for epoch in (1, 2):
        expected = items.take(epoch_order(items.keys, sampler.seed, epoch))
        start = first if epoch == 1 else 0
        for batch in range(start, 5):
            of_both = [pair for found, _ in shares for pair in found[(epoch - 1) * 5 + batch - first]]
            rows = expected.take(np.arange(batch * 8, batch * 8 + 8))
            assert [pair.example.item_id for pair in of_both] == rows.listing["item_id"].to_pylist()
            assert [pair.key for pair in of_both] == rows.keys.tolist()
            assert [pair.concept for pair in of_both] == rows.concepts.tolist()
    assert [num_seen for _, num_seen in shares] == [4 * (10 - first)] * 2


def test_a_share_of_another_place_in_the_stream_is_refused(tiny_model, tmp_path):
    _, items, spec = listed(tiny_model, tmp_path, train_samples.rows_of(range(8)))
    blocks = list(cut_shares(items, SamplerConfig(8, 1, 3), 2, epoch=0, first=0, num_epochs=1))
    with pytest.raises(RuntimeError, match=r"share \(0, 0, 1\) where \(0, 0, 0\) were due"):
        take_share(decode_share(blocks[1], spec=spec), (0, 0, 0), 32, ExampleCounts(8))


def test_titles_lists_and_tag_sets_become_captions_each_once(tiny_model, tmp_path):
    from embedder.steps.caption_encoder import CaptionEncoder

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


def test_values_that_are_missing_or_not_a_number_are_no_captions():
    assert as_texts(["a dog", 1.5, float("nan"), None, " "]) == ["a dog", "1.5"]
    assert as_texts(float("nan")) == as_texts(None) == []


def test_pixels_are_those_that_embedding_sees(tiny_model, tmp_path):
    from embedder.media.sandbox import SandboxedDecoder
    from embedder.models.model_folder import resize_spec

    model, found = examples(tiny_model, tmp_path, train_samples.rows_of(range(3)))
    with SandboxedDecoder() as door:
        for number, example in enumerate(found):
            expected = door.image(train_samples.square(number), resize_spec(model))
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
