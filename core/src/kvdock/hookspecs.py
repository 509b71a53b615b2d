"""The hook contract between kvdock and its plugins.

A plugin is a module or an object with methods marked `hookimpl`, found through an entry point in one
of the groups `GROUPS`; the group is the plugin's tier. It states the contract that it was written for
in an attribute ``kvdock_contract = "0.1"``. Hooks run while planning and building, never per token.

Optional attributes of a plugin: ``layer_params``, a mapping of each layer kind that a family invented
to its `LayerParams` subclass (needed to read such models from a plan file).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from kvdock.device import DeviceInfo
from kvdock.layout import LayerGroup, Space
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions
from kvdock.queries import (
    AllocatorQuery,
    GroupQuery,
    ModelQuery,
    OptionsQuery,
    PlanQuery,
    PoolQuery,
    RequestQuery,
    StateQuery,
)

if TYPE_CHECKING:
    from kvdock.allocators.base import Allocator
    from kvdock.kernels.interface import Kernels
    from kvdock.pools.base import Pool
    from kvdock.requests.base import RequestPool

CONTRACT = "0.1"
"""Version of this contract. While it is 0.x, a plugin loads when its contract is the same."""

PROJECT = "kvdock"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

TIERS = ("core", "hardware", "family", "variant")
"""From the least to the most specific; the most specific claim that fits wins."""

GROUPS: Mapping[str, str] = {
    "kvdock.hardware": "hardware",
    "kvdock.families": "family",
    "kvdock.variants": "variant",
}
"""Entry-point group → tier."""


class KVDockSpecs:
    """Every hook of the contract. All take one query, all may decline with ``None``."""

    @hookspec
    def read_model(self, query: ModelQuery) -> ModelSpec | None:
        """Read a published config into a model.

        Called once per model while planning. ``None`` means that this family does not know the config.
        The most specific tier wins; two families that both read one config are an error.

        Example:
            >>> from kvdock import LayerSpec, MHAParams, ModelSpec, hookimpl
            >>> class AcmeFamily:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def read_model(self, query):
            ...         if query.model_type != "acme":
            ...             return None
            ...         layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=8, head_dim=64, v_head_dim=64))
            ...         return ModelSpec(name=query.name, architecture=query.architecture, family="acme",
            ...                          layers=(layer,) * 4, context_length=4096, dtype="bfloat16")

        Contract: 0.1 added.
        """

    @hookspec
    def get_option_defaults(self, query: OptionsQuery) -> Mapping[str, Any] | None:
        """Give defaults for options that the user left open.

        Called once per plan. Answers are merged option by option, the most specific tier winning; two
        different values of one tier are an error. The source is kept in the plan.

        Example:
            >>> from kvdock import hookimpl
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def get_option_defaults(self, query):
            ...         return {"page_size": 64} if query.device.device_type == "acme" else None

        Contract: 0.1 added.
        """

    @hookspec
    def group_layers(self, query: GroupQuery) -> tuple[LayerGroup, ...] | None:
        """Sort a rank's layers into groups; a layer may be in several.

        Called once per worker. ``None`` leaves the model to the core, which groups by kind, space and
        window. Asked of families with spaces of their own.

        Example:
            >>> from kvdock import LayerGroup, hookimpl
            >>> class RingFamily:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def group_layers(self, query):
            ...         if query.model.family != "ring":
            ...             return None
            ...         return (LayerGroup(name="ring", kind="ring", space="ring", layers=query.layers),)

        Contract: 0.1 added.
        """

    @hookspec
    def size_state_pools(self, query: StateQuery) -> Mapping[str, Space] | None:
        """Declare the spaces of a family or device: page size, window and size rule, as data.

        Called once per plan, after the layers are grouped and before any pool is chosen. Answers are
        merged space by space, the most specific tier winning. Core declares ``full``, ``swa`` and
        ``requests`` where groups need them.

        Example:
            >>> from kvdock import SizeRule, Space, hookimpl
            >>> class RingFamily:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def size_state_pools(self, query):
            ...         if query.model.family != "ring":
            ...             return None
            ...         rule = SizeRule(per_request=(8, 1))
            ...         return {"ring": Space(name="ring", rule=rule, issued_by="derived")}

        Contract: 0.1 added.
        """

    @hookspec
    def get_pool_cls(self, query: PoolQuery) -> type[Pool] | None:
        """Name the pool class for one layer group.

        Called once per group while planning, and once more per worker with ``group=None`` for the class
        that an engine sees as ``token_to_kv_pool``. The device in the query is a profile and may not be
        present. ``None`` declines. The most specific tier whose class has the device type and every
        feature asked for wins; two such claims of one tier are an error.

        Example:
            >>> from kvdock import hookimpl
            >>> from kvdock.pools import MHAPool
            >>> class AcmePool(MHAPool):
            ...     device_types = frozenset({"acme"})
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def get_pool_cls(self, query):
            ...         is_ours = query.device.device_type == "acme" and query.group is not None
            ...         return AcmePool if is_ours and query.kind == "mha" else None

        Contract: 0.1 added.
        """

    @hookspec
    def get_allocator_cls(self, query: AllocatorQuery) -> type[Allocator] | None:
        """Name the allocator class for one space, or for several spaces in step.

        Called once per space that an allocator issues, then once with all of them if there are several;
        the composite receives the classes of its parts in ``query.inner``.

        Example:
            >>> from kvdock import hookimpl
            >>> from kvdock.allocators import PagedAllocator
            >>> class AcmeAllocator(PagedAllocator):
            ...     device_types = frozenset({"acme"})
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def get_allocator_cls(self, query):
            ...         is_ours = query.device.device_type == "acme"
            ...         return AcmeAllocator if is_ours and len(query.spaces) == 1 else None

        Contract: 0.1 added.
        """

    @hookspec
    def get_request_pool_cls(self, query: RequestQuery) -> type[RequestPool] | None:
        """Name the request-pool class: request row → token slots.

        Called once per plan.

        Example:
            >>> from kvdock import hookimpl
            >>> from kvdock.requests import ReqToTokenPool
            >>> class RingRequests(ReqToTokenPool):
            ...     pass
            >>> class RingFamily:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def get_request_pool_cls(self, query):
            ...         return RingRequests if query.model.family == "ring" else None

        Contract: 0.1 added.
        """

    @hookspec
    def validate_prefill_only(self, query: PlanQuery) -> str | tuple[str, ...] | None:
        """Object to running prefill-only work without a KV cache; ``None`` means no objection.

        Called when `prefill_only_disable_kv_cache` is set. Every plugin is asked and all objections are
        reported.

        Example:
            >>> from kvdock import hookimpl
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def validate_prefill_only(self, query):
            ...         return "acme's attention reads the cache" if query.device.device_type == "acme" else None

        Contract: 0.1 added.
        """

    @hookspec
    def validate_plan(self, query: PlanQuery) -> str | tuple[str, ...] | None:
        """Object to a plan: a page size, a layout, a device too old; a tuple of several. ``None``: no objection.

        Called once per worker, before sizes are solved. Every plugin is asked and all objections are
        reported.

        Example:
            >>> from kvdock import hookimpl
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def validate_plan(self, query):
            ...         page_size = query.options.page_size or 1
            ...         if query.device.device_type != "acme" or page_size % 16 == 0:
            ...             return None
            ...         return f"page_size={page_size} is no multiple of 16; give 16 or 64"

        Contract: 0.1 added.
        """

    @hookspec
    def probe_device(self, selector: str) -> DeviceInfo | None:
        """Describe a live device: ``"0"`` of ``cuda:0``, or an empty string for the default one.

        Called at the edge only, of the plugin that the selector names or, without one, of every
        hardware plugin. ``None`` means that no such device is here. May import the vendor's SDK.

        Example:
            >>> from kvdock import DeviceInfo, hookimpl
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def probe_device(self, selector):
            ...         if selector not in ("", "0"):
            ...             return None
            ...         return DeviceInfo(device_type="acme", name="acme-1", total_bytes=2**34,
            ...                           free_before_load_bytes=2**34, free_bytes=2**33, index=0)

        Contract: 0.1 added.
        """

    @hookspec
    def device_catalogue(self) -> Mapping[str, DeviceInfo] | None:
        """List device profiles by name, for planning without the device.

        Called at the edge when a device is named or listed. Names are unique over all plugins; each
        profile says in `source` where its usable bytes come from.

        Example:
            >>> from kvdock import DeviceInfo, hookimpl
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def device_catalogue(self):
            ...         usable = 15 * 2**30
            ...         return {"acme-1": DeviceInfo(device_type="acme", name="acme-1", total_bytes=2**34,
            ...                 free_before_load_bytes=usable, free_bytes=usable, source="data sheet")}

        Contract: 0.1 added.
        """

    @hookspec
    def get_kernels(self, device: DeviceInfo, options: CacheOptions) -> Kernels | None:
        """Give the kernel set for a device, under the resolved options of a plan.

        Called once while building. ``None`` leaves the torch reference kernels in place.

        Example:
            >>> from kvdock import hookimpl
            >>> class AcmePlugin:
            ...     kvdock_contract = "0.1"
            ...     @hookimpl
            ...     def get_kernels(self, device):
            ...         if device.device_type != "acme":
            ...             return None
            ...         from kvdock.kernels.reference import ReferenceKernels
            ...         return ReferenceKernels()

        Contract: 0.1 added.
        """
