"""Kinds that a plugin invented, driven: pools say which tokens have a row, where, and how far drafts may run ahead."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock import hookimpl  # noqa: E402
from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.layout import Buffer, LayerGroup, SizeRule, Space  # noqa: E402
from kvdock.model import LayerSpec, MHAParams, ModelSpec  # noqa: E402
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.pools import MHAPool, RoutedPool  # noqa: E402
from kvdock.startup import core_only  # noqa: E402
from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.kinds import Kind, Part  # noqa: E402
from kvdock.testing.patterns import plain  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402
from kvdock.testing.values import WrongValue  # noqa: E402

RING = 4
HEADS = MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8)


class RingPool(MHAPool):
    """The newest tokens of each request, in a ring of its row."""

    ahead = 0
    kept = RING

    @classmethod
    def buffers(cls, query):
        group = query.group
        return (
            Buffer(
                name="ring", role="state", space=group.space, shape=(8,), dtype="float32", layers=group.layer_ids,
                guard=RING, is_kv=True,
            ),
        )  # fmt: skip

    def __init__(self, query, parts):
        super(MHAPool, self).__init__(query, parts)
        self.rows = {layer: parts.tensors.rows("ring", layer) for layer in self.group.layer_ids}

    def driven(self):
        part = Part("ring", (), (plain(8, "float32"),))
        return Kind(lambda _: (part,), write, read, places=places, ahead=self.ahead)


class Router(RoutedPool):
    def routed_parts(self):
        return {"full": self.parts.pools["full"]}

    def get_request_copy(self, rows):
        ring = self.parts.pools["ring"].rows[0]
        return [ring.view(-1, RING, 8)[rows].clone()]

    def load_request_copy(self, copies, rows):
        self.parts.pools["ring"].rows[0].view(-1, RING, 8)[rows] = copies[0]


def write(layer, where, rows):
    layer.pool.rows[layer.layer_id][where.mapped] = rows["ring"].float()


def read(layer, where):
    return {"ring": layer.pool.rows[layer.layer_id][where.mapped]}


def places(layer, tokens):
    is_kept = tokens.positions + layer.pool.kept >= tokens.lengths
    return torch.where(is_kept, tokens.rows * RING + tokens.positions % RING, 0)


class RingPlugin:
    kvdock_contract = "0.1"

    def __init__(self, pool=RingPool, router=Router):
        self.pool, self.router = pool, router

    @hookimpl
    def group_layers(self, query):
        full = LayerGroup(name="full", kind="mha", space="full", layers=query.layers)
        return (full, LayerGroup(name="ring", kind="ring", space="ring", layers=query.layers))

    @hookimpl
    def size_state_pools(self, query):
        rule = SizeRule(per_request=(RING, 1))
        return {"ring": Space(name="ring", rule=rule, page_size=RING, issued_by="request_pool")}

    @hookimpl
    def get_pool_cls(self, query):
        return self.router if query.group is None else self.pool if query.kind == "ring" else None


def run(plugin, count=6, tokens=1_000, **more):
    registry = core_only()
    registry.add(plugin, name="ring", tier="family")
    layer = LayerSpec(kind="mha", params=HEADS)
    model = ModelSpec(name="m", architecture="M", layers=(layer,), context_length=64, dtype="bfloat16", family="ring")
    device = DeviceInfo(
        device_type="cpu", name="cpu", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40
    )
    options = make_options({"page_size": 4, "max_running_requests": 3, "max_total_tokens": tokens})
    plan = plan_from((model,), device, options, Parallelism(), registry, budget_bytes=2**20)
    arrivals = [Arrival(timestamp_ms=0.0, input_length=5 + i, output_length=20) for i in range(count)]
    return drive(build(plan, debug=True), arrivals, seed=0, sharing=0, **more)


def test_what_a_pool_says_of_its_tokens_is_written_and_compared():
    report = run(RingPlugin())
    assert report.problems == () and report.finished == 6
    plain_checks = run(RingPlugin(type("Empty", (RingPool,), {"kept": 0}))).checks
    assert report.checks > plain_checks  # those of the ring come on top


def test_a_ring_that_keeps_less_than_its_pool_says_is_found():
    with pytest.raises(WrongValue, match="the ring in slot"):
        run(RingPlugin(type("Boastful", (RingPool,), {"kept": RING + 2})))


def test_drafts_run_no_further_ahead_than_a_pool_allows():
    assert run(RingPlugin(), speculating=1.0).rollbacks == 0
    with pytest.raises(WrongValue, match="the ring in slot"):
        run(RingPlugin(type("Unlimited", (RingPool,), {"ahead": None})), speculating=1.0)


def test_what_requests_own_beside_their_tokens_is_swapped_out_with_them():
    report = run(RingPlugin(), tokens=64)
    assert report.preemptions > 0 and report.problems == ()

    class Forgetful(Router):
        def load_request_copy(self, copies, rows):
            self.parts.pools["ring"].rows[0].view(-1, RING, 8)[rows] = -1

    with pytest.raises(WrongValue, match="the ring in slot"):
        run(RingPlugin(router=Forgetful), tokens=64)


def test_copies_are_cut_token_by_token_and_part_by_part():
    copies, slots = [torch.arange(4), torch.arange(4) + 10], torch.arange(4)
    assert [copy.tolist() for copy in MHAPool.cut_copies(None, copies, slots, 1, 3)] == [[1, 2], [11, 12]]
