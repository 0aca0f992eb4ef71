"""The guard `compare`: another model that finds a group worse is not published where [compare] asks for it."""

import numpy as np
import pyarrow as pa
import pytest
from store_samples import begin, row, table

from embedder.config import RunConfig, RunLimits
from embedder.ingest.guards import judge, refusal
from embedder.ingest.run_result import count_run
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import read_current
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish

NUM, WIDTH = 400, 16
KINDS = ("cat", "dog", "fish", "bird")
NO_IDS = pa.chunked_array([[]], pa.string())


def limits(**compare) -> RunLimits:
    return RunConfig.model_validate({"compare": {"required": True} | compare}).limits


def unit(rng, num=NUM):
    vectors = rng.normal(size=(num, WIDTH)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def rows(seed, lost=(), captions="caption {}"):
    """Pairs whose captions lie on their images, but for those of the lost groups, which lie anywhere."""
    rng = np.random.default_rng(seed)
    images, elsewhere = unit(rng), unit(rng)
    texts = [elsewhere[n] if KINDS[n % 4] in lost else images[n] for n in range(NUM)]
    return [
        row(
            f"p{n:04d}",
            modality="pair",
            caption=captions.format(n),
            content_version=f"v{n}",
            image_embedding=list(map(float, images[n])),
            text_embedding=list(map(float, texts[n])),
        )
        for n in range(NUM)
    ]


def kinds():
    return pa.array([KINDS[n % 4] for n in range(NUM)], pa.string())


CARRIED = pa.schema({"kind": pa.string(), "text": pa.string()})


@pytest.fixture
def refreshed(tmp_path):
    """The result of a run with another model over a store whose model finds everything."""

    def run(*new, **options):
        files = StoreFiles(tmp_path / "store")
        first, stamp = begin(files, CARRIED)
        write_part(files, stamp, 0, table(*rows(0), kind=kinds(), text=kinds()))
        publish([ModelWork(first, stamp)])
        second, stamp = begin(files, CARRIED)
        write_part(files, stamp, 0, table(*new, kind=kinds()[: len(new)], text=kinds()[: len(new)]))
        return count_run(second, read_current(files), NO_IDS, **{"keeps_published": False} | options)

    return run


def compared(result, config):
    return {verdict.name: verdict for verdict in judge(result, config)}.get("compare")


def test_a_model_as_good_as_the_published_one_passes(refreshed):
    verdict = compared(refreshed(*rows(1)), limits(group="kind"))
    assert verdict.passed and verdict.num_judged == NUM
    assert "is 1.000 by the published model and 1.000 by this one" in verdict.message


@pytest.mark.parametrize("group", ["kind", "text"])
def test_a_group_that_another_model_finds_worse_is_found_and_the_run_refused(refreshed, group):
    result = refreshed(*rows(1, lost=("fish",)))
    verdicts = judge(result, limits(group=group))
    found = next(verdict for verdict in verdicts if verdict.name == "compare")
    assert found.blocks and "fish 1.000 -> 0." in found.message
    assert "cat" not in found.message and "dog" not in found.message
    assert "--force compare" in refusal(verdicts)
    assert not next(each for each in judge(result, limits(group="kind"), ["compare"]) if each.name == "compare").blocks


def test_without_the_section_and_with_the_same_model_nothing_is_compared(refreshed):
    result = refreshed(*rows(1, lost=KINDS))
    assert compared(result, RunConfig().limits) is None
    same = count_run(result.run, result.published, NO_IDS, keeps_published=True)
    assert compared(same, limits()) is None


def test_only_captions_that_both_models_were_asked_count(refreshed):
    result = refreshed(*rows(1, lost=KINDS, captions="new {}"))
    assert "too few captions" in compared(result, limits()).message
    assert compared(result, limits()).passed and not compared(result, limits(prove=True)).passed


def test_a_column_that_is_not_there_is_refused_and_named(refreshed):
    verdict = compared(refreshed(*rows(1)), limits(group="species"))
    assert verdict.blocks and "compare.group = 'species'" in verdict.message
