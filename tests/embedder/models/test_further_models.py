"""Further models of a run: outputs that are no column of their table are refused before anything is done."""

import pytest
import samples
from model_runs import classifier

from embedder.errors import ConfigError
from embedder.ingest.embed import embed
from embedder.models.further_models import open_models

VECTOR = {"type": "float32", "shape": [4]}


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"item_id": {"type": "string"}}, "output item_id: each table has a column of that name; rename it"),
        ({"caption": {"type": "string"}}, "output caption: each table has a column of that name; rename it"),
        ({"run_id": {"type": "string"}}, "output run_id: each table has a column of that name; rename it"),
        ({"image_embedding": {"type": "string"}}, "output image_embedding is no vector (type float32, shape [size])"),
        ({"text_embedding": {"shape": ["any"]}}, "output text_embedding is no vector"),
        (
            {"embedding": VECTOR, "image_embedding": VECTOR},
            "outputs embedding and image_embedding are both the column image_embedding; rename one",
        ),
    ],
)
def test_an_output_that_is_a_column_already_is_refused_in_one_line_before_a_store_is_made(
    make_run, tmp_path, tiny_model, outputs, said
):
    source = samples.folder(tmp_path / "in", num_images=1)
    config = make_run(source, model=[{"uri": str(tiny_model)}, classifier(tmp_path) | {"outputs": outputs}])
    with pytest.raises(ConfigError) as refused:
        embed(config)
    assert said in str(refused.value)
    assert str(refused.value).startswith("servable shades (python, ") and "\n" not in str(refused.value)
    assert not (tmp_path / "store").exists()


def test_an_input_that_no_item_has_is_refused_in_one_line(make_run, tmp_path, tiny_model):
    section = classifier(tmp_path)
    section["inputs"]["image"]["of"] = "photo"
    config = make_run(tmp_path, model=[{"uri": str(tiny_model)}, section])
    with pytest.raises(ConfigError, match="input image: of = 'photo': a run's items have only an image and a caption"):
        open_models(config.model_sections, config.rows)
