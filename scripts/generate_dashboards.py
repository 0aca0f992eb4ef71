#!/usr/bin/env python3
"""Write the dashboards of scripts/grafana: one run, a fleet of runs, the service; made by Grafana's own SDK.

python scripts/generate_dashboards.py

Each panel has one question, the queries that answer it, and a unit. `$store` is the variable of the run's dashboards.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grafana_foundation_sdk.builders import dashboard, gauge, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh, VariableSort

FOLDER = Path(__file__).parent / "grafana"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
KINDS = {"lines": timeseries.Panel, "number": stat.Panel, "dial": gauge.Panel}
HEIGHT = 7  # of a panel, in rows of Grafana's grid, which is 24 columns wide
OF = '{store=~"$store"}'
EVERY = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str  # its question
    queries: dict[str, str]  # PromQL by what stands in the legend
    unit: str = "short"  # Grafana's name of it
    meaning: str = ""  # shown where the mouse rests on the title
    kind: Literal["lines", "number", "dial"] = "lines"  # lines over time, one number, or a dial from 0 to 1
    width: int = 8  # columns


RUN = (
    Panel("Done", {"{{store}}": f"embedder_live_items_total{OF} / clamp_min(embedder_live_listed_items{OF}, 1)"},
          "percentunit", "Items finished, of those that this command is to embed.", "dial", 4),
    Panel("Time left", {"{{store}}": f"(embedder_live_listed_items{OF} - embedder_live_items_total{OF}) / "
          f"clamp_min(rate(embedder_live_items_total{OF}[5m]), 0.001)"},
          "s", "At the pace of the last five minutes.", "number", 4),
    Panel("Rejected", {"{{store}}": f"embedder_live_rejects_total{OF} / clamp_min(embedder_live_items_total{OF}, 1)"},
          "percentunit", "Above max_reject_fraction nothing is published.", "number", 4),
    Panel("Published", {"{{store}}": f"max by (store) (embedder_published_age_seconds{OF})"},
          "s", "Age of what readers see.", "number", 4),
    Panel("Recall of the index", {"{{store}}": f"max by (store) (embedder_index_recall{OF})"},
          "percentunit", "Recall@10 of the published index.", "number", 4),
    Panel("Bottleneck", {"{{step}}": f"embedder_live_bottleneck{OF} == 1"},
          "short", "The step that the others wait for.", "number", 4),
    Panel("Items a second", {"{{store}}": f"rate(embedder_live_items_total{OF}[{EVERY}])"}, "ops"),
    Panel("Busy share of each step", {"{{step}}": f"embedder_live_busy_share{OF}"}, "percentunit",
          "Part of the last 20 s that its replicas were inside calls."),
    Panel("Idle share of each step", {"{{step}}": f"1 - embedder_live_busy_share{OF}"}, "percentunit",
          "Of a stage on GPUs: what they cost for nothing."),
    Panel("Blocks that wait before each step", {"{{step}}": f"embedder_live_queue_blocks{OF}"}, "short"),
    Panel("Part of the time that blocks wait", {"{{step}}": f"embedder_live_waiting_share{OF}"}, "percentunit"),
    Panel("Calls under way, and replicas", {"{{step}}": f"embedder_live_tasks{OF}",
          "replicas of {{step}}": f"embedder_live_replicas{OF}"}, "short"),
    Panel("Processes inside each step", {"{{step}}": f"rate(embedder_live_step_seconds_total{OF}[{EVERY}])"}, "short",
          "Seconds inside its calls, in one second, of finished parts."),
    Panel("CPUs that compute each step",
          {"{{step}}": f"rate(embedder_live_step_cpu_seconds_total{OF}[{EVERY}])"}, "short"),
    Panel("CPUs and GPUs that each step holds", {"CPUs of {{step}}": f"embedder_live_cpus{OF}",
          "GPUs of {{step}}": f"embedder_live_gpus{OF}"}, "short"),
    Panel("Rows of each step", {"{{step}}": f"rate(embedder_live_step_rows_total{OF}[{EVERY}])"}, "rowsps"),
    Panel("Bytes that each step hands on",
          {"{{step}}": f"rate(embedder_live_step_bytes_total{OF}[{EVERY}])"}, "binBps"),
    Panel("Part files", {"bytes": f"rate(embedder_live_part_bytes_total{OF}[{EVERY}])"}, "binBps"),
    Panel("GPU memory of each stage", {"{{step}}": f"embedder_live_gpu_peak_memory_bytes{OF}"}, "bytes",
          "Most that the tensors of one process held; 0 on CPUs."),
    Panel("Memory of each step", {"{{step}}": f"embedder_live_step_peak_memory_bytes{OF}"}, "bytes",
          "Most of one process so far."),
    Panel("Object store", {"{{step}}": f"embedder_live_object_store_bytes{OF}",
          "spilled before {{step}}": f"embedder_live_spilled_bytes_total{OF}"}, "bytes"),
    Panel("Between nodes", {"{{step}}": f"rate(embedder_live_moved_bytes_total{OF}[{EVERY}])"}, "binBps",
          "Blocks that a step took from another node."),
    Panel("Vectors a second", {"{{store}}": f"rate(embedder_live_vectors_total{OF}[{EVERY}])"}, "ops"),
    Panel("Running for", {"{{store}}": f"time() - embedder_live_started_timestamp_seconds{OF}"}, "s"),
)  # fmt: skip

FLEET = (
    Panel("Runs under way", {"runs": f"count(embedder_live_started_timestamp_seconds{OF}) or vector(0)"},
          "short", "", "number", 6),
    Panel("Stores whose last run failed", {"stores": f"count(embedder_run_exit_code{OF} != 0) or vector(0)"},
          "short", "", "number", 6),
    Panel("Stores that a rollback holds", {"stores": f"count(embedder_held{OF} == 1) or vector(0)"},
          "short", "", "number", 6),
    Panel("Oldest publication", {"age": f"max(time() - max by (store) (embedder_published_timestamp_seconds{OF}))"},
          "s", "", "number", 6),
    Panel("How each last run ended", {"{{store}}": f"embedder_run_exit_code{OF}"}, "short",
          "0: done. 2: the user's mistake. 1, and 128 + a signal: failed or stopped."),
    Panel("Age of each publication",
          {"{{store}}": f"time() - max by (store) (embedder_published_timestamp_seconds{OF})"}, "s"),
    Panel("Time since each store's last run", {"{{store}}": f"time() - embedder_run_end_timestamp_seconds{OF}"}, "s"),
    Panel("Published", {"{{store}}": f"embedder_run_published{OF}"}, "bool", "Whether the last run published."),
    Panel("How long the last runs took", {"{{store}}": f"embedder_run_duration_seconds{OF}"}, "s"),
    Panel("Items a second of the last runs", {"{{store}}": f"embedder_run_items_per_second{OF}"}, "ops"),
    Panel("What the last runs found", {"{{store}} {{what}}": 'embedder_run_count{store=~"$store", what=~'
          '"new|changed|retired|rejected|left_out"}'}, "short"),
    Panel("Figures of the last runs", {"{{store}} {{metric}}": f"embedder_run_metric{OF}"}, "short",
          "Those of each `[[metric]]` of the configuration."),
    Panel("Guards", {"{{store}} {{guard}}": f"embedder_run_guard_passed{OF}"}, "bool", "0: it refused."),
    Panel("Memory of the last runs", {"{{store}}": f"embedder_run_peak_memory_bytes{OF}"}, "bytes"),
    Panel("Where the last runs' time went", {"{{store}} {{step}}": f"embedder_run_step_seconds{OF}"}, "s"),
    Panel("CPU of the last runs", {"{{store}} {{step}}": f"embedder_run_step_cpu_seconds{OF}"}, "s"),
    Panel("Done, of those under way", {"{{store}}":
          f"embedder_live_items_total{OF} / clamp_min(embedder_live_listed_items{OF}, 1)"}, "percentunit"),
    Panel("Bytes of the last runs' steps", {"{{store}} {{step}}": f"embedder_run_step_bytes{OF}"}, "bytes"),
    Panel("Recall of the indexes", {"{{store}}": f"max by (store) (embedder_index_recall{OF})"}, "percentunit"),
)  # fmt: skip

SERVICE = (
    Panel("Requests a second", {"{{route}} {{status}}":
          f"sum by (route, status) (rate(embedder_request_seconds_count[{EVERY}]))"}, "reqps"),
    Panel("Server errors", {"share":
          f'(sum(rate(embedder_request_seconds_count{{status=~"5.."}}[{EVERY}])) or vector(0)) '
          f"/ sum(rate(embedder_request_seconds_count[{EVERY}]))"}, "percentunit", "Above 1 % somebody should look."),
    Panel("Refused", {"requests": f"sum(rate(embedder_refused_total[{EVERY}])) or vector(0)"}, "reqps",
          "With 503, as a queue was full: add replicas."),
    Panel("Time of a request", {
          "half of them": f"histogram_quantile(0.5, sum by (le) (rate(embedder_request_seconds_bucket[{EVERY}])))",
          "99 of 100": f"histogram_quantile(0.99, sum by (le) (rate(embedder_request_seconds_bucket[{EVERY}])))"}, "s"),
    Panel("Time to encode and to search", {
          "encode, 99 of 100":
          f"histogram_quantile(0.99, sum by (le) (rate(embedder_encode_seconds_bucket[{EVERY}])))",
          "search, 99 of 100":
          f"histogram_quantile(0.99, sum by (le) (rate(embedder_search_seconds_bucket[{EVERY}])))"}, "s"),
    Panel("Time to make a thumbnail", {"99 of 100":
          f"histogram_quantile(0.99, sum by (le) (rate(embedder_thumbnail_seconds_bucket[{EVERY}])))"}, "s"),
    Panel("Queries of a batch", {"mean": f"sum(rate(embedder_batch_queries_sum[{EVERY}])) / "
          f"sum(rate(embedder_batch_queries_count[{EVERY}]))"}, "short"),
    Panel("Queries that wait", {"{{instance}}": "embedder_queue_queries"}, "short"),
    Panel("Requests in flight", {"{{instance}}": "embedder_requests_in_flight"}, "short"),
    Panel("Answered from memory", {"{{cache}}": f"sum by (cache) (rate(embedder_cache_hits_total[{EVERY}])) / "
          f"(sum by (cache) (rate(embedder_cache_hits_total[{EVERY}])) + "
          f"sum by (cache) (rate(embedder_cache_misses_total[{EVERY}])))"}, "percentunit"),
    Panel("Age of what is served", {"{{instance}}": "time() - embedder_served_timestamp_seconds"}, "s"),
    Panel("Recall of the index", {"{{instance}}": "embedder_served_index_recall"}, "percentunit"),
)  # fmt: skip

DASHBOARDS = {
    "run": ("embedder: a run", RUN, "embedder_live_started_timestamp_seconds"),
    "fleet": ("embedder: a fleet of runs", FLEET, "embedder_run_exit_code"),
    "service": ("embedder: the service", SERVICE, None),
}


def text_of(name: str) -> str:
    title, panels, stores = DASHBOARDS[name]
    built = dashboard.Dashboard(title).uid(f"embedder-{name}").tags(["embedder"]).refresh("10s").time("now-1h", "now")
    built = built.timezone("browser").with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    if stores is not None:
        built = built.with_variable(_stores(stores))
    for number, panel in enumerate(panels, 1):
        built = built.with_panel(_built(panel).id(number))
    return json.dumps(_without_nulls(json.loads(JSONEncoder().encode(built.build()))), indent=1, sort_keys=True) + "\n"


def _without_nulls(tree: Any) -> Any:
    """Leave out what is not set, as Grafana itself does."""
    if isinstance(tree, dict):
        return {key: _without_nulls(value) for key, value in tree.items() if value is not None}
    return [_without_nulls(each) for each in tree] if isinstance(tree, list) else tree


def _stores(metric: str) -> dashboard.QueryVariable:
    variable = (
        dashboard.QueryVariable("store").label("store").datasource(SOURCE).query(f"label_values({metric}, store)")
    )
    variable = variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
    return variable.multi(True).include_all(True).all_value(".*")


def _built(panel: Panel) -> timeseries.Panel | stat.Panel | gauge.Panel:
    made = KINDS[panel.kind]()
    made = made.title(panel.title).datasource(SOURCE).unit(panel.unit).span(panel.width).height(HEIGHT).min(0)
    if panel.unit == "percentunit":
        made = made.max(1)
    if panel.meaning:
        made = made.description(panel.meaning)
    for letter, (legend, query) in zip("ABCD", panel.queries.items(), strict=False):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(letter).datasource(SOURCE)
        made = made.with_target(target.instant() if panel.kind != "lines" else target.range())
    return made


def main(names: Sequence[str] = tuple(DASHBOARDS)) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        (FOLDER / f"{name}.json").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
