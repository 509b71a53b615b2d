"""The built wheels, in a clean environment without torch: what they hold, and that a stranger's plugin takes part."""

import json
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "kvdock": ROOT / "core",
    "kvdock_cuda": ROOT / "plugins" / "cuda",
    "kvdock_acme": ROOT / "examples" / "kvdock-acme",
}
SLIDING = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def wheels(shell, tmp_path_factory):
    return shell.build(tmp_path_factory.mktemp("wheels"), DISTRIBUTIONS)


@pytest.fixture(scope="module")
def clean(shell, wheels, tmp_path_factory):
    """The scripts folder of an environment that holds the three wheels and what they require, outside the checkout."""
    folder = tmp_path_factory.mktemp("clean")
    scripts = shell.environment(folder, *wheels.values())
    for name, config in (("plain", shell.plain), ("sliding", SLIDING)):
        (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    return folder, scripts


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_holds_its_package_and_nothing_else(wheels, name):
    with zipfile.ZipFile(wheels[name]) as wheel:
        files = wheel.namelist()
    source = DISTRIBUTIONS[name] / "src" / name
    expected = {
        f"{name}/{path.relative_to(source).as_posix()}"
        for path in source.rglob("*")
        if path.suffix in (".py", ".tmpl") or path.name == "py.typed"
    }
    packaged = {file for file in files if not file.split("/")[0].endswith(".dist-info")}
    assert packaged == expected
    assert f"{name}/py.typed" in packaged


def test_the_suites_are_shipped(wheels):
    with zipfile.ZipFile(wheels["kvdock"]) as wheel:
        assert {"kvdock/testing/suites.py", "kvdock/testing/__init__.py"} <= set(wheel.namelist())


def test_a_plugin_can_be_started_from_the_wheel(shell, clean, tmp_path):
    folder, scripts = clean
    said = shell.checked(scripts / "python", "-m", "kvdock.testing", "new", "zeta", "--out", tmp_path, cwd=folder)
    assert said.startswith(f"wrote {tmp_path / 'kvdock-zeta'} (10 files); next:")
    assert (tmp_path / "kvdock-zeta" / "src" / "kvdock_zeta" / "py.typed").exists()


def test_the_clean_environment_is_sound_and_has_no_torch(shell, clean):
    folder, scripts = clean
    shell.checked(scripts / "python", "-m", "pip", "check")
    assert "No module named 'torch'" in shell.run(scripts / "python", "-c", "import torch", cwd=folder).stderr
    where = shell.checked(scripts / "python", "-c", "import kvdock; print(kvdock.__file__)", cwd=folder)
    assert str(ROOT) not in where


def test_installed_plugins_are_listed(shell, clean):
    folder, scripts = clean
    listed = shell.checked(scripts / "kvdock", "plugins", "--check", cwd=folder)
    assert "acme" in listed
    assert "cuda" in listed


def _plan(shell, clean, model, *arguments):
    folder, scripts = clean
    return json.loads(shell.checked(scripts / "kvdock", "plan", f"{model}.json", *arguments, "--json", cwd=folder))


def test_an_installed_plugin_is_claimed_on_its_device(shell, clean):
    plan = _plan(shell, clean, "plain", "--device", "acme-1")
    assert [group["pool_cls"] for group in plan["groups"]] == [{"plugin": "acme", "name": "AcmePool"}]
    assert plan["allocator_cls"] == {"plugin": "acme", "name": "AcmeAllocator"}
    assert plan["spaces"]["full"] % 16 == 0
    assert plan["total_bytes"] <= plan["budget"]["nbytes"] == int(0.9 * 15 * 2**30)


def test_an_installed_plugin_is_claimed_inside_the_sliding_composite(shell, clean):
    plan = _plan(shell, clean, "sliding", "--device", "acme-1")
    pools = {group["space"]: group["pool_cls"] for group in plan["groups"]}
    acme = {"plugin": "acme", "name": "AcmePool"}
    assert pools == {"full": acme, "swa": acme}
    assert plan["allocator_cls"]["plugin"] == "core"


def test_another_device_is_not_touched_by_it(shell, clean):
    plan = _plan(shell, clean, "plain", "--device", "h200", "--tp", "2")
    assert [group["pool_cls"]["plugin"] for group in plan["groups"]] == ["core"]


def test_a_page_that_the_device_cannot_read_is_refused_in_one_line_and_advice(shell, clean):
    folder, scripts = clean
    done = shell.run(scripts / "kvdock", "plan", "plain.json", "--device", "acme-1", "--page-size", "24", cwd=folder)
    assert done.returncode == 2
    assert "page_size=24 is no multiple of 16; give 16, 32 or 64" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_device_is_unknown_without_the_plugin(shell, clean):
    folder, scripts = clean
    done = shell.run(scripts / "kvdock", "plan", "plain.json", "--device", "acme-1", "--no-plugin", "acme", cwd=folder)
    assert done.returncode == 2
    assert "acme-1" in done.stderr
