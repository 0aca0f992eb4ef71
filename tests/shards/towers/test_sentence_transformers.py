"""Folders of sentence-transformers, imported: the same vectors, or a refusal by name whose cure leads to them."""

import json
import shutil

import library_checkpoints as checkpoints
import pytest
import torch
from sentence_folders import CAPTIONS, WIDTH, expected_vectors, save_sentence_model, write_json
from tower_checkpoints import edit_json, save_clip
from tower_checks import check_every_cut, check_every_part_matters, embed_whole, make_batch

from embedder.steps.caption_encoder import CaptionEncoder
from shards.convert import import_checkpoint, import_config, import_timm_and_text
from shards.fingerprint import model_fingerprint, preprocess_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.model_summary import read_import_record

MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
ACTIVATIONS = {"Identity": "linear.Identity", "Tanh": "activation.Tanh", "ReLU": "activation.ReLU"} | {
    "GELU": "activation.GELU"
}


def batch_of(folder, captions=CAPTIONS, prompt=None):
    config = load_model_config(folder)
    preprocess = config.preprocess
    prompt = preprocess.caption_prompt if prompt is None else prompt
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    encoder = CaptionEncoder(content, preprocess.max_caption_tokens, config.text.end_id, prompt)
    return make_batch(config, [encoder.encode(caption).tolist() for caption in captions], num_images=len(captions))


def text_vectors(folder, **options):
    return embed_whole(folder, batch_of(folder, **options))["text"]


def check_equal(folder, out, expected):
    import_checkpoint(folder, out)
    assert (text_vectors(out) - expected).abs().max() < 1e-5


def dense(kind, size=20, *, bias=True):
    return {
        "in_features": WIDTH,
        "out_features": size,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{ACTIVATIONS[kind]}",
    }


@pytest.mark.parametrize("version", [3, 6])
@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_gives_the_librarys_vectors(mode, version, tmp_path):
    save_sentence_model(tmp_path / "own", mode, version=version)
    check_equal(tmp_path / "own", tmp_path / "model", expected_vectors(tmp_path / "own", CAPTIONS, mode))


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
@pytest.mark.parametrize(
    "save", [checkpoints.roberta, checkpoints.distilbert, checkpoints.modernbert, checkpoints.albert]
)
def test_every_family_of_text_towers_is_pooled(save, mode, tmp_path):
    save_sentence_model(tmp_path / "own", mode, save=save)
    check_equal(tmp_path / "own", tmp_path / "model", expected_vectors(tmp_path / "own", CAPTIONS, mode))


@pytest.mark.parametrize("version", [3, 6])
def test_several_poolings_stand_in_sequence(version, tmp_path):
    modes = "cls", "mean", "weightedmean"
    save_sentence_model(tmp_path / "own", *modes, version=version)
    check_equal(tmp_path / "own", tmp_path / "model", expected_vectors(tmp_path / "own", CAPTIONS, *modes))
    assert load_model_config(tmp_path / "model").embedding_dim == 3 * WIDTH


@pytest.mark.parametrize("has_dense", [False, True])
def test_vectors_that_the_library_truncates_are_cut_alike(has_dense, tmp_path):
    settings = dense("Tanh") if has_dense else None
    save_sentence_model(tmp_path / "own", "mean", dense=settings, settings={"truncate_dim": 8})
    activation = torch.nn.Tanh() if has_dense else None
    expected = expected_vectors(tmp_path / "own", CAPTIONS, "mean", activation=activation)[:, :8]
    check_equal(tmp_path / "own", tmp_path / "model", torch.nn.functional.normalize(expected, dim=-1))
    assert load_model_config(tmp_path / "model").vector_dim == 8
    assert "vectors are cut to 8 dimensions" in (tmp_path / "model" / "import.json").read_text()


@pytest.mark.parametrize("version", [3, 6])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_dense_layer_and_its_activation_follow_pooling(kind, version, tmp_path):
    settings = dense(kind, bias=kind != "Identity")
    save_sentence_model(tmp_path / "own", "mean", dense=settings, version=version)
    expected = expected_vectors(tmp_path / "own", CAPTIONS, "mean", activation=getattr(torch.nn, kind)())
    check_equal(tmp_path / "own", tmp_path / "model", expected)


