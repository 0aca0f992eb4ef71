"""A Hugging Face dataset's Parquet files: from nothing to a search, by the commands of the documentation."""

import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest
from command_runs import run_here
from hugging_face import write_shard

import embedder

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/own-images.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def commands():
    """The commands under the heading on the page, as words."""
    (block,) = re.findall(r"### Hugging Face datasets\n.*?```\n(.*?)```", PAGE, re.DOTALL)
    return [shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Emoji in two shards with a card, where the page's commands look for them; gives the captions."""
    with tarfile.open(ROOT / "embedder/demo_data/noto.tar") as tar:
        read = {each.name: tar.extractfile(each).read() for each in tar if each.isfile()}
    captions = {name: json.loads(data)["caption"] for name, data in read.items() if name.endswith(".json")}
    chosen = sorted(captions, key=lambda name: (captions[name] != "red heart", name))[:12]
    rows = [(read[name.replace(".json", ".png")], captions[name]) for name in reversed(chosen)]
    folder = tmp_path / "path/to/dataset"
    for number in range(2):
        images, texts = zip(*rows[number::2], strict=True)
        write_shard(folder / f"data/train-{number:05}-of-00002.parquet", images, caption=list(texts), row_group_size=4)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Emoji\n")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/mine").symlink_to(ROOT / "embedder/demo_model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return [caption for _, caption in rows]


@pytest.mark.medium
def test_two_commands_lead_to_a_search(commands, dataset):
    embed, search = commands
    ended = run_here(*embed, "--engine", "local")
    assert ended.code == 0, ended.stderr
    assert "12 items embedded, 0 rejected" in ended.stdout
    ended = run_here(*search, "--json")
    assert ended.code == 0, ended.stderr
    assert ended.found["hits"][0]["caption"] == "red heart"
    store = embedder.open_store("runs/dataset")
    rows = store.to_arrow().to_pylist()
    assert sorted(row["caption"] for row in rows) == sorted(dataset)
    assert all(re.fullmatch(r"[0-9a-f]{32}", row["item_id"]) for row in rows)
    assert len(store.search("a red heart", k=3).thumbnails()) == 3
    ended = run_here(*embed, "--engine", "local")
    assert "nothing to do: 0 new or changed, 12 items unchanged" in ended.stdout


def test_without_columns_the_first_command_answers_with_those_of_the_page(commands, dataset):
    (embed, _), options = commands, ("--image-column", "--caption-column", "--id-column")
    named = [word for at, word in enumerate(embed) if word in options or embed[at - 1] in options]
    bare = [word for word in embed if word not in named]
    ended = run_here(*bare)
    assert ended.code == 2
    assert ended.stderr.strip().endswith(f"these look right: {' '.join(named)}")
    assert not Path("runs").exists()


@pytest.mark.medium
def test_in_a_file_the_proposal_is_a_line_of_toml_that_runs(dataset, tmp_path):
    run = tmp_path / "run.toml"
    text = 'model = "models/mine"\nstore = "runs/file"\nengine = "local"\n[[source]]\npath = "path/to/dataset"\n'
    run.write_text(text)
    ended = run_here("embed", "--config", run)
    assert ended.code == 2
    assert "--" not in ended.stderr
    run.write_text(text + ended.stderr.strip().rpartition("these look right: ")[2])
    ended = run_here("embed", "--config", run)
    assert ended.code == 0, ended.stderr
    assert "12 items embedded, 0 rejected" in ended.stdout
