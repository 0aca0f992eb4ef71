"""transformers' own fast tokenisers of text families, trained on a few captions; and checkpoints around them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

CAPTIONS = ["A red car", "two cats sleep on a sofa in the rain", "fruit", "Émile's café, 2 €"]
ODD_CAPTIONS = [*CAPTIONS, "", " Ünïcode  and   SPACES ", "🙂 smile", "红色的汽车", "tail\n\tof lines"]
NUM_TOKENS = 320
"""Vocabulary of the towers; the tokenisers' are smaller."""


def wordpiece() -> Any:
    """BERT's tokeniser: words in lower case and their pieces, between [CLS] and [SEP]."""
    from transformers import BertTokenizer

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        [*CAPTIONS, "红色的汽车"], trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    )
    return BertTokenizer(vocab=tokenizer.get_vocab())


def byte_level_bpe() -> Any:
    """RoBERTa's tokeniser: byte-level BPE that keeps case, between <s> and </s>."""
    from transformers import RobertaTokenizer

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CAPTIONS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    merges = [tuple(pair) for pair in _model(tokenizer)["merges"]]
    return RobertaTokenizer(vocab=tokenizer.get_vocab(), merges=merges)


def unigram() -> Any:
    """XLM-RoBERTa's tokeniser: SentencePiece's unigrams, between <s> and </s>."""
    from transformers import XLMRobertaTokenizer

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        CAPTIONS, trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    )
    pieces = [tuple(piece) for piece in _model(tokenizer)["vocab"]]
    return XLMRobertaTokenizer(vocab=[*pieces, ("<mask>", 0.0)])


def pieces_alone() -> Any:
    """TIPSv2's tokeniser: SentencePiece's BPE in lower case, bytes for unknown letters, no token at the ends."""
    from transformers import Tipsv2Tokenizer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(CAPTIONS, trainers.BpeTrainer(vocab_size=310, special_tokens=special))
    merges = [tuple(pair) for pair in _model(tokenizer)["merges"]]
    return Tipsv2Tokenizer(vocab=tokenizer.get_vocab(), merges=merges)


def pieces_without_end() -> Any:
    """VideoPrism's tokeniser: T5's unigrams without the token at the end; its 100 sentinels have no embeddings."""
    from transformers import VideoPrismTokenizer

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        CAPTIONS, trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    )
    pieces = [tuple(piece) for piece in _model(tokenizer)["vocab"]]
    return VideoPrismTokenizer(vocab=[*pieces, *((f"<extra_id_{number}>", 0.0) for number in reversed(range(100)))])


def _model(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return content


def save_checkpoint(folder: Path, model: torch.nn.Module, tokenizer: Any, size: int) -> None:
    """Save a model of two towers with its tokeniser, and an image processor for squares of this side."""
    from transformers import ViTImageProcessor

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ViTImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)


def image_features(model: Any, preprocess: Any) -> Any:
    """Make transformers' own image features of a state's pixels."""
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)

    def features(state: Any) -> torch.Tensor:
        pixels = ((state.values / 255 - mean) / std).permute(0, 3, 1, 2)
        found: torch.Tensor = model.get_image_features(pixels).pooler_output
        return found

    return features


def padded(state: Any, padding_id: int) -> dict[str, torch.Tensor]:
    """Give a state's captions as a class of transformers takes them."""
    lengths = state.lengths.tolist()
    ids = torch.nn.utils.rnn.pad_sequence(state.values.long().split(lengths), True, padding_id)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < state.lengths[:, None]).long()}