@pytest.mark.parametrize("modes", [("max",), ("lasttoken",), ("weightedmean", "mean_sqrt_len_tokens")])
def test_every_cut_and_every_part_of_a_pooled_tower(modes, tmp_path):
    settings = dense("Tanh") | {"in_features": WIDTH * len(modes)}
    save_sentence_model(tmp_path / "own", *modes, dense=settings)
    import_checkpoint(tmp_path / "own", tmp_path / "model")
    batch = batch_of(tmp_path / "model")
    check_every_cut(tmp_path / "model", batch)
    check_every_part_matters(tmp_path / "model", batch, tmp_path)


def test_an_activation_counts_in_the_fingerprint(tmp_path):
    save_sentence_model(tmp_path / "own", "mean", dense=dense("Identity"))
    import_checkpoint(tmp_path / "own", tmp_path / "plain")
    edit_json(tmp_path / "own/2_Dense/config.json", activation_function="torch.nn.modules.activation.Tanh")
    import_checkpoint(tmp_path / "own", tmp_path / "tanh")
    assert model_fingerprint(tmp_path / "plain") != model_fingerprint(tmp_path / "tanh")


@pytest.mark.parametrize("version", [3, 6])
def test_the_limit_of_sentence_transformers_wins_and_is_told(version, tmp_path):
    save_sentence_model(tmp_path / "own", "mean", version=version, limits={"max_seq_length": 9})
    check_equal(tmp_path / "own", tmp_path / "model", expected_vectors(tmp_path / "own", CAPTIONS, "mean", limit=9))
    decisions = read_import_record(tmp_path / "model")["decisions"]
    limit = f"captions up to 9 tokens: sentence_bert_config.json wins over {checkpoints.MAX_TOKENS} of tokenizer_config"
    assert any(line.startswith(limit) for line in decisions)
    assert "pooling: mean of modules.json wins over the checkpoint's pooler" in decisions


def test_lower_case_of_sentence_transformers_wins_over_the_tokeniser(tmp_path):
    limits = {"max_seq_length": None, "do_lower_case": True}
    save_sentence_model(tmp_path / "own", "mean", save=checkpoints.roberta, version=3, limits=limits)
    lowered = [caption.lower() for caption in CAPTIONS]
    check_equal(tmp_path / "own", tmp_path / "model", expected_vectors(tmp_path / "own", lowered, "mean"))
    encoder = CaptionEncoder((tmp_path / "model/tokenizer.json").read_text(), 40)
    for caption in ("ΟΔΟΣ ΣΟΦΟΣ, ΑΣ.", "İSTANBUL", "aΣ Σ"):  # Python ends a word with another sigma
        assert encoder.encode(caption).tolist() == encoder.encode(caption.lower()).tolist()


@pytest.mark.parametrize(
    ("settings", "query", "caption"),
    [
        ({"prompts": {"query": "red: ", "passage": "cat: "}}, "red: ", "cat: "),
        ({"prompts": {"query": "red: "}}, "red: ", ""),
        ({"prompts": {"rain": "rain: "}, "default_prompt_name": "rain"}, "rain: ", "rain: "),
        ({"prompts": {"rain": "rain: "}, "default_prompt_name": None}, "", ""),
    ],
)
def test_prompts_stand_before_queries_and_captions(settings, query, caption, tmp_path):
    own, model = tmp_path / "own", tmp_path / "model"
    save_sentence_model(own, "mean", save=checkpoints.roberta, version=3, settings=settings)
    check_equal(own, model, expected_vectors(own, [caption + each for each in CAPTIONS], "mean"))
    asked = text_vectors(model, prompt=load_model_config(model).preprocess.query_prompt)
    assert (asked - expected_vectors(own, [query + each for each in CAPTIONS], "mean")).abs().max() < 1e-5


def test_a_prompt_counts_in_the_preprocessing_and_not_in_what_a_caption_is_cut_to(tmp_path):
    save_sentence_model(tmp_path / "own", "mean", settings={"prompts": {"document": "red car: "}})
    config = import_checkpoint(tmp_path / "own", tmp_path / "model")
    without = config.preprocess.model_copy(update={"caption_prompt": ""})
    assert preprocess_fingerprint(config.preprocess, b"", 1, 1) != preprocess_fingerprint(without, b"", 1, 1)
    content = (tmp_path / "model/tokenizer.json").read_text(encoding="utf-8")
    assert CaptionEncoder(content, 5, prompt="red car: ").read_part("fruit and red cats") == ""
    assert CaptionEncoder(content, 24, prompt="red car: ").read_part("fruit") is None
    assert CaptionEncoder(content, 9, prompt="car ").read_part("red " * 9) == "red red red red red red"


