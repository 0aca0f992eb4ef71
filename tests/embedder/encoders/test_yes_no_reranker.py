"""A re-ranker that answers with yes or no: transformers' own scores of pairs, at every cut, and in a search."""

import io

import numpy as np
import pyarrow as pa
import pytest
import samples
import torch
from command_runs import run_here
from picture_decoders import save_checkpoint, save_reranker
from PIL import Image
from tower_checks import check_every_cut, check_refused
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

import embedder
from embedder.errors import ConfigError
from shards.activations import Batch, TowerState
from shards.convert import import_reranker
from shards.convert.reranker import INSTRUCTION, RULE

QUERIES = ["a red car", "日本語 & <b>?", "  two cats {query}\n", "seven white horses"]
CAPTIONS = ["a red car on the road", "русский текст", "x", "two cats\n"]
SIZES = [(64, 64), (512, 512), (90, 40), (33, 150)]


@pytest.fixture(scope="module", params=[False, True], ids=["own table of logits", "tied"])
def checkpoint(request, tmp_path_factory):
    """A random small checkpoint whose tokeniser knows both answers."""
    return save_reranker(tmp_path_factory.mktemp("reranker") / "checkpoint", is_tied=request.param)


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "model"
    import_reranker(checkpoint, out)
    return str(out)


@pytest.fixture(scope="module")
def library(checkpoint):
    """transformers' own score of a pair."""
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint).eval()
    processor = Qwen3VLProcessor.from_pretrained(checkpoint)
    answers = processor.tokenizer.convert_tokens_to_ids(["yes", "no"])

    @torch.no_grad()
    def score(query, image=None, caption=None):
        document = {"type": "text", "text": caption} if image is None else {"type": "image", "image": image}
        texts = [f"<Instruct>: {INSTRUCTION}", "<Query>:", query.strip(), "\n<Document>:"]
        content = [*({"type": "text", "text": each} for each in texts), document]
        system = {"role": "system", "content": [{"type": "text", "text": RULE}]}
        messages = [system, {"role": "user", "content": content}]
        form = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[form], images=None if image is None else [image], return_tensors="pt")
        yes, no = theirs(**inputs).logits[0, -1, answers].double()
        return float(torch.sigmoid(yes - no))

    return score


def batch_of(queries, images, captions):
    kind = pa.struct({"pixels": pa.binary(), "height": pa.int32(), "width": pa.int32()})
    values = [
        None if each is None else {"pixels": each.tobytes(), "height": each.height, "width": each.width}
        for each in images
    ]
    return pa.record_batch(
        {"query": queries, "image": pa.array(values, kind), "caption": pa.array(captions, pa.string())}
    )


@pytest.mark.medium
def test_pictures_and_captions_have_transformers_own_scores(model, library):
    images = [samples.make_image(number, *size) for number, size in enumerate(SIZES)]
    pairs = [(query, image, None) for query in QUERIES for image in images]
    pairs += [(query, None, caption) for query in QUERIES for caption in CAPTIONS]
    pairs += [(QUERIES[0], images[0], CAPTIONS[1]), (QUERIES[1], None, None)]
    found = embedder.YesNoReranker(model).load().process(batch_of(*zip(*pairs, strict=True)))["score"]
    expected = [library(*pair) for pair in pairs[:-1]]
    assert np.abs(found[:-1].to_numpy() - expected).max() < 1e-5
    assert found.null_count == 1 and not found[-1].is_valid, "there is nothing to score"
    assert np.std(expected) > 0.01, "else the scores could all be alike"


@pytest.mark.medium
def test_every_cut_of_it_is_exact(model):
    from shards.model_config import load_model_config

    config, generator = load_model_config(model), torch.Generator().manual_seed(0)
    grids = torch.tensor([(1, 4, 4), (1, 6, 2)]).int()
    patches = torch.randint(0, 256, (28, config.vision.patch_values), dtype=torch.uint8, generator=generator)
    ids = torch.arange(20, 35).int()
    check_every_cut(
        model, Batch(TowerState(patches, grids.long().prod(1), grids), TowerState(ids, torch.tensor([9, 6])))
    )


@pytest.mark.medium
def test_a_search_is_ordered_by_it(model, library, make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_clips=0)
    config = make_run(source)
    embedder.embed(config)
    store = embedder.open_store(config.store)
    hits = store.search("a red car", k=4, rerank=6, reranker=embedder.YesNoReranker(model).load())
    first = [Image.open(io.BytesIO(hit.read())).convert("RGB") for hit in store.search("a red car", k=6)]
    assert all(max(image.size) <= 512 and image.width != image.height for image in first)  # in their own proportions
    expected = sorted((library("a red car", image) for image in first), reverse=True)
    assert [hit.rerank_score for hit in hits] == pytest.approx(expected[:4], abs=1e-4)
    given = ["--store", config.store, "-k", 4]
    ended = run_here("search", "a red car", *given, "--rerank", 6, "--reranker", model, "--json")
    assert [hit["item_id"] for hit in ended.found["hits"]] == [hit.item_id for hit in hits]
    ended = run_here("search", "a red car", *given, "--rerank", 6)
    assert (ended.code, "--rerank N and --reranker DIR go together" in ended.stderr) == (2, True)


def test_its_folder_is_described(model):
    ended = run_here("model", "info", model)
    assert "a re-ranker: it scores the hits of `embedder search --rerank 50" in " ".join(ended.stdout.split())
    found = run_here("model", "info", model, "--json").found["import"]
    uses = {each["file"]: each["use"] for each in found["files"]}
    assert uses["config.json"] == uses["model.safetensors"] == "read"


def test_what_is_no_reranker_is_refused(tiny_model, model, make_run, tmp_path):
    with pytest.raises(ConfigError, match="it is a re-ranker, which scores hits and embeds nothing"):
        embedder.embed(make_run(samples.folder(tmp_path / "in", num_clips=0), model=model))
    with pytest.raises(ConfigError, match="it is no re-ranker; give a folder of `embedder model import --reranker`"):
        embedder.YesNoReranker(str(tiny_model))
    for settings in ("dimensions=1", "item_instruction=x", "query_instruction=x"):
        with pytest.raises(ConfigError, match="a re-ranker makes no vectors and takes no settings; give"):
            embedder.YesNoReranker(f"{model}#{settings}")
    with pytest.raises(ConfigError, match="the query fills the 4,096 tokens"):
        embedder.YesNoReranker(model).load().process(batch_of(["long " * 4000], [None], ["x"]))
    without = save_checkpoint(tmp_path / "without")
    (tmp_path / "outs").mkdir()
    check_refused(import_reranker, without, tmp_path / "outs" / "out", "its tokeniser has no token for yes or no")
    ended = run_here("model", "import", without, "--out", tmp_path / "out", "--reranker", "--config-only")
    assert "--reranker imports one whole checkpoint" in ended.stderr
