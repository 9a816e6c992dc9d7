"""A measured figure stands beside a command that works today, a date, versions and a machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(RESULTS.glob("2*.md"))
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PROGRAM = re.compile(r"(?:^|\s)(?:python3?|pytest|make|sh|bash|ncu|compute-sanitizer|nvcc)\s")
_SCRIPT = re.compile(r"[\w/.*{},-]*\w\.(?:py|sh|cu)\b")


def commands(text: str) -> list[str]:
    """Return the commands of a page: indented lines, with the variables that such lines set.

    "..." stands for the options of the command before.
    """
    found, variables = list[str](), dict[str, str]()
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.startswith("    ") or line.lstrip().startswith("|"):
            continue
        line = re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), line.strip())
        line = re.sub(r"\s#.*", "", line)
        if assigned := re.fullmatch(r'(\w+)="(.*)"', line):
            variables[assigned[1]] = assigned[2]
        elif line.startswith("...") and found:
            found.append(f"{program(found[-1])} {line.removeprefix('...')}")
        elif _PROGRAM.search(line):
            found.append(line)
    return found


def program(command: str) -> str:
    """Return a command up to its first option."""
    return re.split(r"\s-(?!m\b)", command)[0]


def unknown(command: str) -> list[str]:
    """Return the scripts, parts and options of a command that the repository does not have."""
    bench = pytest.importorskip("moekit_bench.options")
    scripts = [ROOT / name for name in _SCRIPT.findall(command) if not {*"*{"} & {*name}]
    wrong = [str(s.relative_to(ROOT)) for s in scripts if not s.exists()]
    options = re.findall(r"\s--([a-z][\w-]*)", command.split("python")[-1])
    if "-m moekit " in command:
        verb, *words = command.split("-m moekit ")[1].split()
        own = verb == "tune" and words and not words[0].startswith("-")  # a backend's own tuner
        known = {*bench._OPTIONS, "train", "dispatch", "layers"}
        return wrong + ([] if own or verb not in ("bench", "tune") else sorted({*options} - known))
    if "python" in command and len(scripts) == 1 and not wrong:
        source = scripts[0].read_text() + (ROOT / "benchmarks/device/common.py").read_text()
        words = shlex.split(command.split(scripts[0].name)[1], posix=False)
        parts = words[: next((i for i, w in enumerate(words) if w.startswith("-")), len(words))]
        wrong += [o for o in options if not re.search(rf"--{o}\b|\b{o}=", source)]
        wrong += [p for p in parts if re.fullmatch(r"[a-z_]+", p) and p not in source]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_result_can_be_repeated(page: Path) -> None:
    text = page.read_text()
    given = commands(text)
    assert given, "no command: an indented line with a program of this repository"
    assert not [(c, why) for c in given if (why := unknown(c))]
    day = page.stem[:10]
    assert day in "\n".join(text.splitlines()[:12]), f"its first lines do not have the date, {day}"
    assert re.search(r"torch \d+\.\d+", text), "no version of torch"
    assert re.search(r"H[12]00|CPU|AVX|Xeon|EPYC|cores", text), "no machine"
    assert not re.search(r"script\b.{0,40}not in\s+the\s+repository", text, re.S), (
        "a figure comes from a script that nobody has: give a command, or remove the figure"
    )


@pytest.mark.parametrize("page", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_of_documents_have_a_source(page: Path) -> None:
    """A section with a time names a command that works, or links to a result."""
    for section in re.split(r"^##+ ", page.read_text(), flags=re.M):
        for command in commands(section):
            assert not unknown(command), (command, unknown(command))
        if re.search(r"\d ?(?:µs|ms)\b|tokens per second", section):
            sourced = "results/" in section or commands(section) or "`python " in section
            assert sourced, section.splitlines()[0]


def test_the_list_of_results_is_complete() -> None:
    listed = re.findall(r"^\| (2\S+\.md) \|", (RESULTS / "README.md").read_text(), flags=re.M)
    assert sorted(listed) == [page.name for page in PAGES]


def test_the_checks_see_what_is_missing() -> None:
    assert commands("    P=\"python benchmarks/x.py\"\n    $P --a  # why\n    ... --b\n") == [
        "python benchmarks/x.py --a ", "python benchmarks/x.py  --b",
    ]  # fmt: skip
    assert unknown("python benchmarks/no_such.py --out x") == ["benchmarks/no_such.py"]
    assert unknown("python -m moekit bench --train --peers x") == ["peers"]
    assert unknown("python benchmarks/device/gradient_ranks.py time guess --ranks 2 --odd 1") == [
        "odd", "guess",
    ]  # fmt: skip
