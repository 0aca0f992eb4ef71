"""Messages with counts of none, one and two: a noun goes with its count."""

import re

import pytest
import samples
from command_runs import run_here

from embedder.ingest.dry_run import RunEstimate
from embedder.plugins.serve.protection import TokenFile
from embedder.plugins.train.train_command import train_parts
from embedder.plugins.train.train_report import TrainReport

WRONG = re.compile(
    r"(?<![\d.,])1 (new |published |part |text |right |index |decoded |held-out )*[a-z]+s\b(?<!across)|\(s\)"
)
FINE = ("1 has", "1 is", "1 was", "1 holds", "1 stays")


def assert_counted(text):
    wrong = [found[0] for found in WRONG.finditer(text) if found[0] not in FINE]
    assert not wrong, text


@pytest.fixture(scope="module", params=[1, 2])
def embedded(request, tiny_model, tmp_path_factory):
    """A folder of so many images with captions and a broken one, its store, and what `embed` showed."""
    root = tmp_path_factory.mktemp("counts")
    folder = root / "in"
    for number in range(request.param):
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.png").write_bytes(samples.image_bytes(number))
        (folder / f"{number}.txt").write_text(f"image {number}")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    config = root / "run.toml"
    config.write_text(
        f'model = "{tiny_model}"\nstore = "{root / "store"}"\nengine = "local"\n[[source]]\npath = "{folder}"\n'
    )
    ended = run_here("embed", "--config", config)
    assert ended.code == 0, ended.stderr
    return request.param, config, root / "store", ended


def test_what_embed_says_at_its_end_and_meanwhile(embedded):
    number, _, _, ended = embedded
    items = {1: "1 item", 2: "2 items"}[number]
    rows = {1: "1 row", 2: "2 rows"}[number]
    assert ended.stdout.splitlines()[-1].startswith(f"{items} embedded, 1 rejected; {rows}; ")
    assert_counted(ended.stdout + ended.stderr)


def test_what_commands_on_a_store_say(embedded):
    number, config, store, _ = embedded
    items, vectors = {1: ("1 item", "1 vector"), 2: ("2 items", "2 vectors")}[number]
    expected = {
        ("refresh", config): f"nothing to do: 0 new or changed, {number + 1} items unchanged; ",
        ("refresh", config, "--dry-run"): "0 items now, 0 left for later; at most 0 bytes of part files rewritten; ",
        ("vacuum", "--store", store, "--dry-run"): "1 publication stays readable: ",
        ("compact", "--store", store): "items: 1 part file -> 1, 0 bytes rewritten",
        ("index", "build", "--store", store, "--kind", "flat"): f"Flat, {vectors} x ",
        ("report", "--store", store): f"{items} embedded, 1 rejected; ",
        ("evaluate", "--store", store): f"{'1 query' if number == 1 else '2 queries'} (",
        ("purge", "0.png", "--store", store, "--dry-run"): "for good: 1 item, 1 of them published, with 1 vector",
        ("history", "--store", store): "",
        ("rejects", "--store", store): "broken.png",
    }
    for command, line in expected.items():
        ended = run_here(*command)
        assert ended.code == 0, ended.stderr
        assert line in ended.stdout, command
        assert_counted(ended.stdout + ended.stderr)


def test_a_refusal_counts_the_rejects(tiny_model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    options = ["--model", tiny_model, "--store", tmp_path / "store", "--set", "engine=local"]
    ended = run_here("embed", tmp_path / "in", *options)
    assert ended.code == 1
    assert (
        "guard rejects: 1 of 1 item rejected, more than max_reject_fraction = 0.01 allows: 1 x decode " in ended.stderr
    )
    assert_counted(ended.stderr)
    ended = run_here("verify", tmp_path / "in", "--model", tiny_model, "--stages", 2)
    assert ended.code == 2
    assert ": 0 of 1 item can be embedded (" in ended.stderr


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (0, "0 steps (0 epochs) over 0 items; 0 rejected"),
        (1, "1 step (1 epoch) over 1 item; 1 rejected"),
        (2, "2 steps (2 epochs) over 2 items; 2 rejected"),
    ],
)
def test_a_training_counts_its_steps(number, line):
    texts = dict.fromkeys(("model", "last", "loss", "what", "engine", "engine_reason", "device"), "x")
    counts = ("num_workers", "num_items", "num_held_out", "num_rejected", "num_unpaired", "num_steps", "num_epochs")
    nothing = dict.fromkeys(("base", "delta", "best", "latest"))
    sizes = {"num_cached": number, "cached_bytes": number, "wall_s": 1.0, "train_s": 7980.0}
    shown = train_parts(TrainReport(**texts, **dict.fromkeys(counts, number), **nothing, **sizes))
    assert shown[0].startswith(line)
    assert "; 2 h 13 min on x; " in shown[0]
    assert_counted(shown[0])


def test_an_estimate_of_one_run_and_of_several_is_a_sentence():
    figures = {"wall_s": 8000.4, "items_per_s": 11.52, "startup_s": 0.4}
    one, five = (RunEstimate(num_runs=number, **figures).text() for number in (1, 5))
    assert one == "about 2 h 13 min, as the last measured run made 11.5 items/s after 0 s of start-up"
    assert five == "about 2 h 13 min, as the last 5 measured runs made 11.5 items/s after 0 s of start-up"


@pytest.mark.parametrize(("number", "line"), [(1, "read again, 1 token"), (2, "read again, 2 tokens")])
def test_the_log_of_a_service_counts_its_tokens(number, line, tmp_path, said):
    path = tmp_path / "tokens"
    path.write_text("a" * 16 + "\n")
    path.chmod(0o600)
    tokens = TokenFile(path)
    path.write_text("\n".join(str(each) * 16 for each in range(number)) + "\n" * 3)
    tokens.allows({b"authorization": b"Bearer " + b"0" * 16}, cookie=False)
    assert any(each.endswith(line) for each in said), said
