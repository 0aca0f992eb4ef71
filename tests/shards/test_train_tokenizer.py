"""The tokeniser trainer: the same bytes in every process, within its vocabulary, with ALBERT's special tokens."""

import json
import subprocess
import sys

import samples
from tokenizers import Tokenizer

from shards.train_tokenizer import SPECIAL_TOKENS, learn_pieces, train_tokenizer

PRINT = "import sys, json; from shards.train_tokenizer import train_tokenizer as t; print(t(json.load(sys.stdin), 90))"


def test_another_process_and_another_order_give_the_same_bytes():
    here = train_tokenizer(samples.SENTENCES, 90)
    for sentences in (samples.SENTENCES, samples.SENTENCES[::-1]):
        done = subprocess.run(
            [sys.executable, "-c", PRINT], input=json.dumps(sentences), capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == here


def test_captions_come_back_and_begin_and_end_as_albert_expects():
    tokenizer = Tokenizer.from_str(train_tokenizer(samples.SENTENCES, 90))
    assert 40 < tokenizer.get_vocab_size() <= 90
    assert [tokenizer.id_to_token(number) for number in range(5)] == list(SPECIAL_TOKENS)
    for sentence in samples.SENTENCES:
        encoded = tokenizer.encode(sentence.upper())
        assert (encoded.tokens[0], encoded.tokens[-1]) == ("[CLS]", "[SEP]")
        assert tokenizer.decode(encoded.ids) == sentence
    assert tokenizer.encode("a ж").tokens[-2] == "ж"
    assert tokenizer.encode("a ж").ids[-2] == 1


def test_frequent_words_become_pieces_and_rare_ones_are_written_with_them():
    words = {"▁cat": 50, "▁cats": 2, "▁dog": 40, "▁catalogue": 1}
    pieces = learn_pieces(words, 14)
    assert {"▁cat", "▁dog"} <= pieces.keys()
    assert "▁catalogue" not in pieces


def test_a_small_vocabulary_keeps_every_character():
    words = {"▁zebra": 1, "▁quick": 1, "▁fox": 3}
    pieces = learn_pieces(words, 4)
    assert pieces.keys() == {character for word in words for character in word}
