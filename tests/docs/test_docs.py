"""Every page holds: its includes resolve, its links lead somewhere, and its Python runs."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/*/README.md")])
PAGES = [page for page in PAGES if not any(part.startswith(".venv") for part in page.parts)]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")

_spec = importlib.util.spec_from_file_location("docs_render", ROOT / "docs" / "render.py")
docs_render = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs_render)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p)], ids=_name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, monkeypatch):
    blocks = _blocks(page)
    if any("torch" in code or "build(" in code for _, code in blocks):
        pytest.importorskip("torch")
    monkeypatch.chdir(ROOT)
    namespace = {"__name__": "page"}
    for line, code in blocks:
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_links_of_a_page_lead_to_files(page):
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=_name)
def test_every_include_of_a_page_resolves(page):
    text = docs_render.render(page)
    assert "[include:" not in text
    assert text.count("```") % 2 == 0


def test_the_tutorial_includes_the_plugin_and_copies_none_of_it():
    page = ROOT / "docs" / "tutorial" / "first-plugin.md"
    text = page.read_text(encoding="utf-8")
    included = {Path(path).name for _, path, _ in docs_render.INCLUDE.findall(text)}
    assert {"hooks.py", "pools.py", "device.py", "allocators.py", "pyproject.toml"} <= included
    assert not BLOCK.search(text)


def test_a_region_is_a_definition_with_its_decorators():
    source = "import x\n\n\nclass A:\n    @x.y\n    def b(self):\n        return 1\n\n    c = 2\n"
    assert docs_render.region(source, "A.b") == "    @x.y\n    def b(self):\n        return 1"
    with pytest.raises(LookupError, match=r"'A\.z' is not in the included file"):
        docs_render.region(source, "A.z")
