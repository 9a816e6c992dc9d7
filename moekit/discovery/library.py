"""Find a vendor's library without importing it, and check its version.

Several plugins use libraries that may be installed, unpacked in a folder that an environment
variable names, or carried inside another package's wheel. Finding one reads file names and version
texts only: importing a library in order to look at it is slow and may end the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from moekit.contract.specs import find_module
from moekit.errors import BackendBroken, InvalidInput
from moekit.untrusted.code import Fault, contained

_CLAUSE = re.compile(r"(>=|<)(\d+(?:\.\d+)*)")
_VERSION_LINE = re.compile(
    r"^(?:__version__|version)\s*(?:=\s*\w+\s*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE
)
_VERSION_FILES = ("_version.py", "version.py", "__init__.py")


@dataclass(frozen=True, kw_only=True)
class VendorLibrary:
    """A library that a plugin calls: where to look for it, and which versions the plugin supports.

    Args:
        distribution: The name that pip knows, for example ``"kt-kernel"``.
        versions: The supported versions as clauses of ``>=`` and ``<``, for example
            ``">=0.33,<0.34"``. Only release numbers are compared: ``0.33.1rc1+cu130`` counts as
            0.33.1.
        module: The package to import. The default is the distribution's name with underscores.
        path_variable: An environment variable that names the package's folder, or the folder that
            holds it. Where it is set, an installed package is not looked at.
        inside: The library's folder within the package, for libraries that another wheel carries.
        file: A file that the folder must hold, for example a shared object with operators.
        install_hint: The command that installs a supported version. The default asks pip for the
            distribution and `versions`.
    """

    distribution: str
    versions: str
    module: str = ""
    path_variable: str = ""
    inside: str = ""
    file: str = ""
    install_hint: str = ""

    def __post_init__(self) -> None:
        if not all(map(_CLAUSE.fullmatch, self.versions.split(","))):
            raise InvalidInput(f"versions must look like '>=1.2,<2' (got {self.versions!r})")
        if not self.install_hint:
            hint = f"pip install '{self.distribution}{self.versions}'"
            object.__setattr__(self, "install_hint", hint)

    @property
    def named_folder(self) -> Path | None:
        """The folder that the environment variable names, whether or not it exists."""
        named = os.environ.get(self.path_variable) if self.path_variable else None
        return Path(named) if named else None

    def folder(self) -> Path | None:
        """Return the library's folder, or None if there is none."""
        package = self.named_folder or _package_folder(self._module)
        if package is None:
            return None
        if self.named_folder is not None and (package / self._module).is_dir():
            package = package / self._module
        found = package / self.inside
        return found if found.is_dir() else None

    def version(self) -> str:
        """Return the version of the library that `folder` finds, or "" where nothing tells it.

        The sources are, in this order: a version file in the folder, metadata beside the folder,
        and the metadata of the installed distribution unless an environment variable names a
        folder or the library lies inside another package.
        """
        folder = self.folder()
        if folder is not None and (found := _version_in(folder, self.distribution)):
            return found
        if self.named_folder is not None or self.inside:
            return ""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def describe(self, problem: object = None) -> str:
        """Return the library's version and folder, as a spec's ``describe``, or "" without one."""
        folder = self.folder()
        version = self.version() or "of unknown version"
        return f"{self.distribution} {version} in {folder}" if folder is not None else ""

    def unsupported(self) -> list[str]:
        """Return why the library that was found cannot be used; empty if it can, or is missing.

        A spec's ``requires`` reports a library that is not installed. A version that cannot be
        determined is accepted.
        """
        if self.named_folder is not None and self.folder() is None:
            return [
                f"{self.path_variable}={self.named_folder} is not a folder: name the folder of "
                f"{self._module}, or unset the variable"
            ]
        version = self.version()
        if version and not version_in_range(version, self.versions):
            return [
                f"{self.distribution} {version} is installed, but {self.versions} is required "
                f"({self.install_hint})"
            ]
        folder = self.folder()
        if folder is not None and not (folder / self.file).exists():
            return [
                f"{folder} holds no {self.file}: install a build for CUDA ({self.install_hint})"
            ]
        return []

    def load(self, name: str, calls: Mapping[str, str]) -> Any:
        """Import and return the module of this full name, after a `check`.

        Raises BackendBroken if the import raises anything, or the check fails.
        """
        try:
            with contained():
                module = importlib.import_module(name)
        except Fault as fault:
            raise self._broken(f"{name} does not load: {fault}") from fault.__cause__
        self.check(module, calls)
        return module

    def check(self, module: Any, calls: Mapping[str, str]) -> None:
        """Raise BackendBroken unless a module offers what the plugin calls.

        calls: For each function or class, the number of positional arguments and the names of the
            others, separated by spaces; "" for other attributes. A method that is named by its
            class counts self. Functions that tell no signature may take anything.
        """
        if faults := [why for name in calls if (why := _refusal(module, name, calls[name]))]:
            raise self._broken("; ".join(faults))

    def _broken(self, why: str) -> BackendBroken:
        what = self.describe() or self.distribution
        return BackendBroken(f"{what} cannot be used: {why} ({self.install_hint})")

    def operator(self, name: str, arguments: str) -> Any:
        """Load `file` without its package, and return an operator of torch that it registers.
        Raises BackendBroken if the file does not load, or the operator takes other arguments.

        Args:
            name: The operator with its namespace, for example ``"_C::gemm"``.
            arguments: The expected names of its arguments, in order, separated by spaces.
        """
        import torch

        namespace, _, short = name.partition("::")
        operators, path = getattr(torch.ops, namespace), (self.folder() or Path()) / self.file
        try:
            if not hasattr(operators, short):  # another package may have loaded it
                torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            found = getattr(operators, short).default
        except (OSError, AttributeError, RuntimeError) as error:
            raise BackendBroken(f"{path} does not load: {error} ({self.install_hint})") from error
        taken = " ".join(argument.name for argument in found._schema.arguments)
        if taken != arguments:
            raise BackendBroken(
                f"{name} of {path} takes the arguments {taken}, expected {arguments} "
                f"({self.install_hint})"
            )
        return found

    @property
    def _module(self) -> str:
        return self.module or self.distribution.replace("-", "_")


