"""What a model costs on this machine."""

from embedder.config import RunConfig
from embedder.run.job import Model
from shards.planning.costs import HostCosts, ModelCosts


def costs_for_this_machine(config: RunConfig, model: Model) -> tuple[ModelCosts, HostCosts]:
    """Seconds of the model on a device of this machine, and of its items on the host: measured, or as kept from before.

    Args:
        config: the run.
        model: the model folder.
    """
    from embedder.planning.measured import measured_costs

    return measured_costs(config, model)
