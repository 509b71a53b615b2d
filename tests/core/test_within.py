"""Where device memory is taken from: what the caller of `build` says, or memory that can be released and restored."""

import contextlib
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

import kvdock  # noqa: E402
from kvdock import hookimpl  # noqa: E402
from kvdock.builder import build  # noqa: E402
from kvdock.device import DeviceInfo  # noqa: E402
from kvdock.errors import BuildError, UnsupportedCombination  # noqa: E402
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.model import LayerSpec, MHAParams, ModelSpec  # noqa: E402
from kvdock.options import Parallelism, make_options  # noqa: E402
from kvdock.planner import plan_from  # noqa: E402
from kvdock.startup import core_only  # noqa: E402

MIB = 2**20
ABLE = DeviceInfo(
    device_type="cpu",
    name="able",
    total_bytes=64 * MIB,
    free_before_load_bytes=64 * MIB,
    free_bytes=64 * MIB,
    capabilities=("memory_saver",),
)
PARAMS = MHAParams(num_kv_heads=1, head_dim=16, v_head_dim=16)
FULL = LayerSpec(kind="mha", params=PARAMS)
SLIDING = LayerSpec(kind="mha", params=PARAMS, window_tokens=8)


class Saved:
    """A place that notes which tensors were made in it, by their bytes."""

    def __init__(self):
        self.inside = 0
        self.entered = 0

    @contextlib.contextmanager
    def __call__(self, *_):
        assert not self.inside
        self.inside, self.entered = 1, self.entered + 1
        yield
        self.inside = 0


class SavingKernels(ReferenceKernels):
    def __init__(self, saved):
        self.saved = saved

    def releasable(self, device):
        assert device == torch.device("cpu")
        return self.saved()


def planned(*layers, saved=None, device=ABLE, **options):
    registry = core_only()

    class Plugin:
        kvdock_contract = kvdock.CONTRACT

        @hookimpl
        def get_kernels(self, device, options):
            return None if saved is None else SavingKernels(saved)

    registry.add(Plugin(), name="able", tier="hardware")
    model = ModelSpec(name="m", architecture="A", layers=layers, context_length=64, dtype="float16")
    given = {"page_size": 4, "max_running_requests": 2, **options}
    return plan_from((model,), device, make_options(given), Parallelism(), registry, budget_bytes=MIB)


def made_inside(monkeypatch, saved, plan, **how):
    """Build a plan and return the bytes of the tensors that were made inside `saved`, and of those outside."""
    sizes = {True: [], False: []}
    real = torch.zeros

    def zeros(*args, **kwargs):
        found = real(*args, **kwargs)
        if found.dtype == torch.uint8:
            sizes[bool(saved.inside)].append(found.nbytes)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", zeros)
        cache = build(plan, **how)
    return cache, sorted(sizes[True]), sorted(sizes[False])


def bytes_of(plan, chosen):
    """Return the bytes of each tensor of the buffers that are `chosen`."""
    return sorted(b.nbytes // b.tensors for b in plan.buffers if chosen(b) for _ in range(b.tensors))


def test_memory_of_every_part_can_be_released_and_bookkeeping_stays(monkeypatch):
    # P-10: the sliding half as well
    saved = Saved()
    plan = planned(FULL, SLIDING, saved=saved, memory_saver=True, kv_cache_dtype="float16")
    _, inside, outside = made_inside(monkeypatch, saved, plan)
    assert {b.space for b in plan.buffers if b.is_kv} == {"full", "swa"}
    assert inside == bytes_of(plan, lambda b: b.is_kv)
    assert outside == bytes_of(plan, lambda b: not b.is_kv)
    assert {b.role for b in plan.buffers if not b.is_kv} >= {"table", "free_ring", "map"}


def test_what_is_set_once_for_a_layer_stays_and_scratch_does_not(monkeypatch):
    saved = Saved()
    plan = planned(FULL, FULL, saved=saved, memory_saver=True, kv_cache_dtype="nvfp4")
    _, inside, outside = made_inside(monkeypatch, saved, plan)
    scales = bytes_of(plan, lambda b: b.role == "global_scale")
    assert scales == [16]  # two layers of two float32
    assert scales[0] in outside
    assert len(inside) == 2 * 4 + 2  # data and scales of keys and values in each layer, and a workspace of each


def test_without_the_option_nothing_is_released(monkeypatch):
    saved = Saved()
    _, inside, _ = made_inside(monkeypatch, saved, planned(FULL, saved=saved))
    assert (inside, saved.entered) == ([], 0)


def test_a_build_elsewhere_takes_ordinary_memory():
    saved = Saved()
    cache = build(planned(FULL, saved=saved, memory_saver=True), device="meta")
    assert (saved.entered, cache.plan.options.values.memory_saver) == (0, True)


def test_a_device_without_such_memory_is_refused_when_planning():
    plain = kvdock.DeviceInfo(
        device_type="cpu", name="plain", total_bytes=MIB, free_before_load_bytes=MIB, free_bytes=MIB
    )
    with pytest.raises(UnsupportedCombination) as caught:
        planned(FULL, device=plain, memory_saver=True)
    assert (
        "core",
        "memory_saver=true needs memory that can be released and restored, which plain does not offer; "
        "give memory_saver=false",
    ) in caught.value.objections


def test_a_kernel_set_without_such_memory_is_refused_before_anything_is_taken(monkeypatch):
    plan = planned(FULL, memory_saver=True)
    monkeypatch.setattr(torch, "zeros", None)
    with pytest.raises(BuildError, match="ReferenceKernels takes none on 'cpu'; give memory_saver=false"):
        build(plan)


def test_the_caller_says_where_device_memory_is_taken(monkeypatch):
    saved, asked = Saved(), []

    def within(buffer, device):
        asked.append((buffer.name, device.type))
        return saved()

    plan = planned(FULL)
    cache, inside, _ = made_inside(monkeypatch, saved, plan, within=within)
    assert sum(inside) == plan.total_bytes == cache.allocated_bytes()
    device_buffers = [b.name for b in plan.buffers if b.memory == "device" for _ in range(b.tensors)]
    assert sorted(name for name, _ in asked) == sorted(device_buffers)
    assert {device for _, device in asked} == {"cpu"}


def test_page_major_memory_is_taken_there_in_one(monkeypatch):
    saved = Saved()
    plan = planned(FULL, FULL, page_major=True, attention_backend="torch")
    _, inside, _ = made_inside(
        monkeypatch, saved, plan, within=lambda b, d: saved() if b.is_kv else contextlib.nullcontext()
    )
    assert inside == [sum(b.nbytes for b in plan.buffers if b.is_kv)]


def test_two_who_say_where_are_refused():
    plan = planned(FULL, saved=Saved(), memory_saver=True)
    with pytest.raises(BuildError, match="leave within out, or memory_saver"):
        build(plan, within=lambda buffer, device: contextlib.nullcontext())


def test_what_memory_is_taken_from_lives_as_long_as_the_cache():
    class Arena:
        def within(self, buffer, device):
            return contextlib.nullcontext()

    arena = Arena()
    alive = weakref.ref(arena)
    cache = build(planned(FULL), within=arena.within)
    del arena
    gc.collect()
    assert alive() is not None
    del cache
    gc.collect()
    assert alive() is None


def test_a_place_that_fails_is_named_with_the_buffer():
    @contextlib.contextmanager
    def broken(buffer, device):
        raise RuntimeError("expandable segments are not supported")
        yield

    with pytest.raises(BuildError, match=r"buffer 'req_to_token' .* expandable segments are not supported"):
        build(planned(FULL), within=broken)
