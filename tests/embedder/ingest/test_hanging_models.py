"""Models that hang in a run: what is ended, what it costs, and what is tried again."""

import pytest
import samples
from model_runs import classifier, model_rows, table_hashes
from PIL import Image

from embedder.errors import RunFailedError
from embedder.ingest.embed import embed


def hanging(folder, **keys):
    """File, and section of a model that hangs on images of the value 7 while the file is there."""
    flag = folder / "slow"
    flag.touch()
    return flag, classifier(folder, hangs_on=7, while_there=str(flag)) | keys


@pytest.mark.slow
def test_what_hangs_in_a_process_of_its_own_is_a_reject_of_that_model_and_tried_again_with_what_takes_from_it(
    make_run, tmp_path, tiny_model, other_model
):
    source = samples.folder(tmp_path / "in", num_images=4)
    Image.new("RGB", (20, 20), (7,) * 3).save(source / "seven.png")
    flag, shades = hanging(tmp_path, timeout_s=10.0, batch_size=1)
    names = {"name": "names", "uri": other_model, "sides": ["text"], "text_of": "shades.top"}
    models = [{"uri": str(tiny_model)}, shades, names]
    config = make_run(source, model=models, max_reject_fraction=0.5)

    embed(config)

    assert model_rows(config)["seven.png", 0]["image_embedding"] is not None
    for name in ("shades", "names"):
        items = model_rows(config, name, "items")
        (rejected,) = [item for item in items.values() if item["state"] == "rejected"]
        assert (rejected["item_id"], rejected["step"]) == ("seven.png", f"model {name}")
        assert (rejected["error_type"], rejected["transient"]) == ("ModelTimeout", True)
        assert "took longer than" in rejected["error"]
    before = table_hashes(config.store)
    flag.unlink()
    embed(config)
    assert model_rows(config, "shades", "items")["seven.png"]["error"] is None
    assert model_rows(config, "shades")["seven.png", 0]["top"] == "dark"
    assert model_rows(config, "names")["seven.png", 0]["text_embedding"] is not None
    assert table_hashes(config.store) == before


@pytest.mark.medium
def test_what_hangs_in_the_runs_own_process_ends_it_in_one_line_and_the_same_command_goes_on(
    make_run, tmp_path, tiny_model, monkeypatch
):
    source = samples.folder(tmp_path / "in", num_images=9)
    Image.new("RGB", (20, 20), (7,) * 3).save(source / "zz.png")
    flag, shades = hanging(tmp_path)
    config = make_run(source, model=[{"uri": str(tiny_model)}, shades], rows_per_part=2, batch_size=2)
    monkeypatch.setattr("embedder.servables.running_servable.CALL_S", 2.0)
    with pytest.raises(RunFailedError, match=r"servable shades .*: a call of \d rows took longer than 2 s") as failed:
        embed(config)
    assert "\n" not in str(failed.value)
    flag.unlink()
    report = embed(config)
    assert report.published
    assert len(model_rows(config)) == len(model_rows(config, "shades")) == 10
