"""A decoder with eyes from its checkpoint to its neighbours: imported, embedded through three stages, searched."""

import io

import numpy as np
import pytest
import samples
from embedding_runs import embedded
from picture_decoders import INSTRUCTION, make_library, save_checkpoint
from PIL import Image

import embedder
from embedder.errors import ConfigError
from embedder.ingest.embed import refresh
from embedder.plugins.verify.verify import verify
from shards import ModelError
from shards.convert import import_checkpoint

pytestmark = pytest.mark.medium

SIZES = [(40, 30), (64, 64), (120, 20), (9, 80), (200, 150), (33, 48), (1, 1), (90, 90)]
QUERIES = ["a red car on the road", "two cats", "日本語", "seven white horses in the sun"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("qwen") / "checkpoint")


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "model"
    import_checkpoint(checkpoint, out)
    return str(out)


def of_files(checkpoint):
    """transformers' own vectors of texts and of files of images."""
    embed = make_library(checkpoint)

    def of(item, caption=None, *, instruction=INSTRUCTION):
        if isinstance(item, str):
            return embed(text=item, instruction=instruction)[0].numpy()
        image = Image.open(io.BytesIO(item)).convert("RGB")
        return embed(text=caption, image=image, instruction=instruction)[0].numpy()

    return of


@pytest.fixture(scope="module")
def library(checkpoint):
    return of_files(checkpoint)


def fill(folder, num):
    """Write images of several sizes; every second has a caption."""
    folder.mkdir()
    for number in range(num):
        samples.make_image(number, *SIZES[number % len(SIZES)]).save(folder / f"{number:03d}.png")
        if number % 2 == 0:
            (folder / f"{number:03d}.txt").write_text(f"{samples.SENTENCES[number % 6]} {number}")
    return folder


def check_run(config, source, library, joins_captions=False):
    """Check a run's vectors and neighbours against the library's."""
    report, rows = embedded(config)
    assert report.num_rejected == 0
    files = {f"{path.stem}.png": path for path in source.glob("*.png")}
    assert len(rows) == len(files)
    images, ids = [], []
    for (item_id, _), row in rows.items():
        path = next(each for name, each in files.items() if item_id.endswith(name))
        expected = library(path.read_bytes(), row["caption"] if joins_captions else None)
        assert np.abs(np.array(row["image_embedding"]) - expected).max() < 1e-5
        if row["caption"] is not None:
            assert np.abs(np.array(row["text_embedding"]) - library(row["caption"])).max() < 1e-5
        images.append(expected)
        ids.append(item_id)
    store, matrix = embedder.open_store(config.store), np.stack(images)
    queries = [*QUERIES, *[files["003.png"].read_bytes(), files["005.png"].read_bytes()]]
    for query in queries:
        hits = store.search(query, k=5)
        scores = matrix @ library(query)
        expected = [ids[place] for place in np.argsort(-scores)[:5]]
        assert [hit.item_id for hit in hits] == expected
    return report


def test_a_run_in_one_process_finds_transformers_own_neighbours(make_run, model, library, tmp_path):
    source = fill(tmp_path / "in", 12)
    check_run(make_run(source, model=model, num_stages=3, rows_per_part=8), source, library)


