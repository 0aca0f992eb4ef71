"""Trainer of a twin tower, one step per batch; no Ray, no media.

    trainer = Trainer("models/base", TrainSettings(num_steps=1000))
    for batch in batches:
        print(trainer.step(batch).loss)
    trainer.export("models/mine", name="mine")

All randomness depends only on the settings' seed, the epoch and the items' keys. So a state contains no generator, and
resumed training equals uninterrupted training.

Legend: `N` images, `M` captions, `D` width of a tower, `E` embedding size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embedder.plugins.train.trainer.batch import FeatureBatch, TrainBatch
from embedder.plugins.train.trainer.distillation import Distillation
from embedder.plugins.train.trainer.export import export_model, read_logit, write_delta
from embedder.plugins.train.trainer.forward import caption_features, image_features
from embedder.plugins.train.trainer.group import ProcessGroup, gather_batch
from embedder.plugins.train.trainer.objective import INITIAL_SIGLIP_BIAS, Objective
from embedder.plugins.train.trainer.train_settings import (
    DistillSettings,
    TrainSettings,
    ema_decay_at,
    has_decay,
    is_trainable,
    learning_rate_at,
)
from shards.fresh import INITIAL_LOGIT_SCALE, fresh_tensors
from shards.model_config import TOKENIZER_FILE, ModelConfig
from shards.model_errors import ModelError
from shards.reference import TwinTower, load_towers
from shards.tensor_shapes import BATCH_COUNTER, LOGIT_BIAS, LOGIT_SCALE

STATE_VERSION = 1
ENCODE_ROWS = 256
FEW_TOKENS = 128


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step.

    The loss is from before the step, `grad_norm` is the norm of all gradients together before clipping, `logit_scale`
    is the inverse temperature after the step. With a teacher, the run's own loss (`pair_loss`) and the losses of the
    teacher's vectors and similarities are given before their weights; None for a loss that the run lacks.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    logit_scale: float
    num_images: int
    num_captions: int
    pair_loss: float | None = None
    vector_loss: float | None = None
    similarity_loss: float | None = None

    def values(self) -> dict[str, float]:
        """Values by name, without those that the run lacks."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Trainer:
    """Twin towers in training, with an averaged copy; `device` is torch's.

    `model` is a model folder, or a configuration for fresh weights by the settings' seed. `tokenizer_json` is exported;
    by default that of the model folder. Workers of `group` have trainers of the same state, and their share of each
    batch. `teacher` has the settings of its losses and its size; None without a teacher. Raises `ModelError` if the
    folder is no model.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        settings: TrainSettings,
        *,
        device: str = "cpu",
        tokenizer_json: str | None = None,
        group: ProcessGroup | None = None,
        teacher: tuple[DistillSettings, int] | None = None,
    ) -> None:
        self.settings, self.device, self.num_steps_done = settings, torch.device(device), 0
        self.group = group
        self.base = None if isinstance(model, ModelConfig) else Path(model)
        self.towers = _fresh_towers(model, settings.seed) if isinstance(model, ModelConfig) else load_towers(model)
        self.config = self.towers.config
        self.config.check_trainable()
        self.tokenizer_json = tokenizer_json
        if tokenizer_json is None and self.base is not None and (self.base / TOKENIZER_FILE).is_file():
            self.tokenizer_json = (self.base / TOKENIZER_FILE).read_text(encoding="utf-8")
        self.objective = Objective(settings, self.config.embedding_dim)
        self.teacher = None
        if teacher is not None:
            self.teacher = Distillation(*teacher, self.config.embedding_dim, settings.seed).to(self.device)
        if self.base is not None:
            self.objective.logit_scale.data.fill_(read_logit(self.base, LOGIT_SCALE, INITIAL_LOGIT_SCALE))
            if self.objective.logit_bias is not None:
                self.objective.logit_bias.data.fill_(read_logit(self.base, LOGIT_BIAS, INITIAL_SIGLIP_BIAS))
        self.towers.to(self.device)
        self.objective.to(self.device)
        self._choose_trainable()
        self.averaged = deepcopy(self.towers).eval().requires_grad_(False)
        self._choose_attention()
        self._averages = self._pair_averages()  # state dicts are loaded into these very tensors
        self._optimizer = self._make_optimizer()

    def step(self, batch: TrainBatch | FeatureBatch) -> StepMetrics:
        """Train on a batch, or this worker's share; ModelError if it misfits, or loss or gradients are not finite."""
        rate = learning_rate_at(self.num_steps_done, self.settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        with _deterministic():
            images, captions = self._embed(batch)
            if self.group is not None:
                none = torch.zeros(0, self.config.embedding_dim, device=self.device)
                images, captions, batch = gather_batch(self.group, images, captions, batch, none)
            compare = partial(self.objective, images, captions, batch)
            loss, parts = (compare(), {}) if self.teacher is None else self.teacher(images, captions, batch, compare)
            if not torch.isfinite(loss):
                raise ModelError(f"step {self.num_steps_done + 1}: the loss is {loss.item()}; lower learning_rate")
            if loss.requires_grad:  # the teacher may lack all that this batch, or share of one, could learn from
                loss.backward()
        if self.group is not None:
            self._share_gradients(self.group)
        grad_norm = self._clip_gradients()
        self._optimizer.step()
        self.objective.clip_scale()
        self._average()
        self.num_steps_done += 1
        return StepMetrics(
            step=self.num_steps_done,
            loss=loss.item(),
            learning_rate=rate,
            grad_norm=grad_norm,
            logit_scale=self.objective.logit_scale.exp().item(),
            num_images=len(batch.image_concepts),
            num_captions=len(batch.caption_concepts),
            **{name: part.item() for name, part in parts.items()},
        )

    def tower_features(self, batch: TrainBatch) -> FeatureBatch:
        """Run frozen towers once, without augmentation, to train the projections; ModelError if they aren't frozen."""
        if self.settings.what != "projections":
            raise ModelError(f'what is "{self.settings.what}": features stay valid only with what = "projections"')
        with torch.no_grad(), self._compute_dtype():
            images = image_features(self.towers, batch.pixels).float()
            captions = caption_features(self.towers, batch.token_ids, batch.token_lengths).float()
        return FeatureBatch(images, batch.image_concepts, captions, batch.caption_concepts)

    @torch.inference_mode()
    def encode_images(self, pixels_NHHC: torch.Tensor) -> torch.Tensor:
        """Embed images, uint8 (N, H, H, 3), with the averaged weights, like the exported model; float32 (N, E), CPU."""
        parts = [torch.empty(0, self.config.embedding_dim)]
        for rows in torch.split(pixels_NHHC, ENCODE_ROWS):
            projected = self.averaged.vision_head(image_features(self.averaged, rows))
            parts.append(nn.functional.normalize(projected, dim=-1).cpu())
        return torch.cat(parts)

    @torch.inference_mode()
    def encode_captions(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embed packed captions, int32 ids and int64 lengths (M,), with the averaged weights; float32 (M, E), CPU."""
        parts = [torch.empty(0, self.config.embedding_dim)]
        for rows in torch.split(lengths, ENCODE_ROWS):
            ids, token_ids = token_ids[: int(rows.sum())], token_ids[int(rows.sum()) :]
            projected = self.averaged.text_head(caption_features(self.averaged, ids, rows))
            parts.append(nn.functional.normalize(projected, dim=-1).cpu())
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Any]:
        """State for resuming, as tensors and plain values; `save_checkpoint` writes it."""
        state = {
            "version": STATE_VERSION,
            "config": self.config.to_json(),
            "settings": self.settings.model_dump_json(),
            "num_steps_done": self.num_steps_done,
            "towers": self.towers.state_dict(),
            "averaged": self.averaged.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        if self.teacher is not None:
            state |= {"teacher": self.teacher.identity, "distillation": self.teacher.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; ModelError if the state is of another model or of other settings."""
        expected = {"config": self.config.to_json(), "settings": self.settings.model_dump_json()}
        teacher = None if self.teacher is None else self.teacher.identity
        for key, value in {"version": STATE_VERSION, **expected, "teacher": teacher}.items():
            if state.get(key) != value:
                raise ModelError(
                    f"the checkpoint's {key} isn't this run's; resume with the settings that it began with"
                )
        self.towers.load_state_dict(state["towers"])
        self.averaged.load_state_dict(state["averaged"])
        self.objective.load_state_dict(state["objective"])
        if self.teacher is not None:
            self.teacher.load_state_dict(state["distillation"])
        decays = [group["weight_decay"] for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state["optimizer"])
        for group, decay in zip(self._optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay  # of these settings, even where a script continues with others
        self.num_steps_done = state["num_steps_done"]

    def weights(self) -> dict[str, torch.Tensor]:
        """Averaged weights under the model folder's names, with temperature and SigLIP's bias; float32 on the CPU."""
        found = {
            name: tensor.detach().cpu()
            for name, tensor in self.averaged.state_dict().items()
            if not name.endswith(BATCH_COUNTER)
        }
        logits = {LOGIT_SCALE: self.objective.logit_scale, LOGIT_BIAS: self.objective.logit_bias}
        return found | {name: each.detach().cpu() for name, each in logits.items() if each is not None}

    def export(self, folder: str | Path, name: str, *, dtype: str = "float32", replace: bool = False) -> Path:
        """Write the averaged weights as a model folder that every command accepts; see `export_model`."""
        config = self.config.model_copy(update={"name": name, "trained": True})
        return export_model(Path(folder), config, self.weights(), self.tokenizer_json, dtype=dtype, replace=replace)

    def export_delta(self, folder: str | Path, name: str) -> Path:
        """Write only the layers that learned, as a small delta over the unchanged base; `apply_delta` combines both.

        Raises `ModelError` if training began with fresh weights, or the folder isn't empty.
        """
        if self.base is None:
            raise ModelError("a delta needs a base, and this training began with fresh weights; export the whole model")
        weights = self.weights()
        names = tuple(name for name in weights if is_trainable(name, self.config, self.settings))
        return write_delta(folder, self.base, weights, names, title=name)

    def _embed(self, batch: TrainBatch | FeatureBatch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Unit embeddings of both sides in float32; None for a side that the batch lacks."""
        images = captions = None
        if len(batch.image_concepts):
            images = nn.functional.normalize(self.towers.vision_head(self._image_features(batch)).float(), dim=-1)
        if len(batch.caption_concepts):
            captions = nn.functional.normalize(self.towers.text_head(self._caption_features(batch)).float(), dim=-1)
        return images, captions

    def _image_features(self, batch: TrainBatch | FeatureBatch) -> torch.Tensor:
        if isinstance(batch, FeatureBatch):
            return batch.image_features.to(self.device)
        with torch.set_grad_enabled(self._learns("vision.")), self._compute_dtype():
            return image_features(self.towers, batch.pixels, batch, self.settings).float()

    def _caption_features(self, batch: TrainBatch | FeatureBatch) -> torch.Tensor:
        if isinstance(batch, FeatureBatch):
            return batch.caption_features.to(self.device)
        with torch.set_grad_enabled(self._learns("text.")), self._compute_dtype():
            return caption_features(self.towers, batch.token_ids, batch.token_lengths).float()

    def _clip_gradients(self) -> float:
        """Clip the gradients and return their norm before; ModelError if it isn't finite, before a weight takes it."""
        norm = float(nn.utils.clip_grad_norm_(self._trained_parameters(), self.settings.grad_clip or float("inf")))
        if not isfinite(norm):  # the loss may be finite all the same
            raise ModelError(
                f"step {self.num_steps_done + 1}: the norm of the gradients is {norm}; lower learning_rate"
            )
        return norm

    def _share_gradients(self, group: ProcessGroup) -> None:
        """Sum the workers' gradients; those of the loss's own parameters are complete on each, so only one counts."""
        if group.rank > 0:
            for _, parameter in self._loss_parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        statistics = [each for each in self.towers.vision.patch_embed.buffers() if each.is_floating_point()]
        group.sum_gradients(self._trained_parameters(), statistics if self._learns("vision.patch_embed.") else ())

    def _compute_dtype(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16")

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.towers.named_parameters()
        yield from self._loss_parameters()

    def _loss_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.objective.named_parameters()
        if self.teacher is not None:
            yield from self.teacher.named_parameters()

    def _choose_trainable(self) -> None:
        """Freeze the other parameters; a frozen BatchNorm doesn't update its statistics either."""
        for name, parameter in self._named_parameters():
            parameter.requires_grad_(is_trainable(name, self.config, self.settings))
        self.towers.eval()
        if self._learns("vision.patch_embed."):
            self.towers.vision.patch_embed.train()

    def _choose_attention(self) -> None:
        """Turn off fused attention on CPUs: with few tokens, its backward pass takes a third of a step."""
        if self.device.type != "cpu":
            return
        vision, text = self.config.required_vision, self.config.required_text
        if text.max_tokens <= FEW_TOKENS:
            text.use_plain_attention(self.towers.text)
        if vision.num_tokens <= FEW_TOKENS:
            vision.use_plain_attention(self.towers.vision)

    def _learns(self, prefix: str) -> bool:
        return any(parameter.requires_grad for name, parameter in self._named_parameters() if name.startswith(prefix))

    def _trained_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named_parameters() if parameter.requires_grad]

    def _make_optimizer(self) -> torch.optim.AdamW:
        learning = [(name, parameter) for name, parameter in self._named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [each for name, each in learning if has_decay(name, each.ndim) == decays], "weight_decay": decay}
            for decays, decay in ((True, self.settings.weight_decay), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, self.settings.beta2))

    def _pair_averages(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Averaged and current tensors of all parameters that learn, and of BatchNorm's statistics."""
        present, means = self.towers.state_dict(), self.averaged.state_dict()
        parameters = dict(self.towers.named_parameters())
        names = [
            name
            for name in means
            if (parameters[name].requires_grad if name in parameters else means[name].is_floating_point())
        ]
        return [means[name] for name in names], [present[name] for name in names]

    @torch.no_grad()
    def _average(self) -> None:
        """Move the averaged weights and BatchNorm statistics towards the current ones."""
        average: Any = get_ema_multi_avg_fn(ema_decay_at(self.num_steps_done, self.settings))  # type: ignore[no-untyped-call]
        average(*self._averages, self.num_steps_done)


def _fresh_towers(config: ModelConfig, seed: int) -> TwinTower:
    towers = TwinTower(config)
    fresh = {name: tensor for name, tensor in fresh_tensors(config, seed) if name != LOGIT_SCALE}
    towers.load_state_dict(fresh, strict=True)
    return towers


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use torch's deterministic kernels where it has them."""
    memory: Any = torch.utils.deterministic
    was_on, was_filling = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # costs 5 % of a step, and nothing reads such memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
        memory.fill_uninitialized_memory = was_filling
