"""A run that its guards refuse says all that is wrong at once, and each command that it proposes works."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import samples
from command_runs import run_here
from model_runs import changed_model

import embedder
from embedder.cli.refresh_command import list_rejects, retry_rejects
from embedder.config import load_config
from embedder.errors import ConfigError, RunFailedError
from embedder.ingest.embed import embed, refresh
from embedder.ingest.work import IngestOptions
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import all_runs
from embedder.store.layout import read_current
from embedder.store.publish.current import begin

BROKEN = b"\x89PNG\r\n\x1a\n broken"


def broken_folder(root, num_images=40, num_broken=4):
    """Pictures, some of them broken."""
    source = samples.folder(root, num_images=num_images, captions=False)
    for number in range(num_broken):
        (source / f"broken{number}.png").write_bytes(BROKEN)
    return source


@pytest.fixture
def collapsed_model(tiny_model, tmp_path):
    """A model that gives the same for every picture."""

    def zeroed(name, value):
        return np.zeros_like(value) if ".patch_embed." in name else value

    return changed_model(tiny_model, tmp_path / "collapsed", zeroed)


@pytest.fixture
def config_file(tmp_path, collapsed_model):
    """A configuration whose run two guards refuse."""
    source = broken_folder(tmp_path / "in")
    path = tmp_path / "nightly.toml"
    path.write_text(
        f'model = "{collapsed_model}"\nstore = "{tmp_path / "store"}"\nengine = "local"\nmin_rejects = 1\n'
        f'metrics_file = "{tmp_path / "m.prom"}"\n[[source]]\npath = "{source}"\n'
        f'[on_failure]\ncommand = ["sh", "-c", "cat > {tmp_path / "notice.json"}"]\n'
    )
    return path


def last_line(ended):
    return ended.stderr.strip().splitlines()[-1]


def proposed_options(message):
    """The options that the message's end asks to run the same command with."""
    return shlex.split(message.partition("run the same command with ")[2])


@pytest.mark.medium
@pytest.mark.parametrize("command", [["embed", "--config"], ["refresh"]])
def test_the_option_that_a_refusal_names_publishes_what_it_refused(config_file, command):
    refused = run_here(*command, config_file)
    message = last_line(refused)
    assert refused.code == 1
    assert message.startswith("embedder: guard rejects: 4 of 44 items rejected")
    assert "guard vectors: 40 image vectors" in message
    options = proposed_options(message)
    assert options == ["--force", "rejects", "--force", "vectors"]
    again = run_here(*command, config_file, *options, "--json")
    assert again.code == 0, again.stderr
    assert again.found["published"]
    assert {guard["name"] for guard in again.found["guards"] if guard["forced"]} == {"rejects", "vectors"}


@pytest.mark.medium
def test_every_command_in_a_refusal_is_accepted(config_file, tiny_model):
    message = last_line(run_here("refresh", config_file))
    commands = re.findall(r"`embedder ([^`]+)`", message)
    assert len(commands) == 2
    for command in commands:
        ended = run_here(*shlex.split(command.replace("--model DIR", f"--model {tiny_model}")), "--json")
        assert ended.code == 0, (command, ended.stderr)
    for setting in re.findall(r"--set (\w+)=", message):
        ended = run_here("refresh", config_file, "--set", f"{setting}=1", "--force", "vectors")
        assert ended.code == 0, ended.stderr


@pytest.mark.medium
def test_a_retry_that_is_refused_can_be_forced_too(config_file):
    run_here("refresh", config_file)
    refused = run_here("rejects", "--retry", "--config", config_file)
    options = proposed_options(last_line(refused))
    assert refused.code == 1 and options == ["--force", "rejects", "--force", "vectors"]
    again = run_here("rejects", "--retry", "--config", config_file, *options, "--json")
    assert again.code == 0, again.stderr
    assert (again.found["published"], again.found["num_items"]) == (True, 44)


