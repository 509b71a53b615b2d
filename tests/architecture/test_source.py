"""What shipped code never holds: bare asserts, swallowed errors, and names of vendors or families in the core."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "kvdock"
SHIPPED = sorted(
    path
    for folder in ("core/src", "plugins", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "src" in path.relative_to(ROOT).parts and "testing" not in path.parts
)
NEUTRAL = [p for p in SHIPPED if p.is_relative_to(CORE) and not p.is_relative_to(CORE / "families")]
NAMES_OF_OTHERS = frozenset(
    [
        "nvidia",
        "cuda",
        "hopper",
        "blackwell",
        "amd",
        "rocm",
        "hip",
        "mi300x",
        "ascend",
        "npu",
        "cann",
        "intel",
        "xpu",
        "tpu",
        "metal",
        "mps",
        "llama",
        "qwen",
        "mistral",
        "mixtral",
        "gemma",
        "deepseek",
        "gptoss",
        "phi",
        "glm",
        "kimi",
        "minimax",
        "mamba",
        "jamba",
        "falcon",
        "cohere",
        "olmo",
        "acme",
    ]
)
TORCH_FILES = {CORE / "kernels" / f"{name}.py" for name in ("blocks", "microscaling", "reference")}


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that stand alone as a statement: documentation."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])", text)}


def _is_word(value: object) -> bool:
    return isinstance(value, str) and " " not in value.strip()


def _logic(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every identifier, and every string that is a word rather than a sentence, with its line."""
    documentation = _docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value
        if isinstance(node, ast.Constant) and id(node) not in documentation and _is_word(node.value):
            yield line, node.value


@pytest.mark.parametrize("path", SHIPPED, ids=_short)
def test_no_assert_guards_shipped_code(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)] == []


@pytest.mark.parametrize("path", SHIPPED, ids=_short)
def test_no_error_is_swallowed(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    handlers = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)]
    broad = [h for h in handlers if h.type is None or ast.unparse(h.type) in ("Exception", "BaseException")]
    assert [h.lineno for h in broad if isinstance(h.body[0], ast.Pass | ast.Continue)] == []


@pytest.mark.parametrize("path", SHIPPED, ids=_short)
def test_torch_is_imported_inside_functions_only(path):
    if path in TORCH_FILES or (
        "kernels" in path.parts and path.parts.index("kernels") > 0 and path.name != "interface.py"
    ):
        pytest.skip("kernels import torch at the top")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.name for n in top if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module or "" for n in top if isinstance(n, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & {"torch", "triton", "numpy"}


@pytest.mark.parametrize("path", NEUTRAL, ids=_short)
def test_core_logic_names_no_vendor_and_no_family(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [(line, text) for line, text in _logic(tree) if _words(text) & NAMES_OF_OTHERS]
    assert found == []


def test_the_word_list_finds_identifiers_and_words_but_no_prose():
    code = '"""On cuda."""\nif device.is_npu or kind == "deepseek_v4":\n    raise E("not on cuda")\n'
    assert [text for _, text in _logic(ast.parse(code)) if _words(text) & NAMES_OF_OTHERS] == [
        "is_npu",
        "deepseek_v4",
    ]


def test_files_stay_short():
    long = {_short(p): n for p in SHIPPED if (n := len(p.read_text(encoding="utf-8").splitlines())) >= 500}
    assert long == {}
