"""Learning from a teacher's vectors: the losses against NumPy, another width, resumption; and pruning of layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from test_training_trainer import STEM, assert_same_weights, make_train_batch, settings
from tower_checks import make_batch, vectors
from tower_families import FAMILIES, beside_default, captions_for, save_random_model

from embedder.plugins.train.trainer.distillation import row_divergence, similarity_losses, vector_loss
from embedder.plugins.train.trainer.prune import prune_model
from embedder.plugins.train.trainer.train_checkpoint import load_checkpoint, save_checkpoint
from embedder.plugins.train.trainer.train_settings import AugmentSettings, DistillSettings, chosen_layers, is_trainable
from embedder.plugins.train.trainer.trainer import Trainer
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.reference import load_towers
from shards.towers.registry import ONE_TOWERS
from shards.towers.videoprism import VideoPrismTower
from shards.towers.whole_timm import WholeTimmTower

ALONE = DistillSettings(pairs=0)


def unit(rows, columns, seed):
    """Random unit rows."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def softmax(rows):
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def divergence(ours, theirs):
    """Kullback-Leibler divergence of rows from the teacher's, by hand."""
    ours, theirs = softmax(ours), softmax(theirs)
    return float((theirs * np.log(theirs / ours)).sum(1).mean())


def test_losses_have_the_values_of_numpy():
    ours, theirs = (unit(4, 3, 1), unit(5, 3, 2)), (unit(4, 6, 3), unit(5, 6, 4))
    same = unit(4, 3, 5)
    expected = (1 - (ours[0] * same).sum(1)).mean()
    assert vector_loss(torch.from_numpy(ours[0]), torch.from_numpy(same)).item() == pytest.approx(expected, rel=1e-5)
    expected = []
    for place in range(2):
        for other in range(2):
            matrices = [side[place] @ side[other].T / 0.1 for side in (ours, theirs)]
            if place == other:
                size = len(matrices[0])
                matrices = [each[~np.eye(size, dtype=bool)].reshape(size, size - 1) for each in matrices]
            expected.append(divergence(*matrices))
    sides = [tuple(map(torch.from_numpy, pair)) for pair in zip(ours, theirs, strict=True)]
    assert [loss.item() for loss in similarity_losses(sides, 0.1)] == pytest.approx(expected, rel=1e-4)
    rows = torch.from_numpy(ours[0])
    assert row_divergence(rows, rows).item() == pytest.approx(0, abs=1e-7)


def taught(config, number, teacher, known=None):
    """A batch with the vectors that another model has of it; of the rows beyond `known` it has none."""
    batch = make_train_batch(config, number)
    images = teacher.encode_images(batch.pixels).clone()  # outside of inference mode it may be changed
    captions = teacher.encode_captions(batch.token_ids, batch.token_lengths).clone()
    for rows in (images, captions):
        rows[len(rows) if known is None else known :] = float("nan")
    return replace(batch, teacher_images=images, teacher_captions=captions)


@pytest.fixture(scope="module")
def teacher(make_config, make_model):
    """Towers of random weights, of another width than those of the students."""
    return Trainer(make_model(make_config(embedding_dim=40), seed=4), settings())


def test_parts_are_told_and_their_weighted_sum_is_the_loss(make_config, teacher):
    weights = DistillSettings(vectors=0.5, similarities=2, pairs=0.25)
    trainer = Trainer(make_config(), settings(), teacher=(weights, 40))
    found = trainer.step(taught(trainer.config, 0, teacher))
    assert found.loss == pytest.approx(
        0.5 * found.vector_loss + 2 * found.similarity_loss + 0.25 * found.pair_loss, rel=1e-5
    )
    alone = Trainer(make_config(), settings(), teacher=(DistillSettings(similarities=0, pairs=0), 40))
    found = alone.step(taught(alone.config, 0, teacher))
    assert set(found.values()) & {"vector_loss", "similarity_loss", "pair_loss"} == {"vector_loss"}
    assert "vector_loss" not in Trainer(make_config(), settings()).step(make_train_batch(alone.config)).values()


