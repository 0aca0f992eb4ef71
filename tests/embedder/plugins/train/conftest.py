"""Seeded tiny twin towers, and batches for them."""

from tower_fixtures import _one_thread, make_batch, make_config, make_model, tokenizer_json

__all__ = ["_one_thread", "make_batch", "make_config", "make_model", "tokenizer_json"]
