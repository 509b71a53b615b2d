"""Planning needs neither torch nor a vendor's SDK, and importing kvdock does no work."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SDKS = ["torch", "torch_npu", "triton", "torch_memory_saver"]
PACKAGES = ["kvdock", *sorted(path.name for path in Path(__file__).parents[2].glob("*/*/src/kvdock_*"))]

_BLOCK = """
import sys

class Block:
    def __init__(self, names):
        self.names = frozenset(names)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block(BLOCKED))
"""


def run_alone(code: str, blocked: Sequence[str] = ()) -> str:
    """Return what `code` prints; a failure carries what it wrote to standard error."""
    script = f"BLOCKED = {list(blocked)!r}\n{_BLOCK}\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


IMPORT_ALL = """
import importlib, json, pkgutil
package = importlib.import_module(PACKAGE)
names = [m.name for m in pkgutil.walk_packages(package.__path__, PACKAGE + ".")]
loaded = [n for n in names if ".kernels." not in n or n.endswith(".interface")]
for name in loaded:
    importlib.import_module(name)
print(json.dumps(loaded))
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_but_kernels_imports_without_torch(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    loaded = json.loads(run_alone(f"PACKAGE = {package!r}\n{IMPORT_ALL}", blocked=SDKS))
    assert f"{package}.hooks" in loaded or f"{package}.cli" in loaded


def test_there_is_a_package_beside_the_core():
    assert "kvdock_cuda" in PACKAGES
    assert "kvdock_acme" in PACKAGES


def test_importing_kvdock_imports_no_library_that_only_a_command_needs():
    out = run_alone("import kvdock; print(sorted({'rich', 'click', 'torch', 'pluggy', 'numpy'} & set(sys.modules)))")
    assert out.strip() == "[]"


PLAN = """
import kvdock
layer = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128))
model = kvdock.ModelSpec(name="m", architecture="A", layers=(layer,) * 4, context_length=4096, dtype="bfloat16")
plan = kvdock.plan(model, device="h200", options=kvdock.CacheOptions(page_size=16))
plan.explain()
plan.to_json()
print(plan.max_total_num_tokens > 4096, "torch" in sys.modules)
"""


@pytest.mark.parametrize("blocked", [[], SDKS], ids=["allowed", "blocked"])
def test_planning_explaining_and_saving_import_no_torch(blocked):
    assert run_alone(PLAN, blocked=blocked).split() == ["True", "False"]