def test_instructions_and_dimensions_are_those_of_the_configuration(make_run, model, library, tmp_path):
    """Items by theirs, queries by theirs or the search's, all cut; another instruction of queries embeds nothing."""
    source, dim = fill(tmp_path / "in", 6), 20
    of_items, of_queries, other = "Describe {the} picture.", "Find pictures & words.", "Retrieve what is alike: 50 %"
    tables = {"uri": model, "item_instruction": of_items, "dimensions": dim}

    def expected(item, instruction):
        vector = library(item, instruction=instruction)[:dim]
        return vector / np.linalg.norm(vector)

    with pytest.raises(ModelError, match="force_dimensions = true"):
        embedded(make_run(source, model=[tables]))
    tables["force_dimensions"] = True
    config = make_run(source, model=[tables], num_stages=3)
    report, rows = embedded(config)
    assert report.num_rejected == 0
    for (item_id, _), row in rows.items():
        image = (source / item_id.rpartition("/")[2].rpartition(":")[2]).read_bytes()
        assert np.abs(np.array(row["image_embedding"]) - expected(image, of_items)).max() < 1e-5
        if row["caption"] is not None:
            assert np.abs(np.array(row["text_embedding"]) - expected(row["caption"], of_items)).max() < 1e-5
    store = embedder.open_store(config.store)
    assert np.abs(store.encode_text(["two cats"])[0] - expected("two cats", INSTRUCTION)).max() < 1e-5
    again = make_run(source, model=[tables | {"query_instruction": of_queries}], num_stages=3, store=config.store)
    assert embedder.refresh(again).engine_reason == "nothing to embed"
    asked = embedder.open_store(config.store, model=again.main_model)
    matrix, ids = np.stack([rows[each]["image_embedding"] for each in rows]), [item_id for item_id, _ in rows]
    for opened, own in ((store, INSTRUCTION), (asked, of_queries)):
        for given in (None, other):
            hits = opened.search("two cats", k=6, instruction=given)
            scores = matrix @ expected("two cats", given or own)
            assert [hit.item_id for hit in hits] == [ids[place] for place in np.argsort(-scores)]
            assert np.abs([hit.score for hit in hits] - np.sort(scores)[::-1]).max() < 1e-5
    assert np.abs(asked.encode_image([image])[0] - expected(image, of_items)).max() < 1e-5
    with pytest.raises(ConfigError, match="it fills the 4,096 tokens"):
        store.search("two cats", instruction="long " * 4000)


@pytest.fixture(scope="module")
def joined(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("joined") / "model"
    import_checkpoint(checkpoint, out, join_captions=True)
    return str(out)


def test_a_picture_is_embedded_with_its_caption_as_one_item(make_run, model, joined, library, tmp_path):
    source = fill(tmp_path / "in", 12)
    run = make_run(source, model=joined, num_stages=3, rows_per_part=8)
    check_run(run, source, library, joins_captions=True)
    stages = {each.side: each.passed for each in verify(run).comparisons}
    assert stages == {"image": True, "text": True}
    (source / "000.txt").write_text("another caption")
    before = vector_of(run, "000.png")
    refresh(run)
    after = vector_of(run, "000.png")
    assert np.abs(after - library((source / "000.png").read_bytes(), "another caption")).max() < 1e-5
    assert np.abs(after - before).max() > 1e-3
    (source / "000.txt").unlink()
    refresh(run)
    assert np.abs(vector_of(run, "000.png") - library((source / "000.png").read_bytes())).max() < 1e-5
    refresh(run.model_copy(update={"model": model}))
    assert np.abs(vector_of(run, "002.png") - library((source / "002.png").read_bytes())).max() < 1e-5


def vector_of(config, item_id):
    rows = embedder.open_store(config.store).to_arrow().to_pylist()
    return next(np.array(row["image_embedding"]) for row in rows if row["item_id"].endswith(item_id))


@pytest.mark.slow
def test_three_stages_on_ray_embed_pictures_with_their_captions(make_run, joined, library, tmp_path, ray_cluster):
    source = fill(tmp_path / "in", 40)
    run = make_run(source, model=joined, num_stages=3, rows_per_part=16, engine="ray")
    check_run(run, source, library, joins_captions=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "embedding_gemma2"])
def test_three_stages_on_ray_find_transformers_own_neighbours(make_run, family, tmp_path, ray_cluster):
    checkpoint, source = save_checkpoint(tmp_path / "checkpoint", family), fill(tmp_path / "in", 40)
    model, library = str(tmp_path / "model"), of_files(checkpoint)
    import_checkpoint(checkpoint, model)
    run = make_run(source, model=model, num_stages=3, rows_per_part=16, engine="ray")
    report = check_run(run, source, library)
    assert {step.step for step in report.steps} == {"decode", "stage 0", "stage 1", "stage 2", "write"}
    assert {each.side: each.passed for each in verify(run).comparisons} == {"image": True, "text": True}
