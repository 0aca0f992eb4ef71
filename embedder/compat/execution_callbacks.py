"""Selection of the callbacks that Ray Data creates for each dataset that it executes."""

from embedder.compat.draining import EARLY_END, PACE, STATES, STEADY_POOLS


def select_callbacks() -> list[type]:
    """Return the classes of callbacks that Ray Data is to create for each dataset that it executes."""
    callbacks: list[type] = []
    if PACE.saves_time():
        from embedder.compat.ray_callbacks import LoopPace

        callbacks.append(LoopPace)
    if STEADY_POOLS.saves_time():
        from embedder.compat.steady_pools import SteadyPools

        callbacks.append(SteadyPools)
    if EARLY_END.is_there():
        from embedder.compat.ray_callbacks import DrainOnStop, EndStagesOnFailure

        callbacks += [DrainOnStop, EndStagesOnFailure]
    if STATES.is_there():
        from embedder.compat.operator_readings import OperatorReadings

        callbacks.append(OperatorReadings)
    return callbacks
