"""Schema of a run's report."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from embedder.store.layout import Kind


class ReportSection(BaseModel):
    """Base of the report and its sections."""

    model_config = ConfigDict(frozen=True)


class StepReport(ReportSection):
    """One step: decode, stage 0, stage 1, ..., write."""

    step: str
    num_calls: int
    num_rows: int
    wall_s: float
    cpu_s: float
    wall_share: float
    """Share of its time that one replica spent inside the step."""
    cpu_share: float
    """CPU seconds over the same time; above 1 if several threads or processes worked."""
    bytes_out: int
    bytes_per_row: float
    peak_rss_bytes: int
    replicas: tuple[tuple[float, int], ...] = ()
    """For a stage: (seconds since the first call, number of working replicas) at each change."""
    num_frames: int = 0
    """For decode: embedded video frames."""
    num_decoded_frames: int = 0
    """For decode: video frames that were decoded to get these."""
    num_cut_captions: int = 0
    """For decode: captions that are longer than a model's limit."""
    num_cut_characters: int = 0
    """For decode: characters at their ends that no tower sees."""
    waited_input_s: float = 0.0
    """For a stage on GPUs: seconds between its calls without computing, because the step before had no input."""
    waited_driver_s: float = 0.0
    """The same, while Ray's driver had not sent the input to the stage's process."""
    waited_store_s: float = 0.0
    """The same, while it came from the object store."""
    waited_unpack_s: float = 0.0
    """The same, while it was unpacked and grouped."""
    waited_copy_s: float = 0.0
    """The same, while inputs were copied to them."""
    waited_launch_s: float = 0.0
    """The same, until the first kernel of a batch was launched."""
    product_share: float | None = None
    """For a stage on GPUs: operations of its layers per second of computing, over those of wide matrix products."""
    notes: tuple[str, ...] = ()
    """For a stage: lines of its processes, such as why their layers could not be compiled."""

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas at work at once."""
        return max((number for _, number in self.replicas), default=1)


class LoadReport(ReportSection):
    """Start of one stage's process, which loads its shard and imports the libraries for it."""

    stage: int
    pid: int
    started_s: float
    wall_s: float
    peak_rss_bytes: int
    device_speed: dict[str, float] = {}
    """For a stage on a GPU: its measured speed (`shards.planning.planning_costs.DeviceSpeed`)."""


class PlaceReport(ReportSection):
    """Device that a stage computed on, and resources that each of its replicas reserved."""

    stage: int
    device: str
    """torch device type: cpu or cuda."""
    num_cpus: float
    num_gpus: float
    num_threads: int


class NodeReport(ReportSection):
    """Node of the cluster, or the machine; nodes of one host are reported as one."""

    name: str
    num_cpus: float
    num_gpus: float = 0.0
    gpu_type: str | None = None
    steps: tuple[str, ...] = ()
    """Steps that computed there."""
    peak_memory_bytes: int = 0
    """Sum of the peaks of the run's processes there."""


class EventReport(ReportSection):
    """Change of the cluster, or of the run's part of it, during the run."""

    at_s: float
    """Seconds since the command's start."""
    text: str
    """One line, as on the terminal: `node 10.0.0.7 is lost: 2 replicas restart elsewhere`."""


class OperatorReport(ReportSection):
    """Operator of Ray Data over the whole run: what it held, and why it waited."""

    name: str
    """`decode`, `stage 0`, ..., `write`."""
    max_queued_blocks: int
    max_tasks: int
    max_object_store_bytes: int
    num_cpus: float
    """Peak; GPUs likewise."""
    num_gpus: float
    busy_share: float
    """Share of the seconds of its replicas or task slots in which they worked."""
    backpressure_s: float
    """Seconds in which it could not start a task: the next operator was full, or its CPUs were in use."""
    spilled_bytes: int = 0
    """Bytes of its input blocks that were on disk before it had processed them."""


class Expected(ReportSection):
    """Prediction of this run by the costs, for the mix of items that it processed."""

    source: str
    """`measured` or `estimated` costs."""
    items_per_s: float
    bottleneck: str
    seconds_per_item: dict[str, float]
    """By step; of one replica for stages, CPU seconds for the others."""


class BetterPlan(ReportSection):
    """A cut that would have been faster."""

    path: str
    """The plan file."""
    gain: float
    """Predicted items per second, relative to the prediction for the cut that ran."""
    reason: str


class Review(ReportSection):
    """Review of a run's plan."""

    images_per_item: float
    captions_per_item: float
    caption_tokens: int
    """Mean of the captions, including the padding that is computed."""
    observed_seconds_per_item: dict[str, float]
    """By step: CPU seconds per item; for a stage on a GPU or with several threads, seconds of a replica."""
    expected: Expected | None = None
    better: BetterPlan | None = None
    too_short: str | None = None
    """Why the run says nothing about its plan; None if it does."""


class ModelReport(ReportSection):
    """Part of a run that was for a further model."""

    model: str
    """Its folder or file."""
    reasons: dict[str, int] = {}
    """Items that were to be computed, by reason."""
    num_items: int = 0
    num_rejected: int = 0
    num_vectors: int = 0
    """Rows of its table."""
    num_equal: int = 0
    num_retired: int = 0
    num_left: int = 0


