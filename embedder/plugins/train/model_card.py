"""Model card of a trained model: what it is, what it was made from, and what was measured; its owner adds the rest."""

from collections.abc import Iterable
from importlib.metadata import version

from embedder.observability.run_tracking import parameters_of
from embedder.plugins.train.train_config import TrainConfig
from embedder.plugins.train.train_report import TrainReport
from embedder.quantities import plural
from embedder.storage.printable import printable
from shards.model_config import ModelConfig

_RECALLS = ("r_at_1", "r_at_5", "r_at_10")
FOR_ITS_OWNER = """## For its owner to write

- **Licence** of the weights, as those of the images, the captions and the base model allow.
- **Intended use**: what it is for, and what it must not be used for.
- **Limits**: whom and what the images show, and whom and what they lack.
"""


def model_card(report: TrainReport, config: TrainConfig, model: ModelConfig, num_parameters: int) -> str:
    """Write the card, in Markdown."""
    towers = ((side, str(tower.num_layers), type(tower).__name__) for side, tower in model.towers.items())
    made_with = ", ".join(f"{name} {version(name)}" for name in ("embedder", "torch", "timm", "transformers"))
    parts = (
        f"# {printable(model.name)}\n",
        f"Image and text towers with one space of {model.embedding_dim} dimensions, {num_parameters:,} parameters, "
        f"trained by `embedder train` with {made_with}.\n",
        _table(("tower", "layers", "kind"), towers),
        "## Data\n",
        f"{plural(report.num_items, 'item')} to learn from, {report.num_held_out:,} held out; of these, "
        f"{report.num_rejected:,} were broken, and {report.num_unpaired:,} lacked an image or a caption.\n",
        "## Training\n",
        f"{_beginning(report)} {plural(report.num_steps, 'step')}, {report.num_epochs:.1f} epochs, "
        f"{report.train_s / 60:,.1f} minutes on {report.device}.\n",
        _table(("key", "value"), parameters_of(config).items()),
        "## Figures\n",
        _figures(report),
        FOR_ITS_OWNER,
    )
    return "\n".join(parts)


def _beginning(report: "TrainReport") -> str:
    begun = "Trained from nothing" if report.base is None else f"Begun with `{printable(report.base)}`"
    taught = "" if report.teacher is None else ", by the vectors of a teacher"
    return f"{begun}{taught}, loss `{report.loss}`."


def _figures(report: "TrainReport") -> str:
    """Table of the best and the last measurement, both on held-out items."""
    found = {"best": report.best, "last": report.latest}
    rows = [
        (name, *(str(each[key]) if key == "step" else f"{each[key]:.3f}" for key in ("step", *_RECALLS)))
        for name, each in found.items()
        if each is not None
    ]
    if not rows:
        return "None: no item was held out.\n"
    text = "Of captions for their own images, of items that were held out:\n\n"
    return text + _table(("model", "step", "R@1", "R@5", "R@10"), rows)


def _table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [names, ("---",) * len(names), *rows]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in cells)


def _cell(text: str) -> str:
    return printable(text).replace("|", r"\|")
