"""Training step: reproducible, resumable to the bit, and frozen parts stay unchanged."""

import errno
import itertools
import os
import resource
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from embedder.errors import RunFailedError
from embedder.plugins.train.train_outputs import Outputs
from embedder.plugins.train.trainer import export
from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.train_checkpoint import load_checkpoint, save_checkpoint
from embedder.plugins.train.trainer.train_settings import AugmentSettings, TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import retrieval_at
from shards.activations import Batch, TowerState
from shards.delta import apply_delta
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model

AUGMENTATION = AugmentSettings(rotate_deg=10, translate=0.1, brightness=0.2, erase=0.3)
STEM = {"stem": "conv", "class_token": False, "pool": "avg"}


def settings(**changes):
    return TrainSettings(**({"warmup_steps": 2, "num_steps": 20, "seed": 5, "augmentation": AUGMENTATION} | changes))


def make_train_batch(config, number=0, num_concepts=6):
    """Two images and two captions of each concept; concepts have colours and words of their own."""
    generator = torch.Generator().manual_seed(number)
    concepts = torch.arange(num_concepts).repeat(2)
    side = config.vision.image_size
    colours = torch.randint(0, 200, (num_concepts, 1, 1, 3), generator=torch.Generator().manual_seed(99))
    noise = torch.randint(0, 56, (len(concepts), side, side, 3), generator=generator)
    lengths = torch.randint(3, 7, (len(concepts),), generator=generator)
    ids = [torch.tensor([2, *([10 + 3 * c] * (n - 2)), 3]) for c, n in zip(concepts.tolist(), lengths, strict=True)]
    return TrainBatch(
        pixels=(colours[concepts] + noise).to(torch.uint8),
        image_concepts=concepts,
        token_ids=torch.cat(ids).to(torch.int32),
        token_lengths=lengths,
        caption_concepts=concepts,
        image_keys=concepts * 100 + number,
        epoch=number,
    )


def run(trainer, start, stop):
    return [trainer.step(make_train_batch(trainer.config, number)).loss for number in range(start, stop)]