def test_rows_that_the_teacher_lacks_do_not_count(make_config, teacher):
    config, few = make_config(), 3
    losses = []
    for known in (few, few):
        trainer = Trainer(config, settings(augmentation=AugmentSettings()), teacher=(ALONE, 40))
        batch = taught(config, 0, teacher, known)
        if losses:
            batch = replace(batch, pixels=torch.cat([batch.pixels[:few], 255 - batch.pixels[few:]]))
        losses.append(trainer.step(batch).loss)
    assert losses[0] == losses[1]
    nothing = Trainer(config, settings(), teacher=(ALONE, 40))
    assert nothing.step(taught(config, 0, teacher, 0)).loss == 0


def test_a_batch_whose_learning_side_the_teacher_lacks_teaches_nothing(make_config, teacher):
    """As one with only further captions, of which the teacher knows none."""
    config = make_config(embedding_dim=40)
    trainer = Trainer(config, settings(what="vision_frozen"), teacher=(ALONE, 40))
    batch = taught(config, 0, teacher)
    step = trainer.step(replace(batch, teacher_captions=torch.full_like(batch.teacher_captions, torch.nan)))
    assert (step.grad_norm, step.step) == (0, 1)
    assert_same_weights(trainer, Trainer(config, settings()))
    assert trainer.step(batch).grad_norm > 0


@pytest.mark.medium
def test_a_student_comes_closer_to_its_teacher_than_without_and_the_map_is_not_exported(make_config, teacher, tmp_path):
    found = {}
    for name in ("with", "without"):
        of_teacher = (ALONE, 40) if name == "with" else None
        trainer = Trainer(make_config({"depth": 2}), settings(learning_rate=3e-3), teacher=of_teacher)
        for number in range(20):
            trainer.step(taught(trainer.config, number, teacher))
        batch = taught(trainer.config, 50, teacher)
        images = trainer.encode_images(batch.pixels)
        captions = trainer.encode_captions(batch.token_ids, batch.token_lengths)
        sides = [(images, batch.teacher_images), (captions, batch.teacher_captions)]
        found[name] = float(torch.stack(similarity_losses(sides, ALONE.temperature)).mean())
        if name == "with":
            folder = trainer.export(tmp_path / "student", "student")
            assert not [each for each in load_file(folder / "model.safetensors") if "teacher" in each]
            assert load_model_config(folder).embedding_dim == 24
    assert found["with"] < 0.5 * found["without"]


@pytest.mark.medium
def test_resumed_it_equals_an_uninterrupted_run_and_another_teacher_is_refused(make_config, teacher, tmp_path):
    config = make_config(STEM)
    whole, first, second = (Trainer(config, settings(), teacher=(DistillSettings(), 40)) for _ in range(3))
    for number in range(5):
        whole.step(taught(config, number, teacher))
    for number in range(2):
        first.step(taught(config, number, teacher))
    save_checkpoint(tmp_path / "last.pt", first.state_dict())
    state = load_checkpoint(tmp_path / "last.pt")
    second.load_state_dict(state)
    for number in range(2, 5):
        second.step(taught(config, number, teacher))
    assert_same_weights(second, whole)
    assert torch.equal(second.teacher.teacher_map, whole.teacher.teacher_map)
    for other in (None, (DistillSettings(), 24), (DistillSettings(vectors=2), 40)):
        with pytest.raises(ModelError, match="checkpoint's teacher isn't this run's"):
            Trainer(config, settings(), teacher=other).load_state_dict(state)


def test_without_any_weight_nothing_could_be_learnt():
    with pytest.raises(ValidationError, match="nothing is learnt from the teacher"):
        DistillSettings(vectors=0, similarities=0)
    assert is_trainable("teacher_map", None, settings(what="text_frozen"))


