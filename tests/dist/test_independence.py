"""Each plugin's wheel beside the core's, and none, and all, where neither torch nor a device is: nothing falls back."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SOURCES = {
    "kvdock": ROOT / "core",
    **{f"kvdock_{name}": ROOT / "plugins" / name for name in ("cuda", "rocm", "ascend", "dsv4")},
}
DEVICES = {"cuda": "h200", "rocm": "mi300x", "ascend": "910b-64gb"}
FAMILY = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "compress_ratios": [0, 4, 128],
}
TOGETHER = ["", "cuda", "rocm", "ascend", "dsv4", "ascend dsv4", "cuda rocm", "cuda rocm dsv4"]


@pytest.fixture(scope="module")
def clean(shell, tmp_path_factory):
    """A folder with models, an environment with the core's wheel alone, and a folder for what each plugin installs.

    Each is installed once: a path file in the environment then says which are there, as if they were beside the core.
    """
    folder = tmp_path_factory.mktemp("alone")
    wheels = shell.build(folder, SOURCES)
    scripts = shell.environment(folder, wheels["kvdock"])
    for name, config in (("model", shell.plain), ("family", FAMILY)):
        (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    homes = {name: folder / name for name in (*DEVICES, "dsv4")}
    for name, home in homes.items():
        pip = (scripts / "python", "-m", "pip", "install", "-q", "--no-deps")
        shell.checked(*pip, "--target", home, wheels[f"kvdock_{name}"])
    return folder, scripts, homes


@pytest.fixture(scope="module", params=TOGETHER, ids=lambda names: names or "core alone")
def installed(request, shell, clean):
    """The names of the plugins that are installed, and what runs a command there."""
    folder, scripts, homes = clean
    names = request.param.split()
    put_beside_the_core(shell, scripts, [homes[name] for name in names])
    return names, lambda *words: shell.run(scripts / "kvdock", *words, cwd=folder)


def put_beside_the_core(shell, scripts, homes):
    """Let the environment find what is installed in these folders, and nothing else beside the core."""
    site = shell.checked(scripts / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "plugins.pth").write_text("".join(f"{home}\n" for home in homes), encoding="utf-8")


def test_what_the_wheels_require_is_met(shell, clean):
    _, scripts, homes = clean
    put_beside_the_core(shell, scripts, homes.values())
    shell.checked(scripts / "python", "-m", "pip", "check")


def test_just_the_installed_plugins_are_there_and_load(installed):
    names, kvdock = installed
    listed = kvdock("plugins", "--check", "--json")
    rows = [row for row in json.loads(listed.stdout) if row["name"] in DEVICES]
    assert [(row["name"], row["status"]) for row in rows] == [(name, "loaded") for name in names if name in DEVICES]


@pytest.mark.parametrize("plugin", DEVICES)
def test_a_catalogue_is_that_of_the_installed_plugin(installed, plugin):
    names, kvdock = installed
    done = kvdock("plan", "model.json", "--device", DEVICES[plugin], "--weights", "1GiB", "--json")
    if plugin in names:
        plan = json.loads(done.stdout)
        assert plan["inputs"]["device"]["name"] == DEVICES[plugin]
        owner = "ascend" if plugin == "ascend" else "core"
        assert [group["pool_cls"]["plugin"] for group in plan["groups"]] == [owner]
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert DEVICES[plugin] in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("plugin", DEVICES)
def test_a_live_device_that_is_not_there_is_an_error_in_one_line(installed, plugin):
    names, kvdock = installed
    done = kvdock("plan", "model.json", "--device", f"{plugin}:0")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    if plugin in names:
        assert "without torch" in done.stderr


def test_without_a_device_nothing_is_planned_and_each_plugin_says_why(installed):
    names, kvdock = installed
    done = kvdock("plan", "model.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no accelerator is here" in done.stderr
    said = {
        "cuda": "no CUDA device can be probed without torch",
        "rocm": "no ROCm device can be probed without torch",
        "ascend": "no Ascend device can be used without torch",
    }
    assert [name for name, words in said.items() if words in done.stderr] == [n for n in names if n in DEVICES]


def test_a_budget_is_enough_to_plan(installed):
    _, kvdock = installed
    plan = json.loads(kvdock("plan", "model.json", "--memory", "1GiB", "--json").stdout)
    # 3 layers · 4 heads · 64 · 2 (K, V) · 2 bytes
    assert plan["bytes_per_token"]["kv"] == 3072
    assert plan["total_bytes"] <= 2**30


def test_a_family_needs_its_plugin_and_on_a_hardware_of_its_own_form_their_variant(installed):
    names, kvdock = installed
    done = kvdock("plan", "family.json", "--memory", "1GiB", "--max-requests", "4", "--json")
    if "dsv4" in names:
        plugins = {group["pool_cls"]["plugin"] for group in json.loads(done.stdout)["groups"]}
        assert plugins == {"dsv4"}
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
    done = kvdock("plan", "family.json", "--device", "910b-64gb", "--weights", "1GiB", "--json")
    if names == ["ascend", "dsv4"]:
        plugins = {group["pool_cls"]["plugin"] for group in json.loads(done.stdout)["groups"]}
        assert plugins == {"ascend.dsv4"}
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr


def test_a_variant_is_loaded_only_where_both_its_plugins_are(installed):
    names, kvdock = installed
    rows = json.loads(kvdock("plugins", "--check", "--json").stdout)
    found = [row["status"] for row in rows if row["name"] == "ascend.dsv4"]
    assert found == ([] if "ascend" not in names else ["loaded" if "dsv4" in names else "inactive"])
