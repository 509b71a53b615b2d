"""How the wheels are built and asked: commands outside the checkout, and a model to plan."""

import os
import subprocess
import sys
import types
import venv

import pytest

PLAIN = {
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
    """Run a command without what this environment says to kvdock and Python."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVDOCK_", "PYTHONPATH"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def checked(*command, cwd=None):
    """Return what a command prints that must not fail."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder, sources):
    """Return the wheel of each distribution, built into `folder`."""
    checked(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, *sources.values())
    return {name: next(folder.glob(f"{name}-*.whl")) for name in sources}


def environment(folder, *wheels):
    """Return the scripts folder of a new environment in `folder` that holds `wheels` and what they require."""
    venv.create(folder / "env", with_pip=True)
    scripts = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    checked(scripts / "python", "-m", "pip", "install", "-q", *wheels)
    return scripts


@pytest.fixture(scope="session")
def shell():
    """Give what runs, builds and installs, and the model."""
    return types.SimpleNamespace(run=run, checked=checked, build=build, environment=environment, plain=PLAIN)
