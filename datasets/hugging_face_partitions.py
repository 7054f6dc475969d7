"""The partitioners of flwr-datasets, by class name: ``partition.name = "hf:DirichletPartitioner"``."""

from __future__ import annotations

import inspect
import io
import logging
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..errors import UserError, unknown_name
from .hub import installed
from .labels import Labels, Parts

log = logging.getLogger("fedplat")

_ROW = "fedplat-row"
_LABEL = "label"
_GROUP = "group"
_NATURAL = ("NaturalIdPartitioner", "GroupedNaturalIdPartitioner")
_NOT_OURS = {
    "Partitioner": "is the base class",
    "IdToSizeFncPartitioner": "takes a function; use Linear-, Square- or ExponentialPartitioner",
    "VerticalEvenPartitioner": "splits columns, not samples",
    "VerticalSizePartitioner": "splits columns, not samples",
}
_By = Annotated[str | None, Field(description="column; nothing: the label, or the natural client")]
_Seed = Annotated[int | None, Field(ge=0, description="nothing: drawn from the run's seed")]
_ShuffleFirst = Annotated[bool, Field(description="shuffle all samples first, as FederatedDataset does")]


def partitioner(name: str) -> Callable[..., Parts]:
    """Return a class of ``flwr_datasets.partitioner`` as a scheme whose settings are its constructor's.

    ``num_partitions`` is the scenario's number of clients. ``partition_by`` may name a column of an ``hf:``
    data set, the ``label`` or the ``group``. ``seed`` drives the partitioner and ``shuffle_first``, which
    puts all samples into the order that ``FederatedDataset`` of that seed would: with ``seed = 42`` the
    clients have exactly the samples that Flower's defaults give them. Without ``shuffle_first``,
    IidPartitioner, SizePartitioner and their like cut the data as it lies, whole classes at a time where it
    is sorted.

    Samples may be left out, as by PathologicalPartitioner, which drops classes that no client was given;
    the log tells how many. Raises UserError for a name that is not there, a column that is not there, and
    whatever the class itself refuses.

    >>> scheme = partitioner("IidPartitioner")
    >>> [len(part) for part in scheme(Labels(np.repeat([0, 1], 5), 2), 3, np.random.default_rng(0))]
    [4, 3, 3]
    """
    kind = _class_named(name)

    def scheme(view: Labels, clients: int | None, rng: np.random.Generator, **settings: Any) -> Parts:
        return _deal(kind, view, clients, rng, settings)

    own = _settings(kind)
    three = list(inspect.signature(scheme).parameters.values())[:3]
    parameters = [
        inspect.Parameter(setting, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for setting, (annotation, default) in own.items()
    ]
    scheme.__signature__ = inspect.Signature(three + parameters)  # type: ignore[attr-defined]
    scheme.__annotations__ = {setting: annotation for setting, (annotation, _) in own.items()}
    scheme.__doc__, scheme.__name__ = inspect.getdoc(kind), f"hf:{name}"
    return scheme


def _class_named(name: str) -> type[Any]:
    module = installed("flwr_datasets.partitioner")
    known = [n for n in module.__all__ if n not in _NOT_OURS]
    if name in _NOT_OURS:
        raise UserError(
            f"partition 'hf:{name}' {_NOT_OURS[name]}. Allowed: {', '.join(f'hf:{n}' for n in known)}"
        )
    if name not in known:
        raise unknown_name("partition", f"hf:{name}", [f"hf:{n}" for n in known])
    found: type[Any] = getattr(module, name)
    return found


def _settings(kind: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return annotation and default of each setting of a partitioner's class, by name."""
    hints = get_type_hints(kind.__init__)
    own: dict[str, tuple[Any, Any]] = {}
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.name == "partition_by":
            own["partition_by"] = _By, None
        elif parameter.name not in ("num_partitions", "seed"):
            own[parameter.name] = _plain(hints.get(parameter.name, Any)), parameter.default
    return own | {"seed": (_Seed, None), "shuffle_first": (_ShuffleFirst, True)}


def _plain(annotation: Any) -> Any:
    """Return an annotation with lists in the place of NumPy arrays, as a scenario file can say them."""
    if get_origin(annotation) is np.ndarray:
        return list[float] | list[list[float]]
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_plain(option) for option in get_args(annotation))]  # noqa: UP007
    return annotation