def test_the_checkpoint_may_lie_in_a_folder_of_its_own_and_be_given_itself(tmp_path):
    own = tmp_path / "own"
    save_sentence_model(own, "mean", version=3, inner="0_Transformer")
    expected = expected_vectors(own, CAPTIONS, "mean", inner="0_Transformer")
    check_equal(own, tmp_path / "model", expected)
    check_equal(own / "0_Transformer", tmp_path / "again", expected)
    assert import_config(own, tmp_path / "plan") == load_model_config(tmp_path / "model")


@pytest.mark.parametrize("kind", ["CLIPModel", "Transformer"])
def test_a_clip_gives_its_own_vectors_from_its_folder_or_the_one_around_it(kind, tmp_path):
    own = tmp_path / "own"
    save_clip(own / "0_CLIPModel")
    write_json(own / "modules.json", [{"path": "0_CLIPModel", "type": f"sentence_transformers.models.{kind}"}])
    if kind == "Transformer":
        methods = {
            side: {"method": f"get_{side}_features", "method_output_name": "pooler_output"}
            for side in ("text", "image")
        }
        write_json(own / "0_CLIPModel/sentence_bert_config.json", {"modality_config": methods})
    write_json(own / "config_sentence_transformers.json", {"prompts": {"query": "a photo of "}})
    assert import_checkpoint(own, tmp_path / "outer").preprocess.query_prompt == "a photo of "
    import_checkpoint(own / "0_CLIPModel", tmp_path / "inner")
    shutil.copytree(own / "0_CLIPModel", tmp_path / "alone")
    import_checkpoint(tmp_path / "alone", tmp_path / "plain")
    prints = {model_fingerprint(tmp_path / name) for name in ("outer", "inner", "plain")}
    assert len(prints) == 1


def test_a_joined_text_tower_keeps_its_pooling(tmp_path):
    checkpoints.timm_vit(tmp_path / "vit")
    save_sentence_model(tmp_path / "own", "lasttoken", settings={"prompts": {"query": "red: "}})
    config = import_timm_and_text(tmp_path / "vit", tmp_path / "own", tmp_path / "model", 16)
    assert (config.text.pool, config.preprocess.query_prompt) == ("last", "red: ")
    save_sentence_model(tmp_path / "dense", "mean", dense=dense("Tanh"))
    with pytest.raises(ModelError, match="2_Dense: --text joins a tower with a fresh projection"):
        import_timm_and_text(tmp_path / "vit", tmp_path / "dense", tmp_path / "no", 16)
    rows = json.loads((tmp_path / "dense/modules.json").read_text())
    write_json(tmp_path / "dense/modules.json", [row for row in rows if not row["type"].endswith("Dense")])
    assert import_timm_and_text(tmp_path / "vit", tmp_path / "dense", tmp_path / "ok", 16).text.pool == "mean"


def set_keys(path, **keys):
    return lambda folder: edit_json(folder / path, **keys)


def set_modules(change):
    def edit(folder):
        rows = json.loads((folder / "modules.json").read_text())
        write_json(folder / "modules.json", change(rows))

    return edit


def without(*kinds):
    return set_modules(lambda rows: [row for row in rows if row["type"].rpartition(".")[2] not in kinds])


def also(kind):
    return set_modules(lambda rows: [*rows, {"path": f"9_{kind}", "type": f"sentence_transformers.models.{kind}"}])


