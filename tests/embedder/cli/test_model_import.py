"""`embedder model import`: two towers that were trained apart, joined by `--text`."""

import pytest
from command_runs import run_here
from tiny_tokenizers import NUM_TOKENS, wordpiece
from tower_checks import randomise

from shards.config import load_model_config


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder of a timm ViT and of a BERT."""
    import timm
    from timm.models import save_for_hf
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    vit = timm.create_model("vit_small_patch16_224", num_classes=7, **sizes)
    save_for_hf(vit, str(folder / "vit"), safe_serialization=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    randomise(BertModel(BertConfig(vocab_size=NUM_TOKENS, **sizes))).save_pretrained(folder / "bert")
    wordpiece().save_pretrained(folder / "bert")
    return folder


@pytest.mark.parametrize("option", ["--text", "--albert"])
def test_a_text_tower_joins_a_timm_checkpoint(checkpoints, tmp_path, option):
    out = tmp_path / "joined"
    ended = run_here(
        "model", "import", checkpoints / "vit", option, checkpoints / "bert", "--embedding-dim", 24, "--out", out
    )
    assert ended.code == 0, ended.stderr
    assert ("--albert is called --text now" in ended.stdout) == (option == "--albert")
    assert "its projections are fresh" in ended.stdout
    config = load_model_config(out)
    assert (config.text.family, config.embedding_dim, config.trained) == ("bert", 24, False)


def test_both_names_of_the_option_are_refused(checkpoints, tmp_path):
    texts = [argument for option in ("--text", "--albert") for argument in (option, checkpoints / "bert")]
    ended = run_here("model", "import", checkpoints / "vit", *texts, "--out", tmp_path / "out")
    assert ended.code == 2
    assert "--albert is the old name of --text; give --text alone" in ended.stderr