def _refusal(module: Any, name: str, passed: str) -> str:
    """Return why a call of ``name`` fails, or an empty string."""
    count, *names = passed.split() or ["0"]
    try:
        found = attrgetter(name)(module)
        signature = inspect.signature(found) if passed else inspect.Signature()
    except AttributeError:
        return f"{name} is missing"
    except (TypeError, ValueError):  # a compiled function
        return ""
    try:
        signature.bind(*[None] * int(count), **dict.fromkeys(names))
    except TypeError as error:
        return f"{name} cannot be called: {error}"
    return ""


def version_in_range(version: str, versions: str) -> bool:
    """Return whether the release number of ``version`` satisfies every clause of ``versions``.

    Missing parts count as 0, so that 1.2 is equal to 1.2.0.
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match is None:
        return False
    return all(
        (_release(match[0]) < _release(bound)) == (sign == "<")
        for sign, bound in _CLAUSE.findall(versions)
    )


def _release(text: str) -> tuple[int, ...]:
    """Release numbers without trailing zeros, which compare like the numbers themselves."""
    return tuple(map(int, re.sub(r"(\.0+)+$", "", text).split(".")))


def _package_folder(name: str) -> Path | None:
    """Return the folder that ``import name`` would use."""
    spec = find_module(name)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(folders[0]) if folders else None


def _version_in(folder: Path, distribution: str) -> str:
    for name in _VERSION_FILES:
        try:
            text = (folder / name).read_text(errors="replace")
        except OSError:
            continue
        if match := _VERSION_LINE.search(text):
            return match[1]
    prefix = distribution.replace("-", "_")
    beside = sorted(folder.parent.glob(f"{prefix}-*.dist-info"))
    return beside[0].name[len(prefix) + 1 : -len(".dist-info")] if beside else ""
