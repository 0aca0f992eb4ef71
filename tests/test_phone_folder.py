"""A phone's folder, from nothing to a search in the two commands that the documentation shows."""

import re
import shlex
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
import samples
from command_runs import run_here
from hidden_packages import hide
from PIL import Image, ImageOps
from tiny_models import tiny_config

import embedder
from embedder.ingest import known_items
from embedder.installation import MISSING_EXTRA
from embedder.media.media_errors import DecodeError
from embedder.plugins.serve.thumbnails import unreadable
from embedder.steps.decode import forget_reader
from hostile.files import dng
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "own-images.md"
ITEMS = {
    "100APPLE/IMG_0001.HEIC": "image",
    "100APPLE/IMG_0002.HEIC": "image",
    "100APPLE/IMG_0002.MOV": "video",
    "100APPLE/IMG_0003.PNG": "image",
    "100APPLE/IMG_0004.DNG": "image",
    "100APPLE/IMG_0005.JPG": "image",
    "101APPLE/IMG_0006.HEIC": "pair",
}
NEED_EXTRA = [name for name in ITEMS if name.endswith(("HEIC", "DNG"))]
CLUTTER = (
    ".DS_Store",
    "100APPLE/.DS_Store",
    "100APPLE/._IMG_0001.HEIC",
    "100APPLE/IMG_0001.AAE",
    "100APPLE/IMG_O0002.AAE",
    ".Spotlight-V100/store.db",
)


def photograph(number):
    return samples.make_image(number, 320, 240)


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112], tags[0x010F], tags[0x0110] = orientation, "Apple", "iPhone 27"
    return tags.tobytes()


@pytest.fixture
def phone(tmp_path, monkeypatch):
    """A folder with what the commands of the documentation name: `path/to/DCIM` and `models/mine`."""
    pillow_heif.register_heif_opener()
    root = tmp_path / "path" / "to" / "DCIM"
    for name in (*CLUTTER, "101APPLE/IMG_0006.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"\0\x05\x16\x07 what a phone or a Mac leaves behind")
    for name, orientation in (("100APPLE/IMG_0001", 6), ("100APPLE/IMG_0002", 1), ("101APPLE/IMG_0006", 3)):
        photograph(int(name[-1])).save(root / f"{name}.HEIC", "HEIF", exif=exif(orientation), tile_size=128, quality=90)
    samples.clip(root / "100APPLE" / "IMG_0002.MOV", seconds=1.5)
    photograph(3).save(root / "100APPLE" / "IMG_0003.PNG")
    (root / "100APPLE" / "IMG_0004.DNG").write_bytes(dng(np.asarray(photograph(4)), orientation=6))
    photograph(5).save(root / "100APPLE" / "IMG_0005.JPG", exif=exif(8))
    (root / "101APPLE" / "IMG_0006.txt").write_text("a dog on the beach")
    init_model(
        tiny_config(), tmp_path / "models" / "mine", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return root


def commands():
    """The two commands of the page's section."""
    (block,) = re.findall(r"## The pictures of a phone.*?```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    embed, search = (shlex.split(line)[1:] for line in block.strip().splitlines())
    return embed, search


def run(*arguments):
    ended = run_here(*arguments, "--json")
    assert ended.code == 0, ended.stderr
    return ended.found, ended.stderr


@pytest.mark.medium
def test_two_commands_lead_from_a_phones_folder_to_a_search(phone, tmp_path):
    embed, search = commands()
    report, said = run(*embed)
    assert (report["num_items"], report["num_rejected"], report["unreadable"]) == (len(ITEMS), 0, {})
    assert (report["other_files"], "left out" in said) == ({}, False)
    found, _ = run(*search)
    assert found["hits"] and {hit["item_id"] for hit in found["hits"]} <= ITEMS.keys()
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")
    store = embedder.open_store("runs/phone")
    rows = store.to_arrow().to_pylist()
    assert {row["item_id"]: row["modality"] for row in rows} == ITEMS
    shown = ImageOps.exif_transpose(Image.open(phone / "100APPLE" / "IMG_0005.JPG"))
    assert shown.size == (240, 320)
    for number, turn in ((1, Image.Transpose.ROTATE_270), (2, None), (6, Image.Transpose.ROTATE_180)):
        upright = photograph(number) if turn is None else photograph(number).transpose(turn)
        upright.save(tmp_path / "query.png")
        best = store.search(image=str(tmp_path / "query.png"), k=1)[0]
        assert best.item_id.endswith(f"IMG_000{number}.HEIC") and best.score > 0.99
    heic = store.search(image=str(phone / "100APPLE" / "IMG_0001.HEIC"), k=1)[0]
    assert heic.item_id == "100APPLE/IMG_0001.HEIC" and heic.score > 0.9999
    assert heic.image(64).size == (64, 64)
    again, _ = run(*embed)
    assert (again["outcome"], again["num_unchanged"]) == ("nothing to do", len(ITEMS))


@pytest.mark.medium
def test_without_the_extra_it_is_told_and_the_run_after_the_installation_embeds_the_rest(phone, tmp_path, monkeypatch):
    embed, _ = commands()
    with monkeypatch.context() as patch:
        hide(tmp_path / "hidden", patch, "pillow_heif", "rawpy")
        forget_reader()  # whose sandbox was started by another test
        patch.setattr(known_items, "missing", lambda extra: ("pillow_heif", "rawpy"))
        report, said = run(*embed)
        assert (report["num_rejected"], report["unreadable"]) == (0, {"HEIC": 3, "DNG": 1})
        line = (
            "4 files left out for want of a decoder: 3 HEIC, 1 DNG; pip install 'embedder[formats]': "
            "the next run embeds them"
        )
        assert line in said
        listed, _ = run("rejects", "--store", "runs/phone")
        reasons = {row["item_id"]: row["error"] for row in listed["rejects"]}
        assert sorted(reasons) == NEED_EXTRA
        assert reasons[NEED_EXTRA[0]].startswith("HEIC: needs pillow_heif")
        assert all(reason.endswith("pip install 'embedder[formats]'") for reason in reasons.values())
        again, said = run(*embed)
        assert again["outcome"] == "nothing to do" and line in said
        refused = run_here("search", "--image", phone / NEED_EXTRA[0], "--store", "runs/phone")
        assert refused.code == 2 and "HEIC: needs pillow_heif" in refused.stderr
        assert "pip install 'embedder[formats]'" in refused.stderr
        before = embedder.open_store("runs/phone").to_arrow().to_pylist()
        (alone,) = (row for row in before if row["item_id"] in NEED_EXTRA)
        assert alone["text_embedding"] and not alone["image_embedding"], "only the caption"
    forget_reader()
    report, _ = run(*embed)
    assert (report["reasons"], report["unreadable"]) == ({"rejected before": len(NEED_EXTRA)}, {})
    rows = embedder.open_store("runs/phone").to_arrow().to_pylist()
    assert {row["item_id"]: row["modality"] for row in rows} == ITEMS
    kept = {row["item_id"]: row["image_embedding"] for row in before if row["item_id"] not in NEED_EXTRA}
    assert {row["item_id"]: row["image_embedding"] for row in rows if row["item_id"] in kept} == kept


def test_a_server_without_the_extra_answers_in_a_line():
    error = unreadable("IMG_0001.HEIC", DecodeError(MISSING_EXTRA, "HEIC: needs pillow_heif"))
    assert (error.status, error.where) == (422, "item IMG_0001.HEIC")
    assert "`formats`" in error.cure and "restore" not in error.cure
