"""The pages of the Python interface, from signatures and docstrings. The sources are read, and nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

WIDEST = 88
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_pages(package: Path) -> dict[str, str]:
    """A page for every public name of lockstep, and one for those of lockstep.ray."""
    pages = {}
    for name, module in _public(package).items():
        definition, sections = _find(package, module, name)
        pages[f"python/{name}.md"] = f"# lockstep.{name}\n\n{_described(definition, name, sections)}"
    parts = []
    for name, module in _public(package / "ray").items():
        definition, sections = _find(package, module, name)
        parts.append(f"## {name}\n\n{_described(definition, name, sections, level=3)}")
    begins = "# lockstep.ray\n\nThese need the extra `ray`; [Inside Ray Train](../ray.md) shows how to use them.\n\n"
    pages["python/ray.md"] = begins + "\n".join(parts)
    definition, sections = _find(package, "lockstep.testing", "assert_parity")
    begins = "# lockstep.testing\n\n[Is your parallel code right?](../parity.md) shows its use.\n\n## assert_parity"
    pages["python/testing.md"] = f"{begins}\n\n{_described(definition, 'assert_parity', sections, level=3)}"
    return pages


def _public(package: Path) -> dict[str, str]:
    """Public names, and the modules that they come from: as type checkers see them."""
    found = {}
    for node in ast.walk(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom) and each.module:
                    found.update({alias.name: each.module for alias in each.names})
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _find(package: Path, module: str, name: str) -> tuple[ast.ClassDef | Function, dict[int, str]]:
    """A definition, and the comments between the methods of a class by their line: its sections."""
    top = package
    while top.name != "lockstep":
        top = top.parent
    path = top.parent.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            if isinstance(node, ast.ClassDef):
                _inherit_fields(node, tree, top)
            lines = enumerate(text.split("\n"), start=1)
            comments = [(number, re.match(r"    # ([A-Z][\w ,]+?)(?:$|: |\. )", line)) for number, line in lines]
            return node, {number: found.group(1) for number, found in comments if found}
    raise LookupError(f"{file}: has no {name}")


def _inherit_fields(node: ast.ClassDef, tree: ast.Module, top: Path) -> None:
    """Adds the fields of a dataclass of Lockstep that a class derives from."""
    bases = {ast.unparse(each) for each in node.bases}
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("lockstep"):
            for alias in statement.names:
                if alias.name in bases and alias.asname is None:
                    base, _ = _find(top, str(statement.module), alias.name)
                    if isinstance(base, ast.ClassDef):
                        node.decorator_list += base.decorator_list
                        node.body += [each for each in base.body if isinstance(each, ast.AnnAssign)]


def _described(node: ast.ClassDef | Function, name: str, sections: dict[int, str], level: int = 2) -> str:
    if not isinstance(node, ast.ClassDef):
        return f"{_signature(node, name)}\n\n{_docstring(node)}\n"
    parts = [_constructor(node), _docstring(node), *_members(node, sections, level)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _constructor(node: ast.ClassDef) -> str:
    """How one is made, where it is the user who makes it."""
    if node.name in ("Run", "Task", "Hook"):  # given to the user's code, or derived from
        return ""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    if own:
        return _signature(own[0], node.name)
    return _fenced(f"{node.name}({', '.join(ast.unparse(each) for each in fields)})") if dataclass else ""


def _members(node: ast.ClassDef, sections: dict[int, str], level: int) -> Iterator[str]:
    begun: set[int] = set()
    last = node.lineno
    for each in node.body:
        if not isinstance(each, ast.FunctionDef) or each.name.startswith("_") or _is(each, "overload", "setter"):
            continue
        first = min([each.lineno, *(decorator.lineno for decorator in each.decorator_list)])
        new = [number for number in sections if last <= number < first and number not in begun]
        begun.update(new)
        last = first
        if new:
            yield f"{'#' * level} {sections[new[-1]]}"
        deeper = "#" * (level + bool(begun))
        anchor = f"{{#{node.name}.{each.name}}}"
        if _is(each, "property", "cached_property"):
            returned = f": {ast.unparse(each.returns)}" if each.returns else ""
            yield f"{deeper} {each.name} {anchor}\n\n{_fenced(f'{each.name}{returned}')}\n\n{_docstring(each)}"
        else:
            yield f"{deeper} {each.name} {anchor}\n\n{_signature(each, each.name)}\n\n{_docstring(each)}"


def _is(node: Function, *decorators: str) -> bool:
    return any(ast.unparse(each).rpartition(".")[2] in decorators for each in node.decorator_list)


def _signature(node: Function, name: str) -> str:
    arguments = node.args
    whole = ast.unparse(arguments)
    texts = re.sub(r"^self(, )?", "", whole)
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({texts}){returned}"
    if len(line) <= WIDEST:
        return _fenced(line)
    parsed = ast.parse(f"def f({texts}): ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return _fenced(f"{name}(\n" + "".join(f"    {each},\n" for each in _each(parsed.args)) + f"){returned}")


def _each(arguments: ast.arguments) -> Iterator[str]:
    """Every argument as it is written."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    yield from (_argument(each, default) for each, default in zip(plain, defaults, strict=True))
    if arguments.vararg:
        yield f"*{_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(each, default)
    if arguments.kwarg:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = f"{argument.arg}: {ast.unparse(argument.annotation)}" if argument.annotation else argument.arg
    return f"{text} = {ast.unparse(default)}" if default is not None else text


def _docstring(node: ast.ClassDef | Function) -> str:
    """With links to the pages that it names."""
    text = ast.get_docstring(node) or ""
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", text)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
