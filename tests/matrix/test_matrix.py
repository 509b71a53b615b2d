"""Hardware × family × feature: which classes a plan gets, or all that is said against it.

`expected.json` is kept by hand. A cell that is text names the classes of a plan, one that is a list the objections:
a key of `objections` (a phrase of the reason), or the class that lacks something. No cell is left out.
"""

import json
import re
from functools import cache
from pathlib import Path

import kvdock
import msgspec
import pytest
from kvdock.compat import compatible
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, UnsupportedCombination
from kvdock.plugins import resolve
from kvdock.startup import core_only
from kvdock.testing.mocks import MOCK_DEVICE, add_mocks
from kvdock_ascend import hooks as ascend
from kvdock_ascend.variants import dsv4 as ascend_dsv4
from kvdock_cuda import hooks as cuda
from kvdock_dsv4 import hooks as dsv4
from kvdock_rocm import hooks as rocm
from kvdock_rocm.variants import dsv4 as rocm_dsv4

ROOT = Path(__file__).parents[2]
TABLE = json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))
PAGE = ROOT / "docs" / "reference" / "matrix.md"
HARDWARE = ("cpu", "mock", "cuda", "rocm", "ascend")
VENDORS = {"cuda": (cuda, "cuda:h200"), "rocm": (rocm, "rocm:mi300x"), "ascend": (ascend, "ascend:910b-64gb")}
"""Hardware → its plugin and the device that is planned for."""
VARIANTS = {"rocm": rocm_dsv4, "ascend": ascend_dsv4}
"""Hardware → what it has of its own for DeepSeek V4."""

FAMILIES = {
    "MHA": "llama-3.1-8b",
    "MLA": "deepseek-v3",
    "DSA": "deepseek-v3.2",
    "sliding": "gpt-oss-20b",
    "all sliding": "mistral-7b-v0.1",
    "states": "qwen3-next-80b-a3b",
    "states + MLA": "kimi-linear-48b-a3b",
    "sparse": "minimax-m3-synthetic",
    "chunked": "llama-4-scout",
    "DeepSeek V4": "deepseek-v4-flash",
}

PAGES = {"DeepSeek V4": 256}
"""Family → the page that it needs; 64 serves all others."""

