"""Parts of the project import allowed parts only: ruff can ban modules, but not allow a few."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import moekit

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    "moekit", "moekit.plugin", "moekit.errors", "moekit.testing", "moekit.checkpoint",
    "moekit.training",
}  # fmt: skip
# Device code that plugins share; its package has its own interface.
SHARED = {"moekit_kernels"}
# moekit-bench measures what the core chooses. moekit-vllm and moekit-sglang read layers as the core
# reads checkpoints and transformers' modules: they are released with the core and may look inside.
INSIDE = {"moekit-bench", "moekit-sglang", "moekit-vllm"}
PLUGINS = sorted(p for p in (ROOT / "plugins").glob("moekit-*") if p.name not in INSIDE)


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the module of every absolute import, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
            if node.module == "moekit":  # `from moekit import runtime` also imports a module
                for name in node.names:
                    if (ROOT / "moekit" / name.name).is_dir():
                        yield node.lineno, f"moekit.{name.name}"


def forbidden(folder: Path, allowed: set[str]) -> list[str]:
    """Return ``file:line module`` of moekit's packages that are imported and not ``allowed``.

    The package in ``folder`` may import itself, and a kernel tuner may import moekit_bench.
    """
    own = {path.name for path in folder.iterdir()}
    found = []
    for file in sorted(folder.rglob("*.py")):
        tools = {"moekit_bench"} if file.name.startswith(("tune", "search")) else set()
        for line, module in imports(file):
            package = module.split(".")[0]
            if package.startswith("moekit") and package not in own | SHARED | tools:
                if module not in allowed:
                    found.append(f"{file.relative_to(ROOT)}:{line} imports {module}")
    return found


def test_the_core_imports_no_tool_and_no_plugin():
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sorted((ROOT / "moekit").rglob("*.py"))
        for line, module in imports(file)
        if module.startswith("moekit_")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_plugins_import_the_public_surface(plugin: Path):
    assert not (found := forbidden(plugin / "src", PUBLIC)), "\n".join(found)


def test_the_example_imports_the_public_surface():
    example = ROOT / "examples" / "custom_backend" / "src"
    assert not (found := forbidden(example, PUBLIC)), "\n".join(found)


def test_no_modules_of_the_core_import_each_other_in_a_circle():
    """Imports inside functions and for type checking count."""
    files = {}
    for file in sorted((ROOT / "moekit").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    graph[name].add(module if module in files else str(node.module))
        graph[name] = (graph[name] & files.keys()) - {name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_rooms_import_from_the_lines_below():
    """The lines are those in CONTRIBUTING.md. Imports for type checking count."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("A room of the core imports from")[2]
    rooms = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    level = {room: -number for number, room in enumerate(rooms)}
    found, met = [], set()
    for file in sorted((ROOT / "moekit").rglob("*.py")):
        room = file.relative_to(ROOT / "moekit").with_suffix("").parts[0]
        for line, module in imports(file) if room in level else ():
            other = (*module.split("."), "")[1]
            if module.startswith("moekit.") and other in level and other != room:
                met |= {room, other}
                if level[other] > level[room]:
                    found.append(f"{file.relative_to(ROOT)}:{line} imports {module}")
    assert met == set(level)
    assert not found, "\n".join(found)


def test_help_shows_no_environment():
    """A default of os.environ would print the whole environment, with its secrets, in help()."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for folder in ("moekit", "plugins")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for default in (*node.args.defaults, *node.args.kw_defaults)
        if default is not None and ast.unparse(default) in ("os.environ", "environ")
    ]
    assert not found, "\n".join(found)


def test_dir_is_the_api() -> None:
    assert set(dir(moekit)) == {*moekit.__all__, "__version__"}
    assert all(hasattr(moekit, name) for name in dir(moekit))