class Report(ReportSection):
    """`runs/<run_id>/report.json`; by default of a command that made no run."""

    kind: Kind = "embed"
    run_id: str | None = None
    """None if there was nothing to do, and therefore no run."""
    engine: str = "none"
    engine_reason: str = "nothing to embed"
    published: bool = False
    outcome: str = ""
    held: bool = False
    """Whether a rollback holds the store, so that nothing was done."""
    started_at: datetime
    wall_s: float
    startup_s: float = 0.0
    """From the command to the first row inside a step."""
    num_new: int = 0
    num_changed: int = 0
    num_unchanged: int = 0
    """Listed items that were not touched: published, or finished by an earlier session of the run."""
    reasons: dict[str, int] = {}
    """Items that were to be embedded, by reason."""
    num_retired: int = 0
    """Items that left the store because they are not listed any more."""
    num_taken_over: int = 0
    """Items whose content a publication or another item of this run has, so that no model computed them."""
    taken_from: dict[str, int] = {}
    """Those items, by the run of that publication; this run's own id for copies within it."""
    num_equal: int = 0
    """Items with another size or time but the same content: their vectors stay, and no model computed them."""
    num_checked: int = 0
    """Unchanged items that this session read to compare their content."""
    num_differing: int = 0
    """Of these, items whose content was another: embedded again, or rejected."""
    differing: tuple[str, ...] = ()
    """Ids of those items, the first hundred."""
    num_cut_captions: int = 0
    """Captions that this session read, and that are longer than the model's limit (`max_caption_tokens`)."""
    num_cut_characters: int = 0
    """Characters at their ends that no tower saw."""
    caption_places: dict[str, int] = {}
    """Captions that this session read, by the place where they were found; `given`: by a table, a tar or a join."""
    max_caption_tokens: int | None = None
    """The main model's limit, with special tokens; None for a model without a text tower."""
    num_stale: int = 0
    """Items that can't be read any more and keep their old vectors."""
    ignored: dict[str, int] = {}
    """Embedded items whose captions or images were ignored: the model has no tower for them."""
    num_left: int = 0
    """Items that a limit left for the next refresh."""
    other_files: dict[str, int] = {}
    """Files of the sources that are no media, by suffix; none of them is an item."""
    unreadable: dict[str, int] = {}
    """Images and clips of kinds that this version can't read, by kind."""
    num_other_files: int = 0
    num_unreadable: int = 0
    num_junk: int = 0
    """Files that systems and programs leave behind; a folder of them counts as one."""
    num_sidecars: int = 0
    """Files other than captions that belong to an item."""
    num_excluded: int = 0
    num_orphan_captions: int = 0
    """`.txt` and `.json` files that belong to no image or video, and don't become items."""
    num_kept_captions: int = 0
    """Such files that stay items because they already were in the store."""
    num_json_without_caption: int = 0
    """`.json` files of items that this run embedded, with no caption key."""
    """Names that match `exclude`, or don't match `include`."""
    guards: tuple[dict[str, Any], ...] = ()
    """Verdict of each guard, and whether it was overridden."""
    num_items: int = 0
    """Items finished by this session and earlier ones of the same run."""
    num_rejected: int = 0
    num_vectors: int = 0
    num_reject_vectors: int = 0
    """Of these rows, those of rejects: the caption of a broken picture, or what could be decoded."""
    items_per_s: float = 0.0
    """Items of this session over `window_s`."""
    window_s: float = 0.0
    """Seconds from the first call of a step to the end of the last."""
    engine_cores: float | None = None
    """CPU seconds per second that no step accounts for, once all stages were up: Ray's own; None on a cluster."""
    steady_items_per_s: float | None = None
    """Items per second once all stages were up; None if the run was too short."""
    observed_bottleneck: str | None = None
    """Step that the others were observed to wait for; None if the run was too short."""
    nodes: tuple[NodeReport, ...] = ()
    events: tuple[EventReport, ...] = ()
    operators: tuple[OperatorReport, ...] = ()
    spilled_bytes: int = 0
    """Bytes of blocks that Ray's object stores had moved to disk before a step had processed them."""
    moved_bytes: int | None = None
    """Bytes of blocks that a stage fetched from another node; None for a run in one process."""
    cost_per_million: float | None = None
    """Cost of a million items at this run's rate, by `[prices]`; None if a device that the run held has no price.

    The run held the whole machine, or on a cluster what its steps reserved.
    """
    currency: str | None = None
    """Currency of `cost_per_million`; None if the configuration names none."""
    peak_memory_bytes: int = 0
    """Memory of all processes of the run on this machine, each shared page counted once (PSS)."""
    models: dict[str, ModelReport] = {}
    """Further models by name."""
    metrics: dict[str, dict[str, Any]] = {}
    """Figures of each [[metric]] by name, over the rows of all sessions of the run."""
    removed_models: tuple[str, ...] = ()
    """Models that left the store with this run because the configuration no longer has them."""
    steps: tuple[StepReport, ...] = ()
    loads: tuple[LoadReport, ...] = ()
    """When each stage's process read its weights; on Ray they start together, so these overlap."""
    places: tuple[PlaceReport, ...] = ()
    """By stage."""
    plan: list[dict[str, Any]] = []
    review: Review | None = None
    """The run compared with its plan; only on Ray."""
    versions: dict[str, str]
