"""Each plugin's wheel beside the core's, and none, and all, where neither torch nor a device is: nothing falls back."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SOURCES = {"core": ROOT / "core", "cuda": ROOT / "plugins" / "cuda", "rocm": ROOT / "plugins" / "rocm"}
DEVICES = {"cuda": "h200", "rocm": "mi300x"}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def run(*command, cwd=None):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVDOCK_", "PYTHONPATH"))}
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=280)


def checked(*command, cwd=None):
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A folder with a model, an environment with the core's wheel alone, and the wheels of the plugins."""
    folder = tmp_path_factory.mktemp("alone")
    checked(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, *SOURCES.values())
    wheels = {name: next(folder.glob(f"kvdock{'' if name == 'core' else '_' + name}-*.whl")) for name in SOURCES}
    venv.create(folder / "env", with_pip=True)
    scripts = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    checked(scripts / "python", "-m", "pip", "install", "-q", wheels["core"])
    (folder / "model.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return folder, scripts, wheels


@pytest.fixture(scope="module", params=["", "cuda", "rocm", "cuda rocm"], ids=lambda names: names or "core alone")
def installed(request, clean):
    """The names of the plugins that are installed, and what runs a command there."""
    folder, scripts, wheels = clean
    names = request.param.split()
    pip = (scripts / "python", "-m", "pip")
    checked(*pip, "uninstall", "-q", "-y", *(f"kvdock-{name}" for name in DEVICES))
    if names:
        checked(*pip, "install", "-q", *(wheels[name] for name in names))
    checked(*pip, "check")
    return names, lambda *words: run(scripts / "kvdock", *words, cwd=folder)


def test_just_the_installed_plugins_are_there_and_load(installed):
    names, kvdock = installed
    listed = kvdock("plugins", "--check", "--json")
    rows = [row for row in json.loads(listed.stdout) if row["name"] in DEVICES]
    assert sorted((row["name"], row["status"]) for row in rows) == [(name, "loaded") for name in names]


@pytest.mark.parametrize("plugin", DEVICES)
def test_a_catalogue_is_that_of_the_installed_plugin(installed, plugin):
    names, kvdock = installed
    done = kvdock("plan", "model.json", "--device", DEVICES[plugin], "--weights", "1GiB", "--json")
    if plugin in names:
        plan = json.loads(done.stdout)
        assert plan["inputs"]["device"]["name"] == DEVICES[plugin]
        assert [group["pool_cls"]["plugin"] for group in plan["groups"]] == ["core"]
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
    said = {"cuda": "no CUDA device can be probed without torch", "rocm": "no ROCm device can be probed without torch"}
    assert [name for name, words in said.items() if words in done.stderr] == names


def test_a_budget_is_enough_to_plan(installed):
    _, kvdock = installed
    plan = json.loads(kvdock("plan", "model.json", "--memory", "1GiB", "--json").stdout)
    # 3 layers · 4 heads · 64 · 2 (K, V) · 2 bytes
    assert plan["bytes_per_token"]["kv"] == 3072
    assert plan["total_bytes"] <= 2**30
