"""Two workers with half a batch each learn what one worker learns from the whole batch."""

import multiprocessing
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from test_training_trainer import STEM, make_train_batch, settings
from torch.testing import assert_close

from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.group import ProcessGroup
from embedder.plugins.train.trainer.train_settings import AugmentSettings
from embedder.plugins.train.trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # each scenario trains twice; on Ray, test_train.py does the same

SIZE = 2
STEPS = 5
SCENARIOS = {
    "clip": {},
    "siglip": {"loss": "siglip", "patch_dropout": 0.3},
    "frozen": {"what": "vision_frozen"},
    "concepts": {"loss": "concepts", "num_concepts": 6},
}


def share_of(batch, start, stop):
    """Some images and their captions of a batch."""
    tokens = torch.split(batch.token_ids, batch.token_lengths.tolist())[start:stop]
    return TrainBatch(
        pixels=batch.pixels[start:stop],
        image_concepts=batch.image_concepts[start:stop],
        token_ids=torch.cat(tokens) if tokens else batch.token_ids[:0],
        token_lengths=batch.token_lengths[start:stop],
        caption_concepts=batch.caption_concepts[start:stop],
        image_keys=batch.image_keys[start:stop],
        epoch=batch.epoch,
        caption_positives=None if batch.caption_positives is None else batch.caption_positives[start:stop],
    )


def cut(batch, step):
    """Where the second worker's share begins: the middle, nothing for one of the two, somewhere."""
    return (len(batch.image_concepts) // 2, 0, len(batch.image_concepts), 3)[step % 4]


def train(trainer, num_steps, rank=None):
    """Metrics of each step; the first step's gradients, and the statistics of BatchNorm after it."""
    history, gradients, seen = [], {}, {}
    for step in range(num_steps):
        batch = make_train_batch(trainer.config, step)
        if trainer.settings.loss == "concepts":
            batch = replace(batch, caption_positives=(batch.caption_concepts[:, None] + torch.arange(6)) % 4 == 0)
        edge = cut(batch, step)
        share = batch if rank is None else share_of(batch, *((0, edge), (edge, len(batch.image_concepts)))[rank])
        metrics = trainer.step(share)
        history.append((metrics.loss, metrics.grad_norm, metrics.num_images, metrics.num_captions))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in trainer._named_parameters() if p.grad is not None}
            seen = {name: value.clone() for name, value in trainer.towers.state_dict().items() if "running_" in name}
    return history, gradients, seen


def worker(rank, folder, configs):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    found = {}
    for name, changes in SCENARIOS.items():
        trainer = Trainer(configs["plain"], settings(**changes), group=ProcessGroup())
        found[name] = (*train(trainer, STEPS, rank), trainer.weights())
    trainer = Trainer(configs["stem"], settings(augmentation=AugmentSettings()), group=ProcessGroup())
    found["stem"] = (*train(trainer, STEPS, rank), trainer.weights())
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def trained(make_config, tmp_path_factory):
    """Results of each of two workers, by scenario."""
    folder = tmp_path_factory.mktemp("group")
    configs = {"plain": make_config(), "stem": make_config(STEM)}
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=worker, args=(rank, str(folder), configs)) for rank in range(SIZE)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(100)
        process.kill()
    assert [process.exitcode for process in workers] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


def without_key_biases(tensors):
    """A key's bias moves all scores of a softmax alike: its gradient is rounding, which Adam scales up."""
    kept = {}
    for name, tensor in tensors.items():
        if name.endswith("attention.key.bias"):
            continue
        if name.endswith("attn.qkv.bias"):
            query, _, value = tensor.chunk(3)
            kept[name] = torch.cat([query, value])
        else:
            kept[name] = tensor
    return kept


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_workers_take_the_steps_of_one_with_the_whole_batch(make_config, trained, scenario):
    alone = Trainer(make_config(), settings(**SCENARIOS[scenario]))
    expected_history, expected_gradients, _ = train(alone, STEPS)
    for found in trained:
        history, gradients, _, weights = found[scenario]
        assert_close(history, expected_history, atol=1e-5, rtol=1e-4)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            assert_close(gradient, expected_gradients[name], atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        expected = without_key_biases(alone.weights())
        for name, tensor in without_key_biases(weights).items():
            assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("scenario", [*SCENARIOS, "stem"])
def test_all_workers_hold_the_same_weights_to_the_bit(trained, scenario):
    first, second = (found[scenario][-1] for found in trained)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_batch_norm_keeps_the_mean_of_what_the_workers_saw_each_in_its_own_share(make_config, trained):
    config = make_config(STEM)
    batch = make_train_batch(config, 0)
    half = len(batch.image_concepts) // 2
    alone = []
    for start in (0, half):
        trainer = Trainer(config, settings(augmentation=AugmentSettings()))
        trainer.step(share_of(batch, start, start + half))
        alone.append(trainer.towers.state_dict())
    for found in trained:
        seen = found["stem"][2]
        assert seen
        for name, value in seen.items():
            assert not torch.equal(alone[0][name], alone[1][name])
            assert_close(value, (alone[0][name] + alone[1][name]) / 2, msg=lambda m, n=name: f"{n}: {m}")
