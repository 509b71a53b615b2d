"""Small hybrid models in unified memory, planned and built whole."""

from types import SimpleNamespace

import pytest
from kvdock import edge
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.options import CacheOptions

HEADS = MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8)
FULL = LayerSpec(kind="mha", params=HEADS)
SLIDING = LayerSpec(kind="mha", params=HEADS, window_tokens=12)
CONV = ConvParams(blocks=(ConvBlock(heads=1, head_dim=16),), kernel=3)
STATE = LayerSpec(kind="state", params=StateParams(conv=(CONV,), temporal=(2, 8, 4), temporal_dtype="float32"))
KINDS = {
    "linear": (FULL, STATE, STATE),
    "sliding": (FULL, SLIDING, SLIDING, SLIDING),
    "three": (FULL, SLIDING, STATE, SLIDING),
    "pure": (SLIDING, STATE),
}
"""Name → layers: states beside full attention, windows beside it, both, and states beside windows alone."""


def plan_model(model, budget_bytes, **options):
    """A plan of any model in unified memory."""
    return edge.plan(
        model, device="cpu", options=CacheOptions(unified_memory=True, **options), budget_bytes=budget_bytes
    )


def plan(kind, budget_bytes=65_536, page_size=4, context=128, **options):
    """A plan of a small model; unified unless `unified_memory` says otherwise."""
    layers = KINDS[kind]
    model = ModelSpec(name=kind, architecture="M", layers=layers, context_length=context, dtype="float32")
    given = {"unified_memory": True, "page_size": page_size, **options}
    return edge.plan(model, device="cpu", options=CacheOptions(**given), budget_bytes=budget_bytes)


@pytest.fixture(scope="session")
def small():
    """`small.plan(kind, …)` and `small.build(kind, …)`, `small.build_model(model, budget)`; `small.layers` by kind."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from kvdock.builder import build

    def made(kind, debug=True, **given):
        return build(plan(kind, **given), debug=debug)

    def made_of(model, budget_bytes, **options):
        return build(plan_model(model, budget_bytes, **options))

    return SimpleNamespace(plan=plan, build=made, build_model=made_of, kinds=tuple(KINDS), layers=KINDS)
