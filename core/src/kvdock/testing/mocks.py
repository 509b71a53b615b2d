"""Plugins that do not exist: one with any answers, and a family, a hardware and their variant that work.

`mock_plugin` builds a plugin with just the answers that a test needs. The family ``ring`` (layers that keep
their last tokens in a ring per request, layers with a state per request, and a few ordinary ones), the
hardware ``mock`` (a paged layout of its own) and the variant ``mock.ring`` are complete: they show that a
family on a hardware that it does not know is refused, and what the variant changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from kvdock.allocators import PagedAllocator
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, SlotError
from kvdock.hookspecs import CONTRACT, hookimpl
from kvdock.layout import Buffer, LayerGroup, SizeRule, Space, Unit
from kvdock.model import LayerParams, LayerSpec, MHAParams, ModelSpec
from kvdock.planned import Parts
from kvdock.plugins.loading import Registry
from kvdock.pools import MHAPool
from kvdock.pools.grouped import GroupedPool, group_of
from kvdock.queries import AllocatorQuery, GroupQuery, ModelQuery, PoolQuery, StateQuery

if TYPE_CHECKING:
    import torch

    from kvdock.allocators.base import Allocator
    from kvdock.pools.base import Pool


class MockPlugin:
    """A plugin made by `mock_plugin`; `Registry.add` reads its name and tier."""

    kvdock_name: str
    kvdock_tier: str
    kvdock_contract: str


def mock_plugin(
    name: str,
    tier: str,
    *,
    pool: Any = None,
    allocator: Any = None,
    request_pool: Any = None,
    reads: Any = None,
    groups: Any = None,
    spaces: Any = None,
    defaults: Any = None,
    objection: Any = None,
    devices: Any = None,
    live: Any = None,
    kernels: Any = None,
    contract: str = CONTRACT,
) -> MockPlugin:
    """Return a plugin that implements just the hooks for which an answer is given.

    An answer is what the hook returns, or a function of the query that returns it (a class is an answer).
    `objection` answers both validators, `devices` the catalogue, `live` the probe. Without any answer the
    plugin declines `validate_plan`.
    """
    answers = {
        "get_pool_cls": pool,
        "get_allocator_cls": allocator,
        "get_request_pool_cls": request_pool,
        "read_model": reads,
        "group_layers": groups,
        "size_state_pools": spaces,
        "get_option_defaults": defaults,
        "validate_plan": objection,
        "validate_prefill_only": objection,
        "device_catalogue": devices,
        "probe_device": live,
        "get_kernels": kernels,
    }
    hooks = {hook: _implement(hook, answer) for hook, answer in answers.items() if answer is not None}
    facts = {"kvdock_name": name, "kvdock_tier": tier, "kvdock_contract": contract}
    decline = {} if hooks else {"validate_plan": _implement("validate_plan", lambda query: None)}
    plugin: MockPlugin = type("MockPlugin", (MockPlugin,), {"__module__": __name__, **facts, **hooks, **decline})()
    return plugin


def _implement(hook: str, answer: Any) -> Callable[..., Any]:
    """Return an implementation of `hook` whose argument has the name that the contract gives it."""

    def respond(value: Any) -> Any:
        return answer(value) if callable(answer) and not isinstance(answer, type) else answer

    def with_query(self: Any, query: Any) -> Any:
        return respond(query)

    def with_selector(self: Any, selector: str) -> Any:
        return respond(selector)

    def with_device(self: Any, device: DeviceInfo) -> Any:
        return respond(device)

    def alone(self: Any) -> Any:
        return answer() if callable(answer) else answer

    shapes: dict[str, Callable[..., Any]] = {
        "probe_device": with_selector,
        "get_kernels": with_device,
        "device_catalogue": alone,
    }
    implementation: Callable[..., Any] = hookimpl(shapes.get(hook, with_query))
    return implementation


class RingParams(MHAParams, frozen=True, kw_only=True):
    """Keys and values per head, of the last `ring_tokens` tokens of a request."""

    ring_tokens: int


class MockStateParams(LayerParams, frozen=True, kw_only=True):
    """A state of ``rows · columns`` bytes per request."""

    rows: int
    columns: int


RING_CONFIG: Mapping[str, Any] = {
    "architectures": ["RingForCausalLM"],
    "model_type": "ring",
    "layer_types": ["ring", "ring", "mha", "mock_state", "ring", "mha"],
    "num_key_value_heads": 2,
    "head_dim": 8,
    "ring_tokens": 4,
    "state_rows": 3,
    "state_columns": 16,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
"""A config of the family ``ring``: three ring layers, two ordinary ones, one with a state of 48 bytes."""


def ring_model(config: Mapping[str, Any] = RING_CONFIG, *, name: str = "ring", role: str = "target") -> ModelSpec:
    """Return the model that a config of the family ``ring`` describes.

    Raises:
        PlanError: a layer type that the family does not know.
    """
    heads = {"num_kv_heads": config["num_key_value_heads"], "head_dim": config["head_dim"]}
    mha = MHAParams(**heads, v_head_dim=config["head_dim"])
    ring = RingParams(**heads, v_head_dim=config["head_dim"], ring_tokens=config["ring_tokens"])
    state = MockStateParams(rows=config["state_rows"], columns=config["state_columns"])
    params: dict[str, LayerParams] = {"mha": mha, "ring": ring, "mock_state": state}
    for kind in config["layer_types"]:
        if kind not in params:
            raise PlanError(f"layer_types lists {kind!r}; the family ring knows {', '.join(params)}")
    return ModelSpec(
        name=name,
        architecture="RingForCausalLM",
        family="ring",
        layers=tuple(LayerSpec(kind=kind, params=params[kind]) for kind in config["layer_types"]),
        context_length=config["max_position_embeddings"],
        dtype=config["torch_dtype"],
        role=role,
    )


class RingPool(MHAPool):
    """Keys and values of the last tokens of each request: slot ``1 + (row − 1) · ring_tokens + position % ring_tokens``.

    Beside the padding row there is a sentinel row behind the last slot, for positions without a token; it
    is never written.
    """

    device_types: ClassVar[frozenset[str] | None] = frozenset({"cpu", "cuda"})

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare K and V of each layer, with a padding row and a sentinel row."""
        return tuple(msgspec.structs.replace(buffer, guard=2) for buffer in super().buffers(query))

    @property
    def sentinel_slot(self) -> int:
        """The row that stands for no token."""
        return self.parts.sizes[self.group.space] + 1

    def ring_slots(self, rows: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return the slot of each position of a request row, ``[n]`` int64."""
        import torch

        tokens = ring_tokens(self.group)
        slots = [1 + (row - 1) * tokens + at % tokens for row, at in zip(rows, positions, strict=True)]
        return torch.tensor(slots, dtype=torch.int64, device=self.parts.device)


class MockStatePool(GroupedPool):
    """A state of a fixed number of bytes per request and layer; no keys, no values."""

    device_types: ClassVar[frozenset[str] | None] = None

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._states = self.stored("state")

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare one row of bytes per request and layer, and a padding row."""
        group = group_of(query)
        shapes = {layer.params for _, layer in group.layers}
        params = next(iter(shapes))
        if len(shapes) > 1 or not isinstance(params, MockStateParams):
            raise PlanError(f"group {group.name!r} does not hold states of one shape")
        shape = (params.rows, params.columns)
        layers = group.layer_ids
        buffer = Buffer(name="state", role="state", shape=shape, dtype="uint8", space=group.space, layers=layers)
        return (buffer,)

    def get_state(self, layer_id: int) -> torch.Tensor:
        """Return the states of a layer as a view ``[rows, 1, state_rows, state_columns]``."""
        view = self._states.get(layer_id)
        if view is None:
            raise self.refuse_layer(layer_id)
        return view

    def set_state(self, layer_id: int, loc: torch.Tensor, states: torch.Tensor) -> None:
        """Write the states ``[n, state_rows, state_columns]`` of the slots `loc`."""
        view = self.get_state(layer_id)
        self.check_write(layer_id, view, loc, states)
        self.parts.kernels.store(view, loc, states)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Refuse: a state layer has no keys."""
        raise self._no_kv(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Refuse: a state layer has no values."""
        raise self._no_kv(layer_id)

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Refuse: a state layer has neither keys nor values."""
        raise self._no_kv(layer_id)

    def _no_kv(self, layer_id: int) -> SlotError:
        return SlotError(f"layer {layer_id} keeps a state per request, no keys and values; call get_state")


class MockPagedPool(MHAPool):
    """The layout of the hardware ``mock``: a row is a page, and one tensor holds all layers."""

    device_types: ClassVar[frozenset[str] | None] = frozenset({"mock"})

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare K and V with one row per page and one padding page."""
        page = query.space.page_size
        return tuple(
            msgspec.structs.replace(buffer, unit=Unit.PAGE, guard=1, shape=(page, *buffer.shape), stacked=True)
            for buffer in super().buffers(query)
        )

    def stored(self, name: str) -> dict[int, torch.Tensor]:
        """Return the pages of a buffer by the id of each layer that owns one."""
        return {layer_id: self.parts.tensors.rows(name, layer_id) for layer_id in self.group.layer_ids}

    def slot_views(self) -> list[torch.Tensor]:
        """Return keys and values of every layer."""
        return [*self.stored("k").values(), *self.stored("v").values()]


class MockRingPool(RingPool):
    """The ring on the hardware ``mock``: all layers in one tensor."""

    device_types: ClassVar[frozenset[str] | None] = frozenset({"mock"})

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare K and V of all layers as one tensor each."""
        return tuple(msgspec.structs.replace(buffer, stacked=True) for buffer in super().buffers(query))


class MockAllocator(PagedAllocator):
    """Pages on the hardware ``mock``."""

    device_types: ClassVar[frozenset[str] | None] = frozenset({"mock"})


class MockFamily:
    """The family ``ring``: it invented the kinds ``ring`` and ``mock_state`` and the spaces that they live in."""

    kvdock_name = "ring"
    kvdock_tier = "family"
    kvdock_contract = CONTRACT
    layer_params: Mapping[str, type[LayerParams]] = {"ring": RingParams, "mock_state": MockStateParams}

    @hookimpl
    def read_model(self, query: ModelQuery) -> ModelSpec | None:
        """Read configs of model type ``ring``."""
        if query.model_type != "ring" or query.role == "mtp":
            return None
        return ring_model(query.config, name=query.name, role=query.role)

    @hookimpl
    def group_layers(self, query: GroupQuery) -> tuple[LayerGroup, ...] | None:
        """Give each kind a group in a space of its own."""
        if query.model.family != "ring":
            return None
        homes = {"mha": ("full", "full"), "ring": ("ring", "ring"), "mock_state": ("states", "states")}
        groups = []
        for kind, (name, space) in homes.items():
            layers = tuple(pair for pair in query.layers if pair[1].kind == kind)
            if layers:
                groups.append(LayerGroup(name=name, kind=kind, space=space, layers=layers, worker=query.worker))
        return tuple(groups)

    @hookimpl
    def size_state_pools(self, query: StateQuery) -> Mapping[str, Space] | None:
        """Declare ``ring`` (some slots a request) and ``states`` (one a request) where groups need them."""
        found = {}
        for group in query.groups:
            if group.kind == "ring":
                rule = SizeRule(per_request=(ring_tokens(group), 1))
                found["ring"] = Space(name="ring", rule=rule, issued_by="derived")
            elif group.kind == "mock_state":
                found["states"] = Space(name="states", rule=SizeRule(per_request=(1, 1)), issued_by="request_pool")
        return found or None

    @hookimpl
    def get_pool_cls(self, query: PoolQuery) -> type[Pool] | None:
        """Serve the two kinds that the family invented."""
        pools: dict[str, type[Pool]] = {"ring": RingPool, "mock_state": MockStatePool}
        return pools.get(query.kind)


class MockHardware:
    """The hardware ``mock``: a profile, a layout of its own for ``mha``, an allocator."""

    kvdock_name = "mock"
    kvdock_tier = "hardware"
    kvdock_contract = CONTRACT

    @hookimpl
    def device_catalogue(self) -> Mapping[str, DeviceInfo]:
        """List the one device."""
        return {MOCK_DEVICE.name: MOCK_DEVICE}

    @hookimpl
    def get_pool_cls(self, query: PoolQuery) -> type[Pool] | None:
        """Serve ordinary attention on its own devices."""
        return MockPagedPool if query.kind == "mha" and query.device.device_type == "mock" else None

    @hookimpl
    def get_allocator_cls(self, query: AllocatorQuery) -> type[Allocator] | None:
        """Serve any one space on its own devices."""
        return MockAllocator if len(query.spaces) == 1 and query.device.device_type == "mock" else None


class MockVariant:
    """The variant ``mock.ring``: the ring pool on the hardware ``mock``, and nothing else."""

    kvdock_name = "mock.ring"
    kvdock_tier = "variant"
    kvdock_contract = CONTRACT

    @hookimpl
    def get_pool_cls(self, query: PoolQuery) -> type[Pool] | None:
        """Serve rings on the hardware ``mock``."""
        return MockRingPool if query.kind == "ring" and query.device.device_type == "mock" else None


MOCK_DEVICE = DeviceInfo(
    device_type="mock",
    name="mock-1",
    total_bytes=2**30,
    free_before_load_bytes=2**30 - 2**26,
    free_bytes=2**30 - 2**26,
    granularity_bytes=512,
    source="made up for tests: 1 GiB less 64 MiB",
)


def ring_tokens(group: LayerGroup) -> int:
    """Return the slots that a request has in the ring of a group."""
    params = group.layers[0][1].params
    if not isinstance(params, RingParams):
        raise PlanError(f"group {group.name!r} holds no ring layers")
    return params.ring_tokens


def add_mocks(registry: Registry, *, family: bool = True, hardware: bool = True, variant: bool = True) -> Registry:
    """Add the family ``ring``, the hardware ``mock`` and their variant; return the same registry."""
    parts = (
        (hardware, MockHardware, "kvdock-mock"),
        (family, MockFamily, "kvdock-ring"),
        (variant, MockVariant, "kvdock-mock"),
    )
    for is_wanted, plugin, distribution in parts:
        if is_wanted:
            registry.add(plugin(), distribution=distribution, version="1.0")
    return registry
