#!/usr/bin/env python3
"""Write the dashboards of scripts/grafana: one run, a fleet of runs, the service; made by Grafana's own SDK.

python scripts/generate_dashboards.py

Each panel of `dashboards.toml` has one question, the queries that answer it, and a unit; `$store` is a variable.
"""

import json
import tomllib
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


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str  # its question
    queries: dict[str, str]  # PromQL by what stands in the legend
    unit: str = "short"  # Grafana's name of it
    meaning: str = ""  # shown where the mouse rests on the title
    kind: Literal["lines", "number", "dial"] = "lines"  # lines over time, one number, or a dial from 0 to 1
    width: int = 8  # columns


_TABLES = tomllib.loads(Path(__file__).with_name("dashboards.toml").read_text(encoding="utf-8"))
PANELS = {name: tuple(Panel(**each) for each in panels) for name, panels in _TABLES.items()}
DASHBOARDS = {
    "run": ("embedder: a run", "embedder_live_started_timestamp_seconds"),
    "fleet": ("embedder: a fleet of runs", "embedder_run_exit_code"),
    "service": ("embedder: the service", None),
}
"""Title, and the metric whose stores the variable `$store` lists."""


def text_of(name: str) -> str:
    title, stores = DASHBOARDS[name]
    built = dashboard.Dashboard(title).uid(f"embedder-{name}").tags(["embedder"]).refresh("10s").time("now-1h", "now")
    built = built.timezone("browser").with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    if stores is not None:
        built = built.with_variable(_stores(stores))
    for number, panel in enumerate(PANELS[name], 1):
        built = built.with_panel(_built(panel).id(number))
    return json.dumps(_without_nulls(json.loads(JSONEncoder().encode(built.build()))), indent=1, sort_keys=True) + "\n"


def _without_nulls(tree: Any) -> Any:
    """Leave out what is not set, as Grafana itself does."""
    if isinstance(tree, dict):
        return {key: _without_nulls(value) for key, value in tree.items() if value is not None}
    return [_without_nulls(each) for each in tree] if isinstance(tree, list) else tree


def _stores(metric: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable("store").label("store").datasource(SOURCE)
    variable = variable.query(f"label_values({metric}, store)").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.sort(VariableSort.ALPHABETICAL_ASC).multi(True).include_all(True).all_value(".*")


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
