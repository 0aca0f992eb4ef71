"""Terms that captions and queries share."""

from typing import get_args

import numpy as np
import pyarrow as pa
import pytest

from embedder.config_toml.sections import Analysis
from embedder.store_index.analyser import Analyser, hash_term, split


def finds(caption: str, query: str, name: str = "unicode") -> bool:
    """Whether a caption holds all terms of a query."""
    analyser = Analyser(name)
    (tokens,) = split(pa.array([caption])).to_pylist()
    _, hashes = analyser.index_terms(tokens)
    asked = analyser.query_terms(query)
    return bool(asked) and {hash_term(term) for term in asked} <= set(hashes.tolist())


@pytest.mark.parametrize(
    ("caption", "query"),
    [
        ("Der Weg zur STRASSE", "straße"),
        ("Café crème", "cafe CREME"),
        ("Elle a vu l’été", "ete"),
        ("ＡＢＣ １２", "abc 12"),
        ("cafe\u0301", "café"),
        ("invoice_2041.pdf", "invoice 2041"),
        ("Ёлка и йод", "елка йод"),
        ("مُحَمَّد", "محمد"),
        ("東京都の夜景", "東京"),
        ("東京都の夜景", "夜景"),
        ("東京都の夜景", "都"),
        ("黒猫", "猫"),
        ("中文字幕", "文字"),
        ("대한민국 서울", "민국"),
        ("ﾃｷｽﾄ", "テキスト"),
        ("がぎぐ", "\u304b\u3099ぎ"),
        ("die Zei\u00adtung von gestern", "zeitung"),
        ("die Zeitung von gestern", "Zei\u00adtung"),
        ("葛\U000e0100城市の辻\ufe00堂", "葛城"),
        ("葛城市", "葛\U000e0100城"),
        ("ภาษาไทย", "ไทย"),
        ("हिन्दी भाषा", "हिन्दी"),
        ("a cat😺on❤️a mat", "😺"),
        ("❤️ love", "❤"),
        ("thumbs 👍🏽 up", "👍"),
        ("flags 🇩🇪🇫🇷", "🇫🇷"),
        ("the word 猫cat犬", "cat"),
    ],
)
def test_writing_of_one_word_makes_no_difference(caption, query):
    assert finds(caption, query)


@pytest.mark.parametrize(
    ("caption", "query"),
    [
        ("a cat runs", "running cats"),  # that is what languages are for
        ("東京都", "京東"),
        ("東京 都庁", "京都"),  # two runs
        ("cat", "c"),
        ("हिन्दी", "हिन"),
        ("🇩🇪", "🇫🇷"),
        ("anything", ""),
        ("anything", "!? …"),
    ],
)
def test_other_words_are_not_found(caption, query):
    assert not finds(caption, query)


@pytest.mark.parametrize(
    ("name", "caption", "query"),
    [
        ("english", "a cat runs", "running cats"),
        ("english", "résumés", "resume"),
        ("english", "東京の cats", "東京 cat"),
        ("german", "alte Häuser", "altes Haus"),
        ("french", "les chevaux", "cheval"),
        ("russian", "красивые кошки", "красивая кошка"),
        ("spanish", "canciones", "canción"),
    ],
)
def test_a_language_compares_stems(name, caption, query):
    assert finds(caption, query, name)


def test_every_language_of_the_configuration_has_a_stemmer():
    for name in get_args(Analysis):
        if name != "none":
            assert len(Analyser(name).query_terms("word слово λέξη")) == 3


def test_terms_of_a_token_stand_side_by_side():
    numbers, hashes = Analyser().index_terms(["日本語", "", "Cat"])
    assert numbers.tolist() == [5, 0, 1]
    assert hashes.tolist() == [hash_term(term) for term in ["日", "本", "語", "日本", "本語", "cat"]]
    assert hashes.dtype == np.uint64


def test_hashes_are_the_same_on_every_machine():
    assert hash_term("cat") == 0x2F989D7B2CDD2733


def test_a_query_in_ascii_is_cut_as_captions_are():
    text = "".join(f"a{chr(code)}B{chr(code)}{chr(code)}7 " for code in range(128))
    (tokens,) = split(pa.array([text])).to_pylist()
    assert Analyser().query_terms(text) == [token.lower() for token in tokens if token]
    assert Analyser().query_terms("") == Analyser().query_terms(" ?!") == []
