"""Two vendors whose devices torch calls by one name, installed side by side."""

import sys
import types
import warnings

import kvdock
import pytest
from kvdock.cells import cell_warnings
from kvdock.compat import compatible
from kvdock.errors import PlanError, PluginError
from kvdock.model import DSAParams, MLAParams
from kvdock.plugins import resolve
from kvdock.plugins.loading import PluginWarning
from kvdock.startup import core_only
from kvdock_cuda import hooks as cuda
from kvdock_rocm import hooks as rocm

GIB = 2**30
VENDORS = {"cuda": cuda, "rocm": rocm}
ORDERS = [("cuda", "rocm"), ("rocm", "cuda")]
MHA = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=2, head_dim=128, v_head_dim=128))
DSA = kvdock.LayerSpec(kind="dsa", params=DSAParams(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128))


def registry_of(names=("cuda", "rocm")):
    registry = core_only()
    for name in names:
        registry.add(VENDORS[name], name=name, tier="hardware", distribution=f"kvdock-{name}", version="0.1.0")
    return registry


def model(layer):
    return kvdock.ModelSpec(name="m", architecture="A", layers=(layer,), context_length=4096, dtype="bfloat16")


def torch_of(monkeypatch, *, cuda=None, hip=None, count=2):
    """Put a torch in place that is a build for `cuda`, for `hip`, for none of them, or, as none is, for both."""

    def of_device(answer):
        def ask(index):
            assert type(index) is int and 0 <= index < count
            return answer

        return ask

    made = types.SimpleNamespace(
        __version__="2.9.0+made.up",
        version=types.SimpleNamespace(cuda=cuda, hip=hip),
        cuda=types.SimpleNamespace(
            init=lambda: None,
            device_count=lambda: count,
            current_device=lambda: 0,
            mem_get_info=of_device((60 * GIB, 64 * GIB)),
            memory_reserved=of_device(0),
            get_device_name=of_device("Made-Up"),
            get_device_capability=of_device((9, 0)),
            get_device_properties=of_device(types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")),
            get_arch_list=list,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", made)


@pytest.mark.parametrize("order", ORDERS)
def test_two_vendors_with_a_device_are_listed_with_how_to_choose(monkeypatch, order):
    # L-08
    torch_of(monkeypatch, cuda="12.8", hip="6.4")
    registry = registry_of(order)
    with pytest.raises(PlanError) as caught:
        resolve.probe(registry, None)
    assert str(caught.value) == (
        "2 plugins find a live device (Made-Up of cuda, Made-Up of rocm); choose with device=cuda:0 or device=rocm:0"
    )
    with pytest.raises(PlanError) as caught:
        kvdock.plan(model(MHA), registry=registry)
    assert str(caught.value) == (
        "2 accelerators are here (cuda:0 is Made-Up, rocm:0 is Made-Up); name one with device= (--device NAME; kvdock "
        "devices lists the profiles), or give the memory for the cache with budget_bytes= (--memory 40GiB)"
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("selector", "capability"), [("cuda:0", "sm_90"), ("rocm:1", "gfx942"), ("rocm", "gfx942")])
def test_explicit_selection_wins(monkeypatch, order, selector, capability):
    # L-08
    torch_of(monkeypatch, cuda="12.8", hip="6.4")
    assert resolve.find_device(registry_of(order), selector).capabilities[0] == capability


@pytest.mark.parametrize(
    ("build", "capability"), [({"cuda": "12.8"}, "sm_90"), ({"hip": "6.4"}, "gfx942")], ids=["cuda", "rocm"]
)
def test_the_one_vendor_whose_torch_is_here_is_found_without_a_word(monkeypatch, build, capability):
    torch_of(monkeypatch, **build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = kvdock.plan(model(MHA), registry=registry_of(), options={"max_running_requests": 4})
    assert (made.device.capabilities[0], made.device.name, made.device.index) == (capability, "Made-Up", 0)


def test_the_other_vendors_device_says_whose_torch_is_here(monkeypatch):
    torch_of(monkeypatch, hip="6.4")
    with pytest.raises(
        PlanError, match=r"torch 2\.9\.0\+made\.up is a build for ROCm 6\.4, which kvdock-rocm probes as"
    ):
        resolve.find_device(registry_of(), "cuda:0")
    torch_of(monkeypatch, cuda="12.8")
    with pytest.raises(PlanError, match=r"is a build for CUDA 12\.8, which kvdock-cuda probes as cuda:0"):
        resolve.find_device(registry_of(), "rocm:0")


def test_where_neither_is_here_each_says_why_and_nothing_takes_its_place(monkeypatch):
    # L-08, L-02
    torch_of(monkeypatch)
    with (
        pytest.warns(PluginWarning) as heard,
        pytest.raises(PlanError, match=r"^no accelerator is here; name one with device="),
    ):
        kvdock.plan(model(MHA), registry=registry_of())
    assert [str(warning.message).partition(" (says")[0] for warning in heard] == [
        f"no {what} device can be used: torch 2.9.0+made.up is a build for CPUs alone; a profile such as {profile} plans "
        "without a device"
        for what, profile in (("CUDA", "h200"), ("ROCm", "mi300x"))
    ]


@pytest.mark.parametrize(("selector", "what"), [("cuda:0", "CUDA"), ("rocm:0", "ROCm"), ("rocm", "ROCm")])
def test_a_device_that_was_asked_for_and_is_not_here_is_an_error(monkeypatch, selector, what):
    # L-02
    torch_of(monkeypatch)
    with pytest.raises(PlanError, match=rf"^no {what} device can be used: .* build for CPUs alone"):
        kvdock.plan(model(MHA), device=selector, registry=registry_of())


@pytest.mark.parametrize("order", ORDERS)
def test_planning_by_catalogue_needs_no_device(monkeypatch, order):
    # L-08
    monkeypatch.setitem(sys.modules, "torch", None)
    registry = registry_of(order)
    names = resolve.catalogue(registry)
    assert set(names) == {*cuda.device_catalogue(), *rocm.device_catalogue()}
    assert all(len(owners) == 1 for owners in names.values())
    options = {"max_running_requests": 4}
    for name, owners in names.items():
        made = kvdock.plan(model(MHA), device=name, registry=registry, options=options)
        assert made.device.name == name
        same = kvdock.plan(model(MHA), device=f"{owners[0][0]}:{name}", registry=registry, options=options)
        assert same.to_json() == made.to_json()


def test_a_plan_for_a_device_that_is_not_here_is_not_built_elsewhere():
    # L-02
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a device is here")
    made = kvdock.plan(model(MHA), device="mi300x", registry=registry_of(), budget_bytes=2**26)
    with pytest.raises(
        kvdock.BuildError, match=r"^the plan is for mi300x, and torch finds no 'cuda' here; give device"
    ):
        kvdock.build(made)


def test_a_name_of_the_other_vendor_is_not_taken_for_ones_own():
    registry = registry_of()
    with pytest.raises(PlanError, match=r"device 'cuda:mi300x' is not here"):
        resolve.find_device(registry, "cuda:mi300x")
    with pytest.raises(PlanError, match=r"device 'rocm:h200' is not here"):
        resolve.find_device(registry, "rocm:h200")


def test_torchs_name_for_the_device_is_the_only_installed_vendors(monkeypatch):
    torch_of(monkeypatch, hip="6.4")
    assert resolve.find_device(registry_of(["rocm"]), "cuda:1").capabilities == ("gfx942",)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("device", "dtype", "owner"),
    [("h200", "float8_e4m3fn", "core"), ("mi300x", "float8_e4m3fnuz", "rocm"), ("mi355x", "float8_e4m3fn", "core")],
)
def test_8_bits_are_those_of_the_device_planned_for(order, device, dtype, owner):
    # P-03: gfx942, gfx950 and CUDA from one process
    made = kvdock.plan(
        model(MHA), device=device, registry=registry_of(order), options={"kv_cache_dtype": "fp8"}, budget_bytes=2**30
    )
    (group,) = made.groups
    assert ({buffer.dtype for buffer in group.buffers}, group.pool_cls.plugin) == ({dtype}, owner)


@pytest.mark.parametrize(
    ("layer", "options", "roles"),
    [
        (MHA, {}, {"key.dtype", "value.dtype"}),
        (DSA, {"attention_backend": "aiter"}, {"latent.dtype", "index.dtype"}),
        (DSA, {"attention_backend": "triton"}, {"latent.dtype", "index.dtype"}),  # bytes with scales between them
        (DSA, {"kv_cache_dtype": "bfloat16"}, {"index.dtype"}),
    ],
)
def test_a_transfer_between_two_encodings_is_refused_buffer_by_buffer(layer, options, roles):
    # P-03: the same bytes are other numbers on the other side
    given = {"kv_cache_dtype": "fp8", "page_size": 64, "max_running_requests": 4, **options}
    sides = [
        kvdock.plan(
            model(layer), device=device, registry=registry_of(), budget_bytes=2**28, options={**given, "role": role}
        )
        for device, role in (("mi300x", "prefill"), ("mi355x", "decode"))
    ]
    differences = compatible(*sides)
    assert {(each.name, each.a, each.b, each.severity) for each in differences} == {
        (name, "float8_e4m3fnuz", "float8_e4m3fn", "incompatible") for name in roles
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("device", "backend", "owner", "page_size"),
    [("h200", "trtllm", "cuda", 64), ("mi300x", "aiter", "rocm", 1), ("mi355x", "tilelang", "rocm", 1)],
)
def test_each_vendor_answers_for_its_own_devices(order, device, backend, owner, page_size):
    options = {"kv_cache_dtype": "fp8", "attention_backend": backend}
    made = kvdock.plan(model(DSA), device=device, registry=registry_of(order), options=options, budget_bytes=2**30)
    (group,) = made.groups
    assert group.pool_cls.plugin == owner
    assert next(buffer for buffer in group.buffers if buffer.name == "kv").shape[1:] == (1, 576)
    assert made.options.values.page_size == page_size


def one_by_one(prefix, length, last, pages, page_size):
    """Hand out tokens singly: the next of the request's page, or the first of the next page."""
    found = []
    for position in range(prefix, length):
        last = last + 1 if position % page_size else next(pages) * page_size
        found.append(last)
    return found


@pytest.mark.parametrize("device", ["h200", "mi300x", "mi355x"])
def test_slots_are_those_of_a_loop_over_tokens_on_every_vendors_devices(device):
    # page 128; (10, 50), (0, 0), (128, 128), (127, 300), with exactly the pages needed
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    options = {"page_size": 128, "max_total_tokens": 5 * 128, "max_running_requests": 4}
    made = kvdock.plan(model(MHA), device=device, registry=registry_of(), options=options, budget_bytes=2**26)
    allocator = kvdock.build(made, device="cpu").token_to_kv_pool_allocator

    def extend(prefixes, lengths, last):
        counts = sum(lengths) - sum(prefixes)
        tensors = (torch.tensor(values, dtype=torch.int64) for values in (prefixes, lengths, last))
        prefix_lens, seq_lens, last_loc = tensors
        return allocator.alloc_extend(prefix_lens, prefixes, seq_lens, lengths, last_loc, counts)

    assert allocator.available_size() == 640
    assert extend([0, 0, 0], [10, 128, 127], [-1, -1, -1]).numel() == 265
    asked = [(10, 50, 137), (0, 0, -1), (128, 128, 383), (127, 300, 510)]
    found = extend(*(list(column) for column in zip(*asked, strict=True)))
    pages = iter([4, 5])
    expected = [slot for prefix, length, last in asked for slot in one_by_one(prefix, length, last, pages, 128)]
    assert found.tolist() == expected == [*range(138, 178), 511, *range(512, 684)]
    assert (found.dtype, allocator.available_size()) == (torch.int64, 0)
    assert extend([50, 0], [50, 0], [177, -1]).shape == (0,)  # nothing, and an empty free list
    assert extend([300], [385], [683]) is None


@pytest.mark.parametrize(
    ("device", "dtype", "nbytes"),
    [("h200", "auto", 26_496), ("mi300x", "auto", 26_496), ("h200", "fp8", 13_248), ("mi300x", "fp8", 13_248)],
)
def test_latents_are_kept_as_latents_on_every_vendors_devices(device, dtype, nbytes):
    # P-14: 23 layers of (512 + 64) columns, 2 bytes or 1; 12 heads of keys and values would be 309,120
    layer = kvdock.LayerSpec(kind="mla", params=MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
    spec = kvdock.ModelSpec(name="m", architecture="A", layers=(layer,) * 23, context_length=4096, dtype="bfloat16")
    options = {"kv_cache_dtype": dtype, "max_running_requests": 4}
    made = kvdock.plan(spec, device=device, registry=registry_of(), options=options, budget_bytes=2**30)
    assert (made.bytes_per_token.kv, cell_warnings(made.outline)) == (nbytes, ())


@pytest.mark.parametrize("order", ORDERS)
def test_each_vendor_objects_for_its_own_devices(order):
    for device, backend, owner in (("h200", "aiter", "cuda"), ("mi300x", "trtllm", "rocm")):
        with pytest.raises(kvdock.UnsupportedCombination) as caught:
            kvdock.plan(model(MHA), device=device, registry=registry_of(order), options={"attention_backend": backend})
        assert {plugin for plugin, _ in caught.value.objections} == {owner}


@pytest.mark.parametrize("order", ORDERS)
def test_kernel_sets_are_no_tie(monkeypatch, order):
    torch = pytest.importorskip("torch")
    registry = registry_of(order)
    for device, version, owner in (("h200", "cuda", "CudaKernels"), ("mi300x", "hip", "RocmKernels")):
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.version, version, "1.0")
        found = resolve.kernels(registry, resolve.find_device(registry, device))
        assert owner in [cls.__name__ for cls in type(found).__mro__]


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_vendor_twice_is_refused(name):
    # L-08: duplicate names
    registry = registry_of()
    with pytest.raises(PluginError, match=rf"(?s){name}.*kvdock-{name}"):
        registry.add(VENDORS[name], name=name, tier="hardware", distribution="kvdock-fork", version="0.3")
