"""What hooks receive: frozen structs that may grow, so a plugin never breaks when a field is added.

What a class must *do* is never a field: it is a feature that the query asks for and the class lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvdock import dtypes
from kvdock.device import DeviceInfo
from kvdock.layout import TARGET, Buffer, LayerGroup, Space
from kvdock.model import LayerSpec, ModelSpec
from kvdock.options import CacheOptions, Parallelism

if TYPE_CHECKING:
    from kvdock.allocators.base import Allocator
    from kvdock.pools.base import Pool


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A published config in one role: ``target``, ``draft`` (a model of its own) or ``mtp``."""

    config: Mapping[str, Any]
    role: str = "target"
    name: str = ""

    @property
    def architecture(self) -> str:
        """The first of the config's ``architectures``, or an empty string."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def model_type(self) -> str:
        """The config's ``model_type``, or an empty string."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else ""


class OptionsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for defaults: the user's own options, before any default is filled in."""

    model: ModelSpec
    options: CacheOptions
    parallel: Parallelism
    device: DeviceInfo


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What every later query holds. `options` are resolved; `worker` is ``target`` or a draft's name."""

    model: ModelSpec
    options: CacheOptions
    parallel: Parallelism
    device: DeviceInfo
    worker: str = TARGET

    @property
    def model_dtype(self) -> str:
        """The model's data type, by its full name."""
        chosen = self.options.model_dtype
        return dtypes.find(self.model.dtype if chosen in (None, "auto") else str(chosen)).name

    @property
    def kv_dtype(self) -> str:
        """The data type that keys and values are kept in, by its full name."""
        chosen = self.options.kv_cache_dtype
        return self.model_dtype if chosen in (None, "auto") else dtypes.find(str(chosen)).name

    @property
    def context_length(self) -> int:
        """Longest request in tokens."""
        return self.options.context_length or self.model.context_length


class GroupQuery(Query, frozen=True, kw_only=True):
    """Asks how layers form groups. `layers` are this rank's own: pairs of global id and spec."""

    layers: tuple[tuple[int, LayerSpec], ...]
    target: ModelSpec


class StateQuery(Query, frozen=True, kw_only=True):
    """Asks for the size rules of spaces, once for all workers.

    `groups` are this rank's; `all_groups` those of every layer and draft, whatever the rank. Which spaces there are
    follows the latter, so that all ranks number their slots alike.
    """

    groups: tuple[LayerGroup, ...]
    all_groups: tuple[LayerGroup, ...]


class PoolQuery(Query, frozen=True, kw_only=True):
    """Asks for the pool class of one group; without a group, for the class that routes by layer.

    `spaces` holds page size, window and rule of each space; `groups` all groups of this worker.
    """

    kind: str
    group: LayerGroup | None
    spaces: Mapping[str, Space]
    groups: tuple[LayerGroup, ...] = ()

    @property
    def space(self) -> Space:
        """The space of the group that is asked about."""
        if self.group is None:
            raise LookupError("a query without a group has no single space; read query.spaces")
        return self.spaces[self.group.space]

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks share the tokens between them (``dcp_size``); of a draft every rank keeps them all."""
        return self.parallel.dcp_size > 1 and self.worker == TARGET

    @property
    def store_dtype(self) -> str:
        """The data type of the tensors that hold keys and values (bytes for 8-bit floats)."""
        return dtypes.find(self.kv_dtype).storage

    @property
    def prefill_backend(self) -> str | None:
        """Attention backend of prefill."""
        return self.options.prefill_attention_backend or self.options.attention_backend

    @property
    def decode_backend(self) -> str | None:
        """Attention backend of decode."""
        return self.options.decode_attention_backend or self.options.attention_backend


class AllocatorQuery(Query, frozen=True, kw_only=True):
    """Asks for the allocator of one space, or of several in step (a composite).

    `inner` holds, for a composite, the class that the hooks gave for each of its spaces.
    """

    spaces: tuple[Space, ...]
    groups: tuple[LayerGroup, ...] = ()
    inner: Mapping[str, type[Allocator]] = {}


class RequestQuery(Query, frozen=True, kw_only=True):
    """Asks for the request-pool class; `columns` is the width of a row of the request table."""

    spaces: Mapping[str, Space]
    groups: tuple[LayerGroup, ...]
    columns: int


class PlanQuery(Query, frozen=True, kw_only=True):
    """Asks validators for objections: everything that is decided but the sizes.

    `pools` is empty where some part of the plan has no class: what is said against it is reported with that.
    `buffers` are all that those pools declare, each with its group as `owner`. `loaded` are the names of all plugins that
    are asked.
    """

    groups: tuple[LayerGroup, ...]
    spaces: Mapping[str, Space]
    pools: Mapping[str, type[Pool]] = {}
    buffers: tuple[Buffer, ...] = ()
    loaded: frozenset[str] = frozenset()