def _deal(
    kind: type[Any],
    view: Labels,
    clients: int | None,
    rng: np.random.Generator,
    settings: Mapping[str, Any],
) -> Parts:
    where, takes = f"partition 'hf:{kind.__name__}'", inspect.signature(kind).parameters
    arguments, wanted = dict(settings), clients or 0
    drawn = int(rng.integers(2**31))
    seed = arguments.pop("seed", None)
    seed = drawn if seed is None else seed
    shuffle_first = arguments.pop("shuffle_first", True)
    order = np.random.default_rng(seed).permutation(len(view)) if shuffle_first else np.arange(len(view))
    columns: dict[str, Any] = {_ROW: order}
    if "num_partitions" in takes:
        if wanted < 1:
            raise UserError(f"{where} needs a number of clients of at least 1, found {wanted}")
        arguments["num_partitions"] = wanted
    if "seed" in takes:
        arguments["seed"] = seed
    if "partition_by" in takes:
        by, values = _column(kind, view, arguments.pop("partition_by", None), where)
        arguments["partition_by"], columns[by] = by, values[order]
    if "distribution_array" in takes:
        arguments["distribution_array"] = np.asarray(arguments["distribution_array"])
    heard: list[warnings.WarningMessage] = []
    try:
        # The classes draw progress bars on stderr and print their hints there.
        with warnings.catch_warnings(record=True) as heard, redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            made = kind(**arguments)
            made.dataset = installed().Dataset.from_dict(columns)
            numbers = range(made.num_partitions)
            parts = [np.sort(np.array(made.load_partition(i)[_ROW][:], np.int64)) for i in numbers]
    except (ValueError, TypeError, KeyError, IndexError, AssertionError, ZeroDivisionError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split()) or type(error).__name__}") from error
    finally:
        for message in dict.fromkeys(str(warning.message) for warning in heard):
            log.warning("%s: %s", where, message)
    if wanted and wanted != len(parts):
        if kind.__name__ not in _NATURAL or wanted > len(parts):
            raise UserError(f"{where} makes {len(parts)} clients, and clients = {wanted} were asked for")
        parts = [parts[i] for i in np.sort(rng.choice(len(parts), wanted, replace=False))]
    if left_out := len(view) - sum(len(part) for part in parts):
        log.warning("%s: %d of %d training samples belong to no client", where, left_out, len(view))
    return parts


def _column(kind: type[Any], view: Labels, name: str | None, where: str) -> tuple[str, NDArray[np.generic]]:
    """Return the column to deal by: one of the data set's own, the label or the natural client."""
    columns: dict[str, NDArray[np.generic]] = {}
    if view.groups is not None:
        columns[_GROUP] = np.array(view.group_names)[view.groups] if view.group_names else view.groups
    if view.labels.ndim == 1:
        columns[_LABEL] = np.asarray(view.labels)
    columns |= view.columns
    if name is None and kind.__name__ in _NATURAL and view.groups is None:
        raise UserError(
            f"{where}: the samples of {view.name} are not grouped by user; set partition.partition_by to one "
            f"of {', '.join(sorted(columns))}"
        )
    if name is None:
        name = _GROUP if kind.__name__ in _NATURAL else _LABEL
        if name == _LABEL and view.labels.ndim == 1:
            return name, np.asarray(view.labels)
    if name not in columns:
        raise UserError(f"{where}: partition_by: {unknown_name('column', name, columns)}")
    return name, columns[name]