LIMITS, SETTINGS, POOLING, DENSE = (
    *("sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json"),
)
# Damage, a part of the message, and the cure that the message names; None where it is another model: an honest end.
REFUSED = {
    "truncated to no number": (
        set_keys(SETTINGS, truncate_dim="8"),
        "truncate_dim = '8'.* a number of dimensions can",
        set_keys(SETTINGS, truncate_dim=None),
    ),
    "sparse": (
        set_keys(SETTINGS, model_type="SparseEncoder"),
        "model_type = SparseEncoder.*a SentenceTransformer can",
        None,
    ),
    "prompt without a name": (
        set_keys(SETTINGS, default_prompt_name="x", prompts={"y": "y: "}),
        "default_prompt_name = 'x', no prompt.* correct that name",
        set_keys(SETTINGS, default_prompt_name="y"),
    ),
    "prompt left out of the mean": (
        lambda folder: (
            set_keys(SETTINGS, prompts={"query": "q: "})(folder),
            set_keys(POOLING, include_prompt=False)(folder),
        ),
        "include_prompt = false and prompts.*delete them from config_sentence_transformers.json",
        set_keys(SETTINGS, prompts={}),
    ),
    "unknown pooling": (
        set_keys(POOLING, pooling_mode="attention"),
        "the pooling attention.*these can: cls, max",
        set_keys(POOLING, pooling_mode="cls"),
    ),
    "no pooling": (without("Pooling", "Dense", "Normalize"), "Transformer without Pooling", None),
    "activation": (
        set_keys(DENSE, activation_function="torch.nn.Softmax"),
        "activation_function = torch.nn.Softmax.* Identity, Tanh",
        None,
    ),
    "residual": (set_keys(DENSE, use_residual=True), "use_residual = true", None),
    "tokens": (
        set_keys(DENSE, module_input_name="token_embeddings"),
        "module_input_name = 'token_embeddings'.*'sentence_embedding' can",
        None,
    ),
    "layer norm": (
        also("LayerNorm"),
        "LayerNorm after Transformer, Pooling, Dense, Normalize.*a model of Transformer, Pooling",
        None,
    ),
    "two dense": (also("Dense"), "module .*Dense after Transformer, Pooling, Dense, Normalize", without("Dense")),
    "routes": (
        also("Router"),
        r"Router after .*modules=\[\*list\(model\)\[:4\], \*model\[4\].sub_modules\['document'\]\]",
        without("Router"),
    ),
    "asymmetric": (also("Asym"), "Asym after .*a model folder holds one route", without("Asym")),
    "own code": (
        set_modules(lambda rows: [{"path": "", "type": "custom_st.Transformer"}, *rows[1:]]),
        "the module custom_st.Transformer",
        None,
    ),
    "arguments": (set_modules(lambda rows: [rows[0] | {"kwargs": ["task"]}, *rows[1:]]), r"kwargs = \['task'\]", None),
    "no words": (
        set_modules(lambda rows: [{"path": "", "type": "sentence_transformers.models.StaticEmbedding"}]),
        "StaticEmbedding",
        None,
    ),
    "outside": (
        set_modules(lambda rows: [rows[0], rows[1] | {"path": "../x"}]),
        "lies in '../x', not below this folder",
        None,
    ),
    "no list": (lambda folder: write_json(folder / "modules.json", {"a": 1}), "this is no list of modules", None),
    "no modules": (set_modules(lambda rows: []), "names no module", None),
    "task": (set_keys(LIMITS, transformer_task="text-generation"), "transformer_task = 'text-generation'", None),
    "another layer": (
        set_keys(LIMITS, modality_config={"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}}),
        "modality 'text' by .*hidden_states",
        None,
    ),
    "limit": (
        set_keys(LIMITS, max_seq_length=1),
        "max_seq_length = 1, which can't be imported; a number of tokens, from 2 up",
        set_keys(LIMITS, max_seq_length=2),
    ),
    "shapeless features": (set_keys(LIMITS, modality_config={"text": []}), "isn't as the library writes it", None),
    "shapeless prompts": (set_keys(SETTINGS, prompts=["query"]), "isn't as the library writes it", None),
    "query length": (
        set_keys(LIMITS, query_length=32),
        "query_length = 32.*delete query_length there",
        set_keys(LIMITS, query_length=None),
    ),
    "expansion": (
        set_keys(LIMITS, query_expansion={"length": 32}),
        "query_expansion = .*delete query_expansion",
        set_keys(LIMITS, query_expansion=None),
    ),
    "arguments of the model": (
        set_keys(LIMITS, model_args={"add_pooling_layer": True}),
        "model_args = .*save the model with them applied",
        set_keys(LIMITS, model_args={}),
    ),
    "missing module": (
        lambda folder: shutil.rmtree(folder / "1_Pooling"),
        "1_Pooling.*fetch its folder, too",
        lambda folder: write_json(folder / POOLING, {"pooling_mode": "mean"}),
    ),
    "missing weights": (
        lambda folder: (folder / "2_Dense/model.safetensors").unlink(),
        "2_Dense: found no weights",
        without("Dense"),
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "own"
    save_sentence_model(folder, "mean", dense=dense("Tanh"))
    return folder


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_imported_is_refused_by_name_and_its_cure_leads_to_a_model(what, good, tmp_path):
    damage, message, cure = REFUSED[what]
    own = shutil.copytree(good, tmp_path / "own")
    damage(own)
    with pytest.raises(ModelError, match=message) as caught:
        import_checkpoint(own, tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["own"]
    if cure is not None:
        cure(own)
        import_checkpoint(own, tmp_path / "model")


def test_pooling_over_the_tokens_of_a_clip_is_refused(tmp_path):
    save_clip(tmp_path / "own")
    rows = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_json(
        tmp_path / "own/modules.json",
        [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in rows],
    )
    write_json(tmp_path / "own/1_Pooling/config.json", {"pooling_mode": "mean"})
    with pytest.raises(ModelError, match="Pooling over ViT"):
        import_checkpoint(tmp_path / "own", tmp_path / "model")


def test_a_siglip_that_would_pad_otherwise_is_refused_and_taken_without_the_modules(tmp_path):
    own = tmp_path / "own"
    checkpoints.siglip2(own)
    write_json(own / "modules.json", [{"path": "", "type": "sentence_transformers.models.CLIPModel"}])
    with pytest.raises(ModelError, match=r"attends to padding, .*delete modules\.json to import what transformers"):
        import_checkpoint(own, tmp_path / "model")
    (own / "modules.json").unlink()
    import_checkpoint(own, tmp_path / "model")


@pytest.mark.parametrize("route", ["own", "own/document_0_Transformer"])
def test_a_route_is_refused_from_its_own_folder_too(route, tmp_path):
    write_json(
        tmp_path / "own/modules.json", [{"path": "", "type": "sentence_transformers.base.modules.router.Router"}]
    )
    checkpoints.bert(tmp_path / "own/document_0_Transformer")
    with pytest.raises(ModelError, match=r"Router, which .*\*model\[0\]\.sub_modules\['document'\]"):
        import_checkpoint(tmp_path / route, tmp_path / "model")


def test_odd_spellings_of_the_librarys_files_are_read_as_it_reads_them(tmp_path):
    save_sentence_model(tmp_path / "own", "mean", version=3)
    rows = json.loads((tmp_path / "own/modules.json").read_text())
    write_json(tmp_path / "own/modules.json", [row | {"path": row["path"] and row["path"] + "/"} for row in rows])
    edit_json(tmp_path / "own/1_Pooling/config.json", pooling_mode_mean_tokens=0, pooling_mode_cls_token=1)
    check_equal(tmp_path / "own", tmp_path / "model", expected_vectors(tmp_path / "own", CAPTIONS, "cls"))
    edit_json(tmp_path / "own/1_Pooling/config.json", pooling_mode_cls_token=0)  # none is the mean
    check_equal(tmp_path / "own", tmp_path / "mean", expected_vectors(tmp_path / "own", CAPTIONS, "mean"))
    (tmp_path / "own/modules.json").unlink()
    import_checkpoint(tmp_path / "own", tmp_path / "lost")
    (line,) = read_import_record(tmp_path / "lost")["decisions"]
    assert line.startswith("found sentence_bert_config.json and no modules.json")


def test_the_library_itself_gives_the_same_vectors(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    for number, version in enumerate((3, 6)):
        own, model = tmp_path / f"own{number}", tmp_path / f"model{number}"
        limits = {"max_seq_length": 12, "do_lower_case": True}
        save_sentence_model(
            own,
            "mean",
            "max",
            save=checkpoints.roberta,
            version=version,
            limits=limits,
            dense=dense("Tanh") | {"in_features": 2 * WIDTH},
            settings={"prompts": {"query": "red: ", "document": "car: "}},
        )
        import_checkpoint(own, model)
        theirs = library.SentenceTransformer(str(own), device="cpu")
        query = load_model_config(model).preprocess.query_prompt
        for found, encode in (
            (text_vectors(model), theirs.encode_document),
            (text_vectors(model, prompt=query), theirs.encode_query),
        ):
            expected = torch.from_numpy(encode(CAPTIONS, normalize_embeddings=True))
            assert (found - expected).abs().max() < 1e-5
