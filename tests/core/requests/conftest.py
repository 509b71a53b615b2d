"""Request pools over stand-in tensors, and caches of models whose layers keep a state per request."""

import msgspec
import pytest
from kvdock.builder import build
from kvdock.builtin import BUILTINS
from kvdock.demand import request_columns
from kvdock.device import DeviceInfo
from kvdock.layout import SizeRule, Space
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.options import CacheOptions, Parallelism, make_options
from kvdock.planned import Parts
from kvdock.planner import plan_from
from kvdock.plugins.loading import Registry
from kvdock.pools.state import StatePool
from kvdock.queries import RequestQuery
from kvdock.testing.mocks import mock_plugin

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)
MHA = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
CONV = ConvParams(blocks=(ConvBlock(heads=1, head_dim=8),), kernel=4)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(1, 4, 4)))


class NotedStates(StatePool):
    """The pool of states, which notes what it was asked to clear and to copy."""

    def __init__(self, query, parts):
        super().__init__(query, parts)
        self.cleared, self.copied = [], []

    def clear_slots(self, slots):
        super().clear_slots(slots)
        self.cleared.append(slots.tolist())

    def copy_slots(self, source, target):
        super().copy_slots(source, target)
        self.copied.append((source.tolist(), target.tolist()))


def _model(layers, context_length=256):
    return ModelSpec(name="m", architecture="M", layers=tuple(layers), context_length=context_length, dtype="bfloat16")


@pytest.fixture
def make_plan():
    """Give the planner of caches for lists of layers (target, then drafts) or the names of lists."""
    known = {
        "mha": [MHA, MHA],
        "hybrid": [STATE, STATE, MHA, STATE],
        "sliding": [MHA, msgspec.structs.replace(MHA, window_tokens=128)],
        "all sliding": [msgspec.structs.replace(MHA, window_tokens=128)],
    }

    def plan(*models, budget=2**22, context_length=256, **options):
        registry = Registry()
        for name, builtin in BUILTINS:
            registry.add(builtin, name=name)
        registry.add(mock_plugin("noting", "hardware", pool=lambda q: NotedStates if q.kind == "state" else None))
        specs = tuple(_model(known[m] if isinstance(m, str) else m, context_length) for m in models)
        given = make_options({"max_running_requests": 4, "page_size": 4} | options)
        return plan_from(specs, CPU, given, Parallelism(), registry, budget_bytes=budget)

    return plan


@pytest.fixture
def make_cache(make_plan):
    """Give the builder of such caches."""

    def cache(*models, debug=True, device=None, **options):
        return build(make_plan(*models, **options), device=device, debug=debug)

    return cache


class StandInTensors:
    def __init__(self, buffers, units, device):
        self._tensors = {
            b.name: torch.zeros(
                (b.rows(units[b.space]), *b.shape),
                dtype=getattr(torch, b.dtype),
                device="cpu" if b.memory == "host" else device,
            )
            for b in buffers
        }

    def rows(self, name, layer_id=None):
        return self._tensors[name]


@pytest.fixture
def make_pool():
    """Give the maker of a request pool alone: its class, the requests and the state slots that it serves."""

    def pool(cls, requests, states=None, device="cpu", debug=True, **options):
        sizes = {"requests": requests} | ({} if states is None else {"state": states})
        asked = RequestQuery(
            model=_model([MHA]),
            options=CacheOptions(**options),
            parallel=Parallelism(),
            device=CPU,
            spaces={name: Space(name=name, rule=SizeRule(), issued_by="request_pool") for name in sizes},
            groups=(),
            columns=0,
        )
        asked = msgspec.structs.replace(asked, columns=request_columns(asked))
        parts = Parts(
            tensors=StandInTensors(cls.buffers(asked), sizes, device),
            kernels=ReferenceKernels(),
            device=torch.device(device),
            sizes=sizes,
            debug=debug,
        )
        return cls(asked, parts)

    return pool
