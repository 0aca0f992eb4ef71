"""What a model costs on this machine."""

from embedder.config import RunConfig
from embedder.run.job import Model
from shards.planning.costs import HostCosts, ModelCosts, estimate_costs, estimate_host
from shards.planning.devices import DEVICES


def costs_for_this_machine(config: RunConfig, model: Model) -> tuple[ModelCosts, HostCosts]:
    """Seconds of the model on a device of this machine, and of its items on the host.

    Args:
        config: the run.
        model: the model folder.
    """
    return estimate_costs(model.config, DEVICES["CPU"], config.dtype), estimate_host(model.config)