def assert_same_weights(one, other):
    found, expected = one.weights(), other.weights()
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.medium
@pytest.mark.parametrize("changes", [{}, {"loss": "siglip"}, {"dtype": "bfloat16", "patch_dropout": 0.3}])
def test_one_seed_gives_the_same_weights_twice_and_another_seed_others(make_config, changes):
    config = make_config(STEM)
    first, second, other = (Trainer(config, settings(**changes, seed=seed)) for seed in (5, 5, 6))
    assert run(first, 0, 4) == run(second, 0, 4)
    assert_same_weights(first, second)
    run(other, 0, 4)
    assert not torch.equal(first.weights()["vision.pos_embed"], other.weights()["vision.pos_embed"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_reach_no_weight_though_the_loss_is(make_config, value):
    trainer, same = (Trainer(make_config(), settings()) for _ in range(2))
    run(trainer, 0, 1)
    run(same, 0, 1)
    parameter = next(parameter for _, parameter in trainer._named_parameters())
    hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
    with pytest.raises(ModelError, match=r"step 2: the norm of the gradients is (nan|inf); lower learning_rate"):
        run(trainer, 1, 2)
    assert_same_weights(trainer, same)
    hook.remove()
    assert run(trainer, 1, 2) == run(same, 1, 2), "nor the state of the optimizer"


@pytest.mark.medium
@pytest.mark.parametrize("vision", [{}, STEM])
def test_resumed_training_equals_uninterrupted_training_to_the_bit(make_config, make_model, tmp_path, vision):
    folder = make_model(make_config(vision))
    whole, first, second = (Trainer(folder, settings()) for _ in range(3))
    expected = run(whole, 0, 8)
    found = run(first, 0, 3)
    save_checkpoint(tmp_path / "run" / "last.pt", first.state_dict())
    run(first, 3, 5)  # lost with the process
    second.load_state_dict(load_checkpoint(tmp_path / "run" / "last.pt"))
    assert second.num_steps_done == 3
    assert found + run(second, 3, 8) == expected
    assert_same_weights(second, whole)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["last.pt"]


def test_a_checkpoint_of_other_settings_or_a_broken_one_is_refused(make_config, make_model, tmp_path):
    folder = make_model(make_config())
    path = tmp_path / "last.pt"
    save_checkpoint(path, Trainer(folder, settings()).state_dict())
    with pytest.raises(ModelError, match="checkpoint's settings isn't this run's"):
        Trainer(folder, settings(learning_rate=0.5)).load_state_dict(load_checkpoint(path))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="no whole checkpoint"):
        load_checkpoint(path)
    with pytest.raises(ModelError, match="there is no such file"):
        load_checkpoint(tmp_path / "none.pt")


def test_a_crash_while_saving_leaves_the_last_checkpoint(make_config, tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1})
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_in_a_line_with_its_cure(tmp_path):
    """Torch's own error names positions in a file, and hides that of the system."""
    outputs = Outputs(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        message = r"can't be written \(File too large\); free some space.*--resume"
        with pytest.raises(RunFailedError, match=message), outputs.lock():
            save_checkpoint(outputs.checkpoint, {"weights": torch.zeros(1 << 12)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_a_killed_run_left_half_written_is_removed_by_the_next_and_nothing_else(tmp_path):
    left = ".checkpoint.pt.12-ab34cd56.tmp", ".metrics.jsonl.12-ab34cd56.tmp", ".last.12.tmp", "..model.12.new.12.tmp"
    kept = ".model.12.old", "model", ".cache.12.tmp", "last.12.tmp"
    for name in (*left[:2], *kept[2:]):
        (tmp_path / name).touch()
    for name in (*left[2:], *kept[:2]):
        (tmp_path / name / "part").mkdir(parents=True)
    with Outputs(tmp_path).lock():
        assert {path.name for path in tmp_path.iterdir()} == {*kept, ".lock"}


LEARNING = {
    "all": ("vision.", "text.", "vision_head.", "text_head."),
    "vision_frozen": ("text.", "text_head."),
    "text_frozen": ("vision.", "vision_head."),
    "projections": ("vision_head.projection", "text_head.projection"),
}


@pytest.mark.parametrize("what", LEARNING)
@pytest.mark.parametrize("vision", [{}, STEM])
def test_what_is_frozen_stays_as_it_was_to_the_bit_and_the_rest_learns(make_config, make_model, what, vision):
    folder = make_model(make_config(vision))
    before = load_file(folder / "model.safetensors")
    trainer = Trainer(folder, settings(what=what, learning_rate=0.01))
    run(trainer, 0, 3)
    for name, tensor in trainer.weights().items():
        if name in before:
            is_same = torch.equal(tensor, before[name])
            # What has no gradient by its nature: a key's bias moves all scores alike, unused words, types, positions.
            if not name.startswith(LEARNING[what]):
                assert is_same, name
            elif name.endswith(("projection.weight", "norm1.weight", "ffn.weight", "running_mean", "conv.weight")):
                assert not is_same, name


def test_averaged_weights_are_the_running_mean_of_the_steps(make_config, make_model):
    trainer = Trainer(make_model(make_config()), settings(ema_decay=0.5))
    name = "vision_head.projection.weight"
    expected = trainer.weights()[name].clone()
    for step in range(4):
        trainer.step(make_train_batch(trainer.config, step))
        decay = min(0.5, (1 + step) / (10 + step))
        expected = expected * decay + trainer.towers.state_dict()[name] * (1 - decay)
    assert_close(trainer.weights()[name], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_training_teaches_concepts_and_the_export_finds_them(make_config, tokenizer_json, tmp_path, loss):
    config = make_config(STEM)
    trainer = Trainer(
        config, settings(loss=loss, num_steps=60, learning_rate=3e-3, ema_decay=0.5), tokenizer_json=tokenizer_json
    )
    losses = run(trainer, 0, 60)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    batch = make_train_batch(config, 1000)
    images = trainer.encode_images(batch.pixels)
    captions = trainer.encode_captions(batch.token_ids, batch.token_lengths)
    concepts = batch.image_concepts.numpy()
    assert retrieval_at(captions.numpy(), concepts, images.numpy(), concepts)[1] >= 0.8

    folder = trainer.export(tmp_path / "model", "mine")
    shard = load_shard(folder, whole_model(config))
    ones = torch.ones(len(concepts), dtype=torch.int64)
    found = shard(Batch(TowerState(batch.pixels, ones), TowerState(batch.token_ids, batch.token_lengths)))
    assert_close(found.vision.values, images, atol=1e-5, rtol=0)
    assert_close(found.text.values, captions, atol=1e-5, rtol=0)
    assert shard.config.trained
    assert shard.config.name == "mine"
    assert (folder / "tokenizer.json").read_text() == tokenizer_json


def test_an_export_in_float16_is_half_as_large_and_points_the_same_way(make_config, make_model, tmp_path):
    trainer = Trainer(make_model(make_config(STEM)), settings())
    run(trainer, 0, 2)
    full, half = trainer.export(tmp_path / "full", "a"), trainer.export(tmp_path / "half", "a", dtype="float16")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (full, half)]
    assert sizes[1] < 0.6 * sizes[0]
    pixels = make_train_batch(trainer.config).pixels
    images = TowerState(pixels, torch.ones(len(pixels), dtype=torch.int64))
    with torch.no_grad():
        one, other = (load_towers(folder).project("vision", images) for folder in (full, half))
    assert torch.cosine_similarity(one, other).min() > 0.9999


def test_the_best_model_so_far_gives_way_to_a_better_one_but_other_folders_do_not(make_config, make_model, tmp_path):
    trainer = Trainer(make_model(make_config()), settings())
    trainer.export(tmp_path / "best", "first", replace=True)
    trainer.export(tmp_path / "best", "second", replace=True)
    assert load_towers(tmp_path / "best").config.name == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    with pytest.raises(ModelError, match="there is something already"):
        trainer.export(tmp_path / "best", "third")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(ModelError, match="there is something already"):
        trainer.export(tmp_path / "photos", "fourth", replace=True)
    assert (tmp_path / "photos" / "a.jpg").read_bytes() == b"x"


def test_a_model_is_replaced_where_a_killed_process_of_the_same_id_left_an_old_one(make_config, make_model, tmp_path):
    trainer = Trainer(make_model(make_config()), settings())
    trainer.export(tmp_path / "best", "first", replace=True)
    left = tmp_path / f".best.{os.getpid()}.old"
    left.mkdir()
    (left / "model.safetensors").touch()
    trainer.export(tmp_path / "best", "second", replace=True)
    assert load_towers(tmp_path / "best").config.name == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_process_killed_at_any_rename_leaves_the_old_model_or_the_new_one(
    make_config, make_model, tmp_path, monkeypatch
):
    trainer, best, rename = Trainer(make_model(make_config()), settings()), tmp_path / "best", Path.rename
    trainer.export(best, "first", replace=True)
    for number in range(4):
        left = iter(range(number))

        def dying(path, target, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return rename(path, target)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "rename", dying)
            trainer.export(best, f"second {number}", replace=True)
        assert load_towers(best).config.name in ("first", *(f"second {each}" for each in range(number + 1)))
    assert load_towers(best).config.name == "second 3"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_model_is_replaced_where_the_file_system_exchanges_no_names(make_config, make_model, tmp_path, monkeypatch):
    def refuse(flag, source, target):
        raise OSError(errno.EINVAL, "as NFS does")

    trainer = Trainer(make_model(make_config()), settings())
    monkeypatch.setattr(export, "rename_with", refuse)
    for name in ("first", "second"):
        trainer.export(tmp_path / "best", name, replace=True)
        assert load_towers(tmp_path / "best").config.name == name
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_delta_holds_the_named_layers_and_nothing_else_and_leaves_its_base(make_config, make_model, tmp_path):
    config = make_config(text={"num_hidden_groups": 2})
    base = make_model(config)
    before = (base / "model.safetensors").read_bytes()
    ranges = {"vision_layers": LayerRange(1, 3), "text_layers": LayerRange(2, 4)}
    trainer = Trainer(base, settings(what="layers", learning_rate=0.01, **ranges))
    run(trainer, 0, 3)
    delta = trainer.export_delta(tmp_path / "delta", "mine")
    changed = load_file(delta / "model.safetensors")
    prefixes = ("vision.blocks.1.", "vision.blocks.2.", "text.encoder.albert_layer_groups.1.", "logit_scale")
    assert all(name.startswith(prefixes) for name in changed)
    assert {next(prefix for prefix in prefixes if name.startswith(prefix)) for name in changed} == set(prefixes)
    assert (delta / "model.safetensors").stat().st_size < 0.6 * len(before)

    together = apply_delta(base, delta, tmp_path / "together")
    assert (base / "model.safetensors").read_bytes() == before
    found, original = (load_file(folder / "model.safetensors") for folder in (together, base))
    trained = trainer.weights()
    for name, tensor in original.items():
        assert torch.equal(found[name], trained[name] if name in changed else tensor), name
    batch = make_train_batch(config)
    with torch.no_grad():
        images = TowerState(batch.pixels, torch.ones(len(batch.pixels), dtype=torch.int64))
        projected = load_towers(together).project("vision", images)
    expected = trainer.encode_images(batch.pixels)
    assert_close(torch.nn.functional.normalize(projected, dim=-1), expected, atol=1e-5, rtol=0)


def test_a_delta_over_another_base_is_refused(make_config, make_model, tmp_path):
    config = make_config()
    trainer = Trainer(make_model(config), settings(what="layers", vision_layers=LayerRange(0, 1)))
    delta = trainer.export_delta(tmp_path / "delta", "mine")
    with pytest.raises(ModelError, match="name the right base"):
        apply_delta(make_model(config, seed=1), delta, tmp_path / "together")
    assert not (tmp_path / "together").exists()
    with pytest.raises(ModelError, match="a delta needs a base"):
        Trainer(config, settings()).export_delta(tmp_path / "other", "mine")


@pytest.mark.medium
def test_projections_alone_lift_frozen_towers_well_above_chance_by_a_tenth_of_the_work(make_config, make_model):
    # As large as it takes for the towers to cost what towers cost.
    config = make_config({"width": 96, "num_heads": 3}, {"hidden_size": 96, "num_attention_heads": 3})
    folder = make_model(config)
    batches = [make_train_batch(config, number, num_concepts=16) for number in range(6)]
    whole = Trainer(folder, settings(num_steps=300))
    with FlopCounterMode(display=False) as of_whole_model:
        for batch in batches:
            whole.step(batch)

    trainer = Trainer(folder, settings(what="projections", num_steps=300, learning_rate=3e-3, ema_decay=0.9))
    test = make_train_batch(config, 1000, num_concepts=16)

    def recall():
        images = trainer.encode_images(test.pixels).numpy()
        captions = trainer.encode_captions(test.token_ids, test.token_lengths).numpy()
        return retrieval_at(captions, test.caption_concepts.numpy(), images, test.image_concepts.numpy())[1]

    untrained = recall()
    features = [trainer.tower_features(batch) for batch in batches]
    with FlopCounterMode(display=False) as of_projections:
        for batch in features:
            trainer.step(batch)
    for batch in features * 49:
        trainer.step(batch)
    assert untrained < 0.3
    assert recall() > 0.6
    assert 0 < of_projections.get_total_flops() * 10 < of_whole_model.get_total_flops()


@pytest.mark.medium
def test_prototypes_are_learned_from_images_alone_and_captions_fit_given_ones(make_config):
    config = make_config(STEM)
    shared = {"loss": "concepts", "num_concepts": 6, "num_steps": 80, "learning_rate": 3e-3}
    images = Trainer(config, settings(what="text_frozen", **shared))
    none = torch.empty(0, dtype=torch.int64)
    for number in range(40):
        batch = make_train_batch(config, number)
        images.step(TrainBatch(batch.pixels, batch.image_concepts, none.int(), none, none, batch.image_keys, number))
    batch = make_train_batch(config, 1000)
    prototypes = torch.nn.functional.normalize(images.objective.prototypes.detach(), dim=-1)
    assert (images.encode_images(batch.pixels) @ prototypes.T).argmax(1).eq(batch.image_concepts).float().mean() > 0.8

    texts = Trainer(config, settings(what="vision_frozen", train_prototypes=False, **shared))
    texts.objective.set_prototypes(prototypes)
    for number in range(40):
        batch = make_train_batch(config, number)
        texts.step(TrainBatch(batch.pixels[:0], none, batch.token_ids, batch.token_lengths, batch.caption_concepts))
    assert torch.equal(texts.objective.prototypes, prototypes)
    captions = texts.encode_captions(batch.token_ids, batch.token_lengths)
    assert (captions @ prototypes.T).argmax(1).eq(batch.caption_concepts).float().mean() > 0.8


def test_batches_that_do_not_fit_are_refused_in_one_line(make_config, make_model):
    config = make_config()
    trainer = Trainer(make_model(config), settings())
    batch = make_train_batch(config)
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ModelError, match="a batch without captions"):
        trainer.step(TrainBatch(batch.pixels, batch.image_concepts, none.int(), none, none))
    with pytest.raises(ModelError, match="features stay valid only"):
        trainer.tower_features(batch)
    with pytest.raises(ModelError, match="pixels: found"):
        trainer.step(TrainBatch(batch.pixels[:, :16], *itertools.islice(vars(batch).values(), 1, 5)))
    trainer.towers.vision_head.projection.weight.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="step 1: the loss is nan; lower learning_rate"):
        trainer.step(batch)