def test_a_force_that_no_guard_bears_is_a_mistake_before_anything_is_done(config_file, tmp_path):
    for command in (["embed", "--config", config_file], ["refresh", config_file]):
        ended = run_here(*command, "--force", "rejcts")
        assert ended.code == 2
        assert "the guards are hold, retire, rejects, vectors, retrieval" in ended.stderr
    assert run_here("rejects", "--config", config_file, "--force", "rejects").code == 2
    assert not (tmp_path / "store" / "runs").exists()


def test_the_demo_takes_the_option_that_its_refusal_would_name(tmp_path):
    ended = run_here("demo", "--out", tmp_path / "demo", "--force", "nothing")
    assert ended.code == 2
    assert "--force nothing: there is no such guard" in ended.stderr


@pytest.mark.medium
def test_operators_are_told_of_every_guard_that_failed(config_file, tmp_path):
    ended = run_here("refresh", config_file)
    line = json.loads((tmp_path / "store" / "runs.jsonl").read_text().splitlines()[-1])
    notice = json.loads((tmp_path / "notice.json").read_text())
    for record in (line, notice):
        assert {guard["name"] for guard in record["guards"] if not guard["passed"]} == {"rejects", "vectors"}
        assert "guard rejects: " in record["message"] and "guard vectors: " in record["message"]
        assert f"embedder: {record['message']}" == last_line(ended)
    metrics = (tmp_path / "m.prom").read_text()
    for name in ("rejects", "vectors"):
        assert re.search(rf'embedder_run_guard_passed{{[^}}]*guard="{name}"[^}}]*}} 0\.0', metrics)


@pytest.mark.medium
@pytest.mark.parametrize("is_at_its_end", [True, False])
def test_a_source_that_is_gone_is_told_with_a_run_that_was_refused_before_where_that_is_at_its_end(
    make_run, tmp_path, is_at_its_end
):
    source = broken_folder(tmp_path / "in", num_broken=0)
    config = make_run(source, min_rejects=1)
    embed(config)
    for number in range(200):
        (source / f"broken{number}.png").write_bytes(BROKEN)
    with pytest.raises(RunFailedError, match=r"^guard rejects: 200 of 200 [^;]*broken0.png"):
        refresh(config, IngestOptions())
    if not is_at_its_end:
        (source / "new.png").write_bytes(samples.image_bytes(900))
    for path in sorted((source / "pictures").iterdir())[:10]:
        path.unlink()
    with pytest.raises(RunFailedError) as refused:
        refresh(config, IngestOptions())
    message = str(refused.value)
    if not is_at_its_end:
        assert "guard rejects" not in message, "one more item could change its verdict"
        return
    assert message.startswith("guard retire: 10 of 40") and "guard rejects: 200 of 200" in message
    line = json.loads((Path(config.store) / "runs.jsonl").read_text().splitlines()[-1])
    assert [guard["name"] for guard in line["guards"] if not guard["passed"]] == ["retire", "rejects"]
    report = refresh(config, IngestOptions(forced=("retire", "rejects")))
    assert (report.published, report.num_retired) == (True, 10)


@pytest.fixture
def refused_first(make_run, tmp_path):
    """A store whose first run was refused; nothing is published in it."""
    source = broken_folder(tmp_path / "in", num_images=6, num_broken=2)
    config = make_run(source, min_rejects=1)
    with pytest.raises(RunFailedError, match="guard rejects: 2 of 8"):
        embed(config)
    return config, source, all_runs(StoreFiles(config.store))[-1].run_id


def test_rejects_are_shown_where_nothing_is_published(refused_first, run_embedder):
    config, _, run_id = refused_first
    code, found, stderr = run_embedder("rejects", "--store", config.store, "--json")
    assert code == 0, stderr
    assert {row["item_id"] for row in found["rejects"]} == {"broken0.png", "broken1.png"}
    assert (found["run_id"], found["published"], found["unpublished_run"]) == (run_id, False, None)
    ended = run_here("rejects", "--store", config.store)
    assert "broken1.png" in ended.stdout
    assert f"of run {run_id}, which is not published" in ended.stdout
    assert list_rejects(config, None, {"error_type": "Nothing"}).data["rejects"] == []