@pytest.mark.parametrize(
    ("choice", "layers"),
    [("all", [0, 1, 2, 3, 4]), ("every 2nd", [0, 2, 4]), ("every 3rd", [0, 3]), ("first 2", [0, 1]), ((1, 4), [1, 4])],
)
def test_layers_are_chosen_by_words_or_numbers(choice, layers):
    assert chosen_layers(choice, 5) == layers


@pytest.mark.parametrize(
    "choice", ["every second", "every 0th", "first 0", "first 6", "last 2", (), (2, 1), (-1, 2), (0, 5)]
)
def test_a_choice_that_means_nothing_is_refused(choice):
    with pytest.raises(ValueError, match=r'write "all", "every 2nd"'):
        chosen_layers(choice, 5)


CUT_APART = [family for family in FAMILIES if family.model_fields["family"].default not in ONE_TOWERS]


# Of VideoPrism some layers of each kind stay (`tests/shards/towers/test_videoprism.py`); a whole model is one layer.
ANY_LAYER = [family for family in CUT_APART if family not in (VideoPrismTower, WholeTimmTower)]


@pytest.fixture(params=ANY_LAYER, ids=lambda family: family.model_fields["family"].default)
def large(request, tmp_path):
    """A model folder of three layers with a tower of the family, every weight of which matters."""
    return save_random_model(beside_default(request.param).model_copy(update={"trained": True}), tmp_path / "large")


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in CUT_APART])
def test_layers_of_both_towers_are_not_left_out(family, tmp_path):
    whole = save_random_model(beside_default(family), tmp_path / "whole")
    with pytest.raises(ModelError, match="share its layers"):
        prune_model(whole, tmp_path / "small", {"vision": "every 2nd", "text": "every 2nd"})


def test_a_pruned_model_has_the_chosen_layers_to_the_bit_and_runs(large, tmp_path):
    folder = prune_model(large, tmp_path / "small", {"vision": "every 2nd", "text": "every 2nd"})
    before, config = load_model_config(large), load_model_config(folder)
    assert config.num_layers == {"vision": 2, "text": 2}
    theirs, ours = load_file(large / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, tensor in ours.items():
        side, _, inner = name.partition(".")
        tower, origin = config.towers.get(side), name
        for place, layer in ((1, 2), (0, 0)):
            if tower is None or not inner.startswith(tower.prefix_of(tower.weights_of(place))):
                continue
            rest = inner.removeprefix(tower.prefix_of(tower.weights_of(place)))
            large_tower = before.towers[side]
            origin = f"{side}.{large_tower.prefix_of(large_tower.weights_of(layer))}{rest}"
            break
        assert torch.equal(tensor, theirs[origin]), name
    found = vectors(load_towers(folder)(make_batch(config, captions_for(config))))
    assert {side: rows.shape[1] for side, rows in found.items()} == {"vision": 24, "text": 24}
    assert all(rows.isfinite().all() for rows in found.values())


def test_sets_of_weights_that_layers_share_follow_the_layers(make_config, make_model, tmp_path):
    folder = make_model(make_config(text={"num_hidden_groups": 2}))
    small = prune_model(folder, tmp_path / "small", {"vision": (0, 3), "text": (2,)})
    config = load_model_config(small)
    assert (config.text.num_hidden_layers, config.text.num_hidden_groups, config.vision.depth) == (1, 1, 2)
    theirs, ours = load_file(folder / "model.safetensors"), load_file(small / "model.safetensors")
    name = "text.encoder.albert_layer_groups.{}.albert_layers.0.ffn.weight"
    assert torch.equal(ours[name.format(0)], theirs[name.format(1)])
    assert torch.equal(ours["vision.blocks.1.mlp.fc1.weight"], theirs["vision.blocks.3.mlp.fc1.weight"])


def test_a_choice_beyond_the_layers_names_the_tower_and_leaves_nothing(make_model, tmp_path):
    with pytest.raises(ModelError, match=r"text tower: layers .* there are 4"):
        prune_model(make_model(), tmp_path / "small", {"vision": "all", "text": (0, 4)})
    assert not (tmp_path / "small").exists()
