"""Compute dtype of a run whose configuration says `auto`. Pure.

bfloat16 on GPUs that support it natively, float16 on older ones, float32 on CPUs, where every machine gives the same
bits. A run has one dtype, which all its GPUs must support.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from embedder.config import ComputeSettings
from embedder.config_toml.run_sections import ComputeDtype
from embedder.errors import ConfigError, StoreError
from embedder.placement.placement import Node
from embedder.quantities import agree
from shards.planning.devices import OLDER_GPUS, DeviceType, knows_gpu

FIRST_WITH_BF16 = (8, 0)
"""Compute capability of Ampere."""


@dataclass(frozen=True)
class Gpu:
    """GPU, as far as it is known: its type's name by driver or Ray, and its compute capability.

    The capability is None if its driver was not asked, so that only the name is known.
    """

    name: str
    capability: tuple[int, int] | None = None

    @property
    def computes_bf16(self) -> bool:
        """Whether it computes in bfloat16 natively; assumed for unknown types."""
        if self.capability is not None:
            return self.capability >= FIRST_WITH_BF16
        return self.name not in OLDER_GPUS

    @property
    def is_known(self) -> bool:
        """Whether that is more than an assumption."""
        return self.capability is not None or knows_gpu(self.name)

    def __str__(self) -> str:
        level = self.capability
        return self.name if level is None else f"{self.name} (compute capability {level[0]}.{level[1]})"


UNKNOWN_GPU = Gpu("GPU")


@dataclass(frozen=True)
class DtypeChoice:
    """Compute dtype, never `auto`, and the reason for it, for the log.

    `store` is the address of the store that it was read from, if any; `was_asked` says whether the configuration names
    it.
    """

    dtype: ComputeDtype
    reason: str
    store: str | None = None
    was_asked: bool = False

    def __str__(self) -> str:
        return self.dtype if self.was_asked else f'{self.dtype} (dtype = "auto"): {self.reason}'

    def apply_to(self, compute: ComputeSettings) -> ComputeSettings:
        """Return the settings with this dtype."""
        return replace(compute, dtype=self.dtype)


Gpus = Sequence[Gpu] | None
"""GPUs that stages may compute on; None if it is unknown whether there are any."""


def choose_dtype(
    compute: ComputeSettings,
    gpus: Callable[[], Gpus],
    *,
    recorded: tuple[str, str] | None = None,
    planned: str | None = None,
) -> DtypeChoice:
    """Follow the configuration; for `auto`, the store, else the plan file, else the devices.

    `gpus` is called only if they decide. `recorded` has the address of an existing store and the dtype that it records,
    `planned` the dtype of the plan file. Raises `StoreError` if the store records a dtype that this release doesn't
    know.
    """
    if compute.dtype != "auto":
        return DtypeChoice(compute.dtype, "as configured", was_asked=True)
    if recorded is not None:
        store, dtype = recorded
        return DtypeChoice(_check_dtype(store, dtype), f"store {store} is computed in it", store)
    if planned is not None:
        return DtypeChoice(_check_dtype(f"plan {compute.plan}", planned), f"plan {compute.plan} is made for it")
    return choose_by_gpus(gpus() if compute.may_use_gpus else ())


def choose_by_gpus(gpus: Gpus) -> DtypeChoice:
    """Choose by the GPUs that stages may compute on; an empty tuple means that they compute on CPUs."""
    if gpus is None:
        return DtypeChoice(
            "float32", "it is not known which GPUs there are; --dtype bfloat16 is for those from A100 on"
        )
    if not gpus:
        return DtypeChoice("float32", "the stages compute on CPUs")
    older = _names(gpu for gpu in gpus if not gpu.computes_bf16)
    if older:
        return DtypeChoice("float16", f"{_join_names(older)} {_do_not(older)} compute in bfloat16 natively")
    if unknown := _names(gpu for gpu in gpus if not gpu.is_known):
        return DtypeChoice(
            "bfloat16", f"{_join_names(unknown)} is not in the table, and GPUs from A100 on compute in it"
        )
    names = _names(gpus)
    return DtypeChoice("bfloat16", f"{_join_names(names)} {agree(len(names), 'computes', 'compute')} in it natively")


def gpus_of_fleet(devices: Iterable[DeviceType]) -> tuple[Gpu, ...]:
    """Return the GPUs among devices of the planner's table, such as `A100:80GB`."""
    return tuple(Gpu(each.name.partition(":")[0]) for each in devices if each.kind == "gpu")


def gpus_of_nodes(nodes: Iterable[Node]) -> tuple[Gpu, ...]:
    """Return the GPUs of Ray's nodes; one for each node that has any."""
    return tuple(Gpu(node.gpu_type or UNKNOWN_GPU.name) for node in nodes if node.num_gpus)


def check_dtype(choice: DtypeChoice, gpus: Gpus) -> None:
    """Refuse to continue in a store's dtype on devices that don't support it; a dtype that is asked for is accepted.

    Raises `ConfigError` if they don't; the message names the dtype that they support.
    """
    if choice.store is None or gpus is None:
        return
    found = f"dtype: the vectors of store {choice.store} are computed in {choice.dtype}, and "
    older = _names(gpu for gpu in gpus if not gpu.computes_bf16)
    if choice.dtype == "float16" and not gpus:
        raise ConfigError(
            f"{found}CPUs, on which the stages are here, don't compute in it; run it where there are GPUs, or give "
            "--dtype float32, whose vectors can be compared with them"
        )
    if choice.dtype == "bfloat16" and older:
        raise ConfigError(
            f"{found}{_join_names(older)} {_do_not(older)} compute in it natively; run it on GPUs from A100 on, or "
            "give --dtype float16, whose vectors can be compared with them"
        )


def describe_dtype(choice: DtypeChoice, gpus: Gpus) -> str:
    """Say in a line what `auto` has chosen and why, and what would be faster."""
    best = choose_by_gpus(gpus).dtype
    is_slow = choice.dtype == "float32" and best != "float32"
    return f"dtype {choice}" + (f"; the GPUs here are faster in {best}: --dtype {best}" if is_slow else "")


def _check_dtype(where: str, dtype: str) -> ComputeDtype:
    for known in get_args(ComputeDtype):
        if dtype == known:
            return cast("ComputeDtype", known)
    raise StoreError(
        f"{where}: it says dtype {dtype!r}, and this release computes in {', '.join(get_args(ComputeDtype))}; "
        "give one of them with --dtype"
    )


def _names(gpus: Iterable[Gpu]) -> list[str]:
    return sorted({str(gpu) for gpu in gpus})


def _join_names(names: Sequence[str]) -> str:
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def _do_not(names: Sequence[str]) -> str:
    return agree(len(names), "doesn't", "don't")