def test_mending_the_files_and_running_again_publishes_and_no_reject_is_left(refused_first):
    config, source, run_id = refused_first
    for number in range(2):
        (source / f"broken{number}.png").write_bytes(samples.image_bytes(50 + number))
    assert embed(config).published
    assert list_rejects(config, None, {}).data == {
        "rejects": [],
        "run_id": run_id,
        "published": True,
        "unpublished_run": None,
        "kinds": [],
    }
    assert list_rejects(config, run_id, {}).data["rejects"] == [], "the second session embedded them"


@pytest.mark.medium
def test_a_retry_mends_a_first_run_that_was_refused(refused_first):
    config, source, run_id = refused_first
    (source / "broken0.png").write_bytes(samples.image_bytes(50))
    with pytest.raises(RunFailedError, match="guard rejects: 1 of 8"):
        retry_rejects(config, {})
    (source / "broken1.png").write_bytes(samples.image_bytes(51))
    report = retry_rejects(config, {}, run_id=run_id).data
    assert (report["published"], report["num_items"], report["num_rejected"]) == (True, 8, 0)
    assert embedder.open_store(config.store).to_arrow().num_rows == 8


@pytest.mark.medium
def test_rejects_of_a_newer_run_that_is_not_published_are_pointed_out(make_run, tmp_path):
    source = broken_folder(tmp_path / "in", num_images=6, num_broken=0)
    config = make_run(source, min_rejects=1)
    embed(config)
    for number in range(5):
        (source / f"broken{number}.png").write_bytes(BROKEN)
    with pytest.raises(RunFailedError, match="guard rejects: 5 of 5"):
        embed(config)
    published, pending = (run.run_id for run in all_runs(StoreFiles(config.store)))
    found = list_rejects(config, None, {}).data
    assert (found["rejects"], found["run_id"], found["published"]) == ([], published, True)
    assert found["unpublished_run"] == {"run_id": pending, "num_rejects": 5}
    (command,) = re.findall(r"`embedder ([^`]+)`", run_here("rejects", "--store", config.store).stdout)
    assert len(run_here(*shlex.split(command), "--json").found["rejects"]) == 5
    (source / "broken3.png").write_bytes(samples.image_bytes(60))
    with pytest.raises(RunFailedError, match="guard rejects: 4 of 5"):
        retry_rejects(config, {}, run_id=pending)
    assert len(list_rejects(config, pending, {}).data["rejects"]) == 4


@pytest.mark.medium
def test_a_retry_of_a_run_that_a_later_one_replaced_says_so(make_run, tmp_path, tiny_model):
    config = make_run(broken_folder(tmp_path / "in", num_images=6, num_broken=2), min_rejects=1)
    with pytest.raises(RunFailedError):
        refresh(config, IngestOptions())
    first = all_runs(StoreFiles(config.store))[-1].run_id
    other = load_config(overrides=config.model_dump(exclude_unset=True) | {"segment_s": 7.0})
    with pytest.raises(RunFailedError):
        refresh(other, IngestOptions())
    assert read_current(StoreFiles(config.store)) is None
    with pytest.raises(ConfigError, match=f"--run {first}: a later run took its place"):
        retry_rejects(config, {}, run_id=first)


def test_a_retry_of_an_operation_that_was_cut_off_says_so(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in", num_images=2))
    embed(config)
    files = StoreFiles(config.store)
    cut_off = begin(files, "compaction", read_current(files)).run_id
    with pytest.raises(ConfigError, match=f"--run {cut_off}: .* nothing continues it"):
        retry_rejects(config, {}, run_id=cut_off)
