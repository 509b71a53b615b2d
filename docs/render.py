"""Renders the pages of `docs/` with the code that they include: `python docs/render.py build/docs`.

A page never copies code. A line of its own of the form ``[include: TITLE](PATH)`` or
``[include: TITLE](PATH#Name.inner)`` stands for a file, or for one function, class or method of a Python file;
read unrendered, it is a plain link to it. Paths are relative to the page.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
INCLUDE = re.compile(r"^\[include: ([^\]]+)\]\(([^)#]+)(?:#([\w.]+))?\)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def render(page: Path) -> str:
    """Return the text of `page` with every include replaced by a titled block of code."""

    def block(match: re.Match[str]) -> str:
        title, path, name = match.groups()
        source = (page.parent / path).resolve()
        code = region(source.read_text(encoding="utf-8"), name) if name else source.read_text(encoding="utf-8")
        return f"`{title}`\n\n```{LANGUAGES.get(source.suffix, 'text')}\n{code.strip()}\n```"

    return INCLUDE.sub(block, page.read_text(encoding="utf-8"))


def region(source: str, name: str) -> str:
    """Return the lines of the function, class or method called `name`, decorators included.

    Raises:
        LookupError: there is none.
    """
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = _child(node, part, name)
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])  # type: ignore[attr-defined]
    return "\n".join(source.splitlines()[start - 1 : node.end_lineno])  # type: ignore[attr-defined]


def _child(node: ast.AST, part: str, name: str) -> ast.AST:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == part:
            return child
    raise LookupError(f"{name!r} is not in the included file: no {part!r}")


def main(target: Path) -> None:
    """Write every page, rendered, below `target`."""
    for page in sorted(DOCS.rglob("*.md")):
        out = target / page.relative_to(DOCS)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(page), encoding="utf-8")
        print(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
