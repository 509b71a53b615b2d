"""Two sides that hand DeepSeek V4 on NPUs to each other: what they compare, and what they pair by name, role and layer."""

import ctypes

import pytest
from kvdock.builder import build
from kvdock.compat import compatible, layout_fingerprint

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
ROWS, COMPRESSED = ("kv", "latent", "swa"), "compressed_latent"
KEPT = {
    0: {ROWS},
    4: {
        ROWS,
        ("kv", COMPRESSED, "c4"),
        ("index_k", "index", "c4"),
        ("index_scale", "scale", "c4"),
        ("states", "state", "c4_state"),
        ("states", "index_state", "c4_state"),
    },
    128: {ROWS, ("kv", COMPRESSED, "c128"), ("states", "state", "c128_state")},
}
"""Compress ratio → name, role and space of each tensor of a layer."""


def described(cache):
    pool = cache.token_to_kv_pool
    infos = (*pool.buffer_infos(), *pool.state_infos())
    found = {(info.name, info.role, info.layer_id): info for info in infos}
    assert len(found) == len(infos)
    return found


def test_every_tensor_of_a_layer_has_a_role_of_its_own(cached, small):
    """G-06"""
    found = described(cached())
    for layer, ratio in enumerate(small["compress_ratios"]):
        assert {(name, role, info.space) for (name, role, at), info in found.items() if at == layer} == KEPT[ratio]


@pytest.mark.parametrize("ratios", [[0], [4], [128], [0, 4, 128, 4]])
def test_sides_of_one_layout_fit(planned, small, ratios):
    """G-01, G-02: pools of other sizes are each side's own."""
    config = small | {"num_hidden_layers": len(ratios), "compress_ratios": ratios}
    prefill = planned(config, role="prefill", max_total_tokens=4096)
    decode = planned(config, role="decode", max_total_tokens=8192, budget=2**28)
    assert compatible(prefill, decode) == ()
    assert layout_fingerprint(prefill).digest == layout_fingerprint(decode).digest


def test_sides_of_other_layouts_are_told_apart(planned):
    """G-01"""
    own = planned(max_total_tokens=4096)
    other = planned(max_total_tokens=4096, page_size=256, budget=2**28)
    assert {found.name for found in compatible(own, other)} == {"page_size"}
    narrow = planned(max_total_tokens=4096, state_dtype="bfloat16")
    found = {(each.name, each.a, each.b, each.layers) for each in compatible(own, narrow)}
    assert found == {
        ("state.dtype", "float32", "bfloat16", (1, 2, 3)),
        ("index_state.dtype", "float32", "bfloat16", (1, 3)),
    }


def places(cache, slots, space):
    """Return the slots of the tokens `slots` in a space."""
    allocator = cache.token_to_kv_pool_allocator
    return allocator.translate(slots) if space == "swa" else allocator.translate_beside(space, slots)


@pytest.mark.parametrize("options", [{}, {"page_size": 256}, EAGLE], ids=["plain", "page 256", "speculation"])
def test_what_is_paired_by_name_role_and_layer_arrives(planned, options):
    """G-06, G-07: pages copied as a transfer engine copies them are read on the other side as they were written."""
    source = build(planned(role="prefill", budget=2**28, max_total_tokens=4096, **options), device="cpu")
    target = build(planned(role="decode", budget=2**28, max_total_tokens=4096, **options), device="cpu")
    generator = torch.Generator().manual_seed(7)
    for tensor in source.token_to_kv_pool.storages():
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 120, raw.shape, dtype=torch.uint8, generator=generator))
    target.admit("other", 200)  # so that pages have other numbers
    sent, length = source.admit("a", 777), 777
    got = target.admit("a", length, arriving=True)
    ours, theirs = described(source), described(target)
    assert ours.keys() == theirs.keys()
    page = source.token_to_kv_pool_allocator.page_size
    for key, info in ours.items():
        other = theirs[key]
        assert (info.item_nbytes, info.space) == (other.item_nbytes, other.space)
        here, there = places(source, sent, info.space), places(target, got, info.space)
        both = (here > 0) & (there > 0)
        for a, b in set(zip((here[both] // page).tolist(), (there[both] // page).tolist(), strict=True)):
            to, what = other.pointer + b * other.stride_nbytes, info.pointer + a * info.stride_nbytes
            ctypes.memmove(to, what, info.item_nbytes)
    pools = source.token_to_kv_pool, target.token_to_kv_pool
    newest = slice(length - 128, length)
    copies = [pool.get_cpu_copy(slots[newest]) for pool, slots in zip(pools, (sent, got), strict=True)]
    for left, right in zip(*copies, strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    for read in ("read_extra_key", "read_index_k"):
        left, right = (getattr(p, read)(1, s[3::4]) for p, s in zip(pools, (sent, got), strict=True))
        assert torch.equal(left, right)
    left, right = (p.read_extra_key(2, s[127::128]) for p, s in zip(pools, (sent, got), strict=True))
    assert torch.equal(left, right)
