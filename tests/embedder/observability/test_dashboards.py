"""Dashboards and alert rules: their queries are asked of a real Prometheus, their form is that of Grafana's SDK."""

import itertools
import json
import math
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import generate_metric_docs as metric_docs
import prometheus_server
import pytest
import samples
from ray_head import free_port
from running_server import running

import embedder
from embedder.config_toml.own_code_sections import MetricConfig

ROOT = Path(__file__).parents[3]
GRAFANA, PROMETHEUS = ROOT / "scripts/grafana", ROOT / "scripts/prometheus"
NAMES = ("fleet", "run", "service")
DASHBOARDS = {name: json.loads((GRAFANA / f"{name}.json").read_text()) for name in NAMES}
WAIT_S = 240.0
SIZES = (160, 320, 640, 1280)

needs_prometheus = pytest.mark.skipif(
    not prometheus_server.can_start(), reason="apt-get install prometheus has Prometheus and promtool"
)


def queries(name):
    """Title of each panel and its queries."""
    return [(panel["title"], target["expr"]) for panel in DASHBOARDS[name]["panels"] for target in panel["targets"]]


def metrics_in(text):
    return set(re.findall(r"\b(?:ray_)?embedder_\w+", text))


def documented():
    """Names of all metrics, with those that Prometheus makes of a histogram."""
    rows = itertools.chain(metric_docs._live(), metric_docs._text_file(), metric_docs._of_ray(), metric_docs._service())
    names = {name for name, *_ in rows}
    return names | {name.replace("_bucket", ending) for name in names for ending in ("_sum", "_count")}


def test_each_query_and_rule_asks_for_metrics_that_there_are():
    for name in NAMES:
        for title, query in queries(name):
            assert metrics_in(query) and metrics_in(query) <= documented(), (name, title)
    rules = re.findall(r"expr: (.*)|^ {10}(\S.*)$", (PROMETHEUS / "alerts.yml").read_text(), re.MULTILINE)
    asked = metrics_in(" ".join(itertools.chain(*rules)))
    assert len(asked) > 10 and asked <= documented()


def test_each_metric_of_a_run_is_in_a_dashboard():
    shown = set().union(*(metrics_in(query) for name in ("run", "fleet") for _, query in queries(name)))
    names = {name for name, *_ in (*metric_docs._live(), *metric_docs._text_file())}
    assert names <= shown, "what no panel shows nobody sees"


def test_the_page_of_the_metrics_is_current_and_has_each_metric():
    text = metric_docs.PAGE.read_text(encoding="utf-8")
    assert text == metric_docs.page()
    rows = (*metric_docs._live(), *metric_docs._text_file(), *metric_docs._of_ray(), *metric_docs._service())
    assert [name for name, *_ in rows if f"| `{name}` | " not in text] == []


def test_each_alert_has_its_line_of_the_page_and_its_test():
    alerts = set(re.findall(r"alert: (\w+)", (PROMETHEUS / "alerts.yml").read_text()))
    assert alerts == set(re.findall(r"^\| `(Embedder\w+)`", metric_docs.PAGE.read_text(), re.MULTILINE))
    tested = re.findall(r"alertname: (\w+)\n +exp_alerts:\n", (PROMETHEUS / "alerts_test.yml").read_text())
    assert alerts == set(tested), "each is seen to fire"


@pytest.mark.parametrize("name", NAMES)
def test_the_dashboards_are_what_grafanas_sdk_writes_and_reads(name):
    pytest.importorskip("grafana_foundation_sdk")
    import generate_dashboards
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    text = (GRAFANA / f"{name}.json").read_text()
    assert text == generate_dashboards.text_of(name)
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(text))))
    assert generate_dashboards._without_nulls(read) == json.loads(text)


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_ids_of_their_own_units_and_a_place(name):
    panels = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in panels]
    for (x, y, w, h), (other_x, other_y, other_w, other_h) in itertools.combinations(places, 2):
        beside = x + w <= other_x or other_x + other_w <= x
        assert beside or y + h <= other_y or other_y + other_h <= y, "two panels overlap"
    assert all(x >= 0 and x + w <= 24 for x, _, w, _ in places)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