DRAFT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 512,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
    "draft": DRAFT,
}
NO_KV = {
    "prefill_only_disable_kv_cache": True,
    "attention_backend": "fa3",
    "is_embedding": True,
    "prefix_cache": False,
}
MISUSED_NO_KV = {
    "prefill_only_disable_kv_cache": True,
    "attention_backend": "triton",
    "chunked_prefill_size": 512,
    "kv_cache_dtype": "fp4",
    "hisparse": True,
}
UNIFIED = {"unified_memory": True, "attention_backend": "triton"}
MISUSED_UNIFIED = {"unified_memory": True, "attention_backend": "fa3", "role": "decode", "hisparse": True, **EAGLE}
FEATURES = {
    "none": {},
    "page_major": {"page_major": True, "attention_backend": "torch"},
    "page_major, fa3": {"page_major": True, "attention_backend": "fa3"},
    "page_major, fp4": {"page_major": True, "kv_cache_dtype": "fp4"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "fp4": {"kv_cache_dtype": "fp4"},
    "nvfp4": {"kv_cache_dtype": "nvfp4"},
    "mxfp8": {"kv_cache_dtype": "mxfp8"},
    "hisparse": {"hisparse": True},
    "hisparse, decode role": {"hisparse": True, "role": "decode"},
    "speculation": EAGLE,
    "no_kv": NO_KV,
    "no_kv, device able": NO_KV,
    "no_kv, misused": MISUSED_NO_KV,
    "prefill role": {"role": "prefill"},
    "decode role": {"role": "decode"},
    "layer_split": {"layer_split": True, "role": "prefill"},
    "layer_split, misused": {"layer_split": True, **EAGLE},
    "unified_memory": UNIFIED,
    "unified_memory, misused": MISUSED_UNIFIED,
    "replay_rings": {"replay_rings": True},
    "memory_saver": {"memory_saver": True},
    "late_backing": {"late_backing": True},
    "context parallel": {},
    "dcp": {},
    "dcp, misused": {},
}
CP = {"tp_size": 2, "cp_size": 2}
DCP = {"tp_size": 16, "dcp_size": 2}
SIZES = {
    "no_kv, misused": CP,
    "layer_split": CP,
    "unified_memory, misused": DCP,
    "context parallel": CP,
    "dcp": DCP,
    "dcp, misused": {"tp_size": 2, "dcp_size": 2},
}
ABLE = {"no_kv, device able": "skip_kv_cache:fa3", "no_kv, misused": "skip_kv_cache:fa3"}
"""What the device says beside its profile."""

CPU = DeviceInfo(device_type="cpu", name="a cpu", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)


@cache
def registry_of(hardware):
    registry = core_only()
    if hardware == "mock":
        add_mocks(registry, family=False, variant=False)
    if hardware in VENDORS:
        registry.add(VENDORS[hardware][0], name=hardware, tier="hardware")
    registry.add(dsv4, name="dsv4", tier="family")
    if hardware in VARIANTS:
        registry.add(VARIANTS[hardware], name=f"{hardware}.dsv4", tier="variant")
    return registry


def device_of(hardware, registry):
    if hardware == "cpu":
        return CPU
    if hardware == "mock":
        return msgspec.structs.replace(MOCK_DEVICE, total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
    return resolve.find_device(registry, VENDORS[hardware][1])


def cell(hardware, family, feature):
    registry = registry_of(hardware)
    try:
        device = device_of(hardware, registry)
        plan = plan_of(device, family, feature, registry)
    except UnsupportedCombination as error:
        return sorted({key_of(reason) for _, reason in error.objections} - {""})
    except PlanError as error:
        return [key_of(str(error))]
    assert compatible(plan, plan) == ()  # so it has a fingerprint, G-01
    return classes_of(plan.outline)


def plan_of(device, family, feature, registry):
    if feature in ABLE:
        device = msgspec.structs.replace(device, capabilities=(*device.capabilities, ABLE[feature]))
    options = {"page_size": PAGES.get(family, 64), "max_running_requests": 8, **FEATURES[feature]}
    config = ROOT / "tests" / "models" / f"{FAMILIES[family]}.json"
    return kvdock.plan(
        config,
        device=device,
        options=options,
        parallel=SIZES.get(feature),
        budget_bytes=min(2**37, device.free_bytes),
        registry=registry,
    )


def key_of(reason):
    """Return the key of a reason, the class that lacks something, or nothing for a plugin that was not asked for it."""
    if reason == "declined":
        return ""
    if unfit := re.match(r"unfit: (.*)", reason):
        return unfit[1]
    found = [key for key, phrase in TABLE["objections"].items() if phrase in reason]
    assert len(found) == 1, f"{found} name {reason!r}"
    return found[0]


def classes_of(outline):
    """Return ``what the engine sees (of which pools) / allocator / request pool``, and the draft's pool."""
    pools = {worker: [c.cls.__name__ for c in outline.pools if c.worker == worker] for worker in ("target", "draft")}
    router = outline.routers.get("target")
    inner = ", ".join(dict.fromkeys(pools["target"]))
    sees = f"{router.cls.__name__} ({inner})" if router else inner
    names = [sees, outline.allocators[-1].cls.__name__, outline.request_pool.cls.__name__]
    return " / ".join(names + [f"draft {name}" for name in pools["draft"]])


def rendered():
    """Return the page's tables: what an engine sees of a plan, or the objections."""
    parts = []
    for hardware, families in TABLE["cells"].items():
        parts.append(f"## {hardware}\n")
        answers = {str(cell) for cells in families.values() for cell in cells.values()}
        if len(answers) == 1:
            parts.append(f"Every model and feature: {shown(families['MHA']['none'])}.\n")
            continue
        head = [f"| feature | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
        rows = [f"| {name} | {' | '.join(shown(families[f][name]) for f in families)} |" for name in FEATURES]
        parts.append("\n".join([*head, *rows]) + "\n")
    phrases = [f"| {key} | … {phrase} … |" for key, phrase in TABLE["objections"].items()]
    parts.append("\n".join(["## Objections\n", "| in the table | in the error |", "|---|---|", *phrases]) + "\n")
    return "\n".join(parts)


def shown(cell):
    return f"`{cell.partition(' / ')[0]}`" if isinstance(cell, str) else f"*{'; '.join(cell)}*"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_cell_is_what_a_plan_says(hardware, family):
    found = {feature: cell(hardware, family, feature) for feature in FEATURES}
    assert found == TABLE["cells"][hardware][family]


def test_no_cell_is_empty():
    cells = TABLE["cells"]
    assert list(cells) == list(HARDWARE)
    assert all(list(families) == list(FAMILIES) for families in cells.values())
    flat = [row for families in cells.values() for row in families.values()]
    assert all(list(row) == list(FEATURES) and all(row.values()) for row in flat)


def test_every_objection_of_the_table_is_raised_somewhere():
    flat = [cell for families in TABLE["cells"].values() for row in families.values() for cell in row.values()]
    raised = {key for cell in flat if isinstance(cell, list) for key in cell}
    assert set(TABLE["objections"]) <= raised
    assert all(" lacks " in key for key in raised - set(TABLE["objections"]))


def test_a_plan_without_kv_has_the_pool_that_keeps_none():
    """No class but the no-op pool is ever planned where KV is left out."""
    names = [feature for feature in FEATURES if feature.startswith("no_kv")]
    flat = [row[name] for families in TABLE["cells"].values() for row in families.values() for name in names]
    planned = {cell.partition(" / ")[0] for cell in flat if isinstance(cell, str)}
    assert planned == {"NoOpPool"}


def test_the_page_shows_the_table():
    intro, _, tables = PAGE.read_text(encoding="utf-8").partition("\n## cpu\n")
    assert "## cpu\n" + tables == rendered()
    assert all(f"{name} | `{model}` |" in intro for name, model in FAMILIES.items())
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in intro.splitlines() if line.startswith("| ")}
    for name, options in FEATURES.items():
        names = set(re.findall(r"`(\w+)=", rows[name]))
        assert names == {*options, *SIZES.get(name, {})}
        assert ABLE.get(name, "") in rows[name]
