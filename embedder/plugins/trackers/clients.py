"""Clients of MLflow and of Weights & Biases, called by a tracker's thread; no other module imports these packages."""

import os
import re
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from embedder.config_toml.sections import TrackerConfig

MAX_CHARACTERS = 500  # of a parameter or tag; all versions of MLflow take as many
MAX_PARAMETERS = 100  # of one call to MLflow
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Settings of MLflow's client unless the environment has them: it would retry for minutes, and report its usage."""

_REFUSED = re.compile(r"[^\w/.:\- ]")  # of names, by MLflow


class MlflowClient:
    """Run of MLflow, only through its client: global state stays untouched, as the process may track its own runs."""

    @staticmethod
    def check(config: TrackerConfig) -> None:
        """Raise ValueError where keys of `[tracker]` don't fit together."""
        if config.uri is None:
            raise ValueError('kind = "mlflow" needs uri: sqlite:////ABSOLUTE/FILE.db, or the address of a server')
        if config.offline or config.folder is not None:
            raise ValueError(
                'kind = "mlflow" takes no offline and no folder; without a server write uri = "sqlite:///..."'
            )

    def __init__(self, config: TrackerConfig) -> None:
        self._config = config
        self._client: Any = None
        self._run_id = ""

    def begin(self, name: str, parameters: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """Begin a run in the experiment, which is created if missing."""
        for key, value in DEFAULTS.items():
            os.environ.setdefault(key, value)
        make, entities = import_module("mlflow.tracking").MlflowClient, import_module("mlflow.entities")
        self._client = make(tracking_uri=self._config.uri)
        experiment = self._client.get_experiment_by_name(self._config.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._config.experiment)
        self._run_id = self._client.create_run(number, run_name=name, tags=_short(tags)).info.run_id
        given = [entities.Param(key, value) for key, value in _short(parameters).items()]
        for begin in range(0, len(given), MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=given[begin : begin + MAX_PARAMETERS])
        return self._run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values, with the current time."""
        make, now_ms = import_module("mlflow.entities").Metric, int(time.time() * 1000)
        metrics = [make(_name(key), value, now_ms, step) for key, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Add files as artifacts."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = _write_file(Path(folder), name, content)
                self._client.log_artifact(self._run_id, str(path), name.rpartition("/")[0] or None)

    def end(self, *, succeeded: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id, "FINISHED" if succeeded else "FAILED")


class WandbClient:
    """Run of Weights & Biases, online or offline."""

    def __init__(self, config: TrackerConfig) -> None:
        self._config = config
        self._run: Any = None

    def begin(self, name: str, parameters: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """Begin a run in the project."""
        wandb = import_module("wandb")
        folder = Path(self._config.folder).expanduser() if self._config.folder else Path.cwd()
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._config.experiment,
            name=name,
            config={**parameters, **tags},
            dir=str(folder),
            mode="offline" if self._config.offline else "online",
            reinit="create_new",
            settings=wandb.Settings(base_url=self._config.uri, console="off", silent=True)
            if self._config.uri
            else wandb.Settings(console="off", silent=True),
        )
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values; those for a step that was logged before are added to it."""
        self._run.log(dict(values), step=step)

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Copy files next to the run's own; W&B writes a `config.yaml` there, too."""
        for name, content in files.items():
            path = _write_file(Path(self._run.dir), name, content)
            self._run.save(str(path), base_path=self._run.dir, policy="end")

    def end(self, *, succeeded: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if succeeded else 1)


def _write_file(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _short(values: Mapping[str, str]) -> dict[str, str]:
    return {_name(key): value[:MAX_CHARACTERS] for key, value in values.items()}


def _name(key: str) -> str:
    """Return the name of a figure or a setting as MLflow takes it; one other name would cost the whole call."""
    return _REFUSED.sub("_", key)
