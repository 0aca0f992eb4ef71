"""The card of a trained model says what it is, of what, and how good."""

import pytest
import train_samples

from embedder.plugins.train.train_outputs import Outputs
from embedder.plugins.train.train_run import train

pytestmark = pytest.mark.medium


def test_the_card_has_towers_data_settings_and_figures(tiny_model, tmp_path):
    pairs = train_samples.table(tmp_path / "pairs.parquet", 24)
    out = tmp_path / "a|b"
    report = train(train_samples.training(pairs, out, model=str(tiny_model)))
    card = (out / "model" / "MODEL_CARD.md").read_text()
    assert card == (out / "last" / "MODEL_CARD.md").read_text()
    assert card == Outputs(out).tracked_files()["MODEL_CARD.md"].decode()
    assert f"{report.num_items} items to learn from, {report.num_held_out} held out" in card
    assert f"| best | {report.best['step']} | {report.best['r_at_1']:.3f} |" in card
    assert f"Begun with `{tiny_model}`, loss `{report.loss}`. 12 steps" in card
    assert r"a\|b" in card, "it would end the cell"
    assert "**Licence**" in card


def test_without_held_out_items_it_says_that_nothing_was_measured(tiny_model, tmp_path):
    pairs = train_samples.table(tmp_path / "pairs.parquet", 24)
    train(train_samples.training(pairs, tmp_path / "out", model=str(tiny_model), validation={"fraction": 0.0}))
    assert "None: no item was held out." in (tmp_path / "out" / "last" / "MODEL_CARD.md").read_text()
