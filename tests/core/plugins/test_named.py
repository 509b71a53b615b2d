"""On the command line a plugin that is asked for by name takes part or stops the run, and names are checked."""

import json

import pytest
from click.testing import CliRunner
from kvdock import PlanError, PluginError, edge
from kvdock.cli import main
from kvdock.options import CacheOptions
from kvdock.startup import allowed, check_names, installed

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def call(*arguments, **environ):
    return CliRunner(env=environ).invoke(main, list(arguments))


def refused(result):
    """Return what a refused command says, after checking that it says it as one."""
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kvdock: ")
    return result.stderr


BROKEN = "'aa_broken' (kvdock-broken 0.3) failed to load from site_broken: ModuleNotFoundError: No module named"


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--memory", "4GiB", "--plugin", "aa_broken"], {}),
        (["--memory", "4GiB"], {"KVDOCK_PLUGINS": "aa_broken"}),
        (["--device", "cpu", "--plugin", "aa_broken"], {}),
    ],
)
def test_hardware_that_was_asked_for_by_name_and_fails_stops_the_run(site, config, flags, environ):
    """L-02: even where no hardware matters, as for a bare budget."""
    site("broken")
    assert BROKEN in refused(call("plan", config, *flags, **environ))


@pytest.mark.filterwarnings("ignore::kvdock.plugins.loading.PluginWarning")
def test_a_plugin_that_fails_and_that_nobody_named_does_not(site, config):
    site("broken")
    assert call("plan", config, "--memory", "4GiB").exit_code == 0


def test_a_check_of_a_plugin_by_name_fails_with_it(site):
    site("broken")
    assert BROKEN in refused(call("plugins", "--check", "--plugin", "aa_broken"))


def test_a_name_that_is_asked_for_and_left_out_is_refused(site, config):
    site("good")
    clash = "plugin 'zz_good' is asked for and left out by no_plugins at once; drop one of the two"
    both = ["--plugin", "zz_good", "--no-plugin", "zz_good"]
    assert clash in refused(call("plan", config, "--memory", "4GiB", *both))
    assert clash in refused(call("plugins", *both))


def test_listing_checks_the_names_that_it_is_given(site):
    site("good")
    assert "plugins: no plugin is called 'zz_god'; did you mean 'zz_good'?" in refused(
        call("plugins", "--plugin", "zz_god")
    )
    assert "no_plugins: 'core' is built in and cannot be left out" in refused(call("plugins", "--no-plugin", "core"))
    assert "no plugin is called 'zz_god'" in refused(call("plugins", KVDOCK_PLUGINS="zz_god"))
    assert call("plugins", "--plugin", "zz_good").exit_code == 0


def test_rows_without_a_check_still_import_nothing(site):
    site("broken")
    rows = {row.name: row.status for row in edge.plugin_rows(options=CacheOptions(plugins=("aa_broken",)))}
    assert rows["aa_broken"] == "found"


def test_leaving_a_plugin_out_narrows_the_list_of_the_environment(site):
    site("good", "family")
    options, environ = CacheOptions(no_plugins=("zz_good",)), {"KVDOCK_PLUGINS": "zz_good, fam"}
    assert allowed(options, environ) == ("fam",)
    registry = installed(options, environ=environ)
    assert [member.name for member in registry.members if member.tier != "core"] == ["fam"]
    assert {p.name: p.reason for p in registry.problems}["zz_good"] == "left out by no_plugins"
    check_names(options, environ)
    with pytest.raises(PluginError, match="no plugin is called 'fan'; did you mean 'fam'"):
        check_names(options, {"KVDOCK_PLUGINS": "fan"})


def test_a_preference_without_an_effect_is_refused(site, config):
    site("good")
    with pytest.raises(PlanError, match="prefer='get_kernels=zz_good': 'zz_good' does not implement get_kernels"):
        edge.plan(config, options={"plugins": ("zz_good",), "prefer": ("get_kernels=zz_good",)}, budget_bytes=2**32)


@pytest.mark.parametrize(
    ("flags", "environ", "reason"),
    [
        (["--no-plugin", "zz_good"], {}, "left out by no_plugins"),
        ([], {"KVDOCK_PLUGINS": ""}, "plugins is empty, which leaves the core alone; add zz_good"),
    ],
)
def test_a_device_that_nobody_lists_names_the_hardware_that_was_left_out(site, config, flags, environ, reason):
    site("good")
    said = refused(call("plan", config, "--device", "no-such-1", *flags, **environ))
    assert "no device is called 'no-such-1'" in said
    assert f"zz_good (kvdock-good 1.2): {reason}" in said
