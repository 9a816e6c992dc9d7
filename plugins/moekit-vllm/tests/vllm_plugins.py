"""Install this folder's plugins of vLLM."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType


def install(plugin: ModuleType, folder: Path) -> None:
    """Make an installed package of a module in ``folder``, which PYTHONPATH then names."""
    name = plugin.__name__
    assert plugin.__file__ is not None
    (folder / f"{name}.py").write_text(Path(plugin.__file__).read_text())
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