@pytest.mark.medium
@needs_prometheus
def test_the_rules_pass_the_tests_of_promtool(tmp_path):
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for path in PROMETHEUS.iterdir():
        shutil.copy(path, tmp_path)
    rules = tmp_path / "alerts.yml"
    rules.write_text(rules.read_text().replace("!= 0", "== 0"))
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode != 0, "the tests would see a wrong rule"


class Held:
    """Display that holds a run open, at its end, until a function has returned."""

    def __init__(self, at_end):
        self._at_end = at_end

    def __call__(self, num_items):
        return self

    def __enter__(self):
        return lambda num_done: None

    def __exit__(self, kind, *_):
        if kind is None:
            self._at_end()


def busy_client(url, stop):
    """Ask the service again and again: new and known queries, and thumbnails of all sizes."""
    for number in itertools.count():
        if stop.wait(0.2):
            return
        for words in (f"a red car {number}", "two cats"):
            request = urllib.request.Request(f"{url}/search", json.dumps({"queries": [{"text": words}]}).encode())
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=20) as answer:
                hits = json.loads(answer.read())["answers"][0]["hits"]
        hit = hits[number % len(hits)]
        image = f"{url}/items/{urllib.parse.quote(hit['item_id'], safe='')}/image?size={SIZES[number % len(SIZES)]}"
        with urllib.request.urlopen(image, timeout=20) as answer:
            answer.read()


def empty_panels(server, names):
    """Panels of which a query finds nothing, or no number."""
    found = []
    for name in names:
        for title, query in queries(name):
            asked = query.replace("$store", ".*").replace("$__rate_interval", "5m")
            if not any(not math.isnan(value) for _, value in server.query(asked)):
                found.append((name, title, asked))
    return found


@pytest.mark.slow
@pytest.mark.timeout(700)
@needs_prometheus
def test_each_panel_finds_data_in_a_prometheus_that_scraped_a_run_its_file_and_the_service(
    ray_cluster, make_run, tmp_path
):
    files, data = tmp_path / "textfile", tmp_path / "prometheus"
    files.mkdir()
    data.mkdir()
    source, port = tmp_path / "in", free_port()
    samples.folder(source / "first", num_images=24)
    settings = {
        "metric": (MetricConfig(name="rows", kind="count"),),
        "num_stages": 1,
        "rows_per_part": 64,
        "decode": {"num_cpus": 0.5, "items_per_task": 16},
    }
    first = make_run(source, metrics_file=str(files / "metrics"), **settings)
    embedder.embed(first)
    samples.folder(source / "second", num_images=1500)
    second = first.model_copy(update={"engine": "ray", "metrics_address": f"127.0.0.1:{port}", "metrics_file": None})
    stop, failures = threading.Event(), []

    with running(first.store) as url, prometheus_server.serving_folder(files) as textfile:
        targets = {"embedder-run": f"127.0.0.1:{port}", "embedder-textfile": textfile}
        server = prometheus_server.PrometheusServer(data, targets | {"embedder-serve": url.removeprefix("http://")})
        client = threading.Thread(target=busy_client, args=(url, stop))

        def ask():
            deadline_s = time.monotonic() + WAIT_S
            while not any(value for _, value in server.query('up{job="embedder-serve"}')):
                assert time.monotonic() < deadline_s, "the service was not scraped"
                time.sleep(0.5)
            client.start()  # not before: a rate is the growth from one scrape to another
            while (left := empty_panels(server, NAMES)) and time.monotonic() < deadline_s:
                time.sleep(1.0)
            failures.extend(left)
            counted = server.query("max_over_time(embedder_live_items_total[5m])")
            assert counted and counted[0][0]["store"] == first.store

        try:
            embedder.embed(second, Held(ask))
        finally:
            stop.set()
            if client.ident is not None:
                client.join()
            server.stop()
    assert failures == []
