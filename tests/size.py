"""The size of the house, as figures: `make size`.

Product code is every Python file of flows, grpo_tasks and schemas. A code line is neither blank nor a comment nor part of a
docstring. A private function counts as used once if its own file names it exactly once outside of its definition.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "grpo_tasks", "schemas")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
LONG_FUNCTION = 60


def product_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of docstrings: strings that stand alone as a statement (attribute docstrings too)."""
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def code_lines(text: str, tree: ast.Module) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in NOT_CODE for line in range(token.start[0], token.end[0] + 1)}
    return lines - docstring_lines(tree)


def import_lines(tree: ast.Module) -> int:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def functions_of(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


def used_once(tree: ast.Module) -> list[str]:
    """Private functions and methods (`_name`, not `__name__`) that their file names exactly once."""
    named = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    named += Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    private = [node.name for node in functions_of(tree) if node.name.startswith("_") and not node.name.startswith("__")]
    return [name for name in private if named[name] == 1]


def figures() -> dict[str, float]:
    files = product_files()
    lines = code = imports = functions = once = long = comments = docstrings = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += len(text.splitlines())
        code += len(code_lines(text, tree))
        docstrings += len(docstring_lines(tree))
        comments += sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))
        imports += import_lines(tree)
        functions += len(functions_of(tree))
        once += len(used_once(tree))
        long += sum((node.end_lineno or 0) - node.lineno >= LONG_FUNCTION for node in functions_of(tree))
    tests = [*(ROOT / "tests").rglob("*.py")]
    return {
        "product lines": lines,
        "product files": len(files),
        "folders below grpo_tasks": len([path for path in (ROOT / "grpo_tasks").iterdir() if (path / "__init__.py").exists()]),
        "code lines": code,
        "private functions used once": once,
        "functions per 100 code lines": round(100 * functions / code, 1),
        "imports, % of code": round(100 * imports / code, 1),
        "docstring lines per 100 code lines": round(100 * docstrings / code, 1),
        "comments per 100 code lines": round(100 * comments / code, 1),
        f"functions over {LONG_FUNCTION} lines": long,
        "test lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{value:>10,}  {name}")
