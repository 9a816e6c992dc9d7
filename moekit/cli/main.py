"""The command line: ``python -m moekit COMMAND``.

moekit's own commands are plugins, explain, check and doctor; other packages add theirs
(`moekit.cli.commands`). Exit codes: 0 yes, 1 no, 2 the arguments are wrong. docs/cli.md documents
the ``--json`` output.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress

import moekit
from moekit.cli import commands, explain, plugins
from moekit.discovery.registry import registry
from moekit.errors import MoekitError
from moekit.selection.judge import named


def main(argv: Sequence[str] | None = None, *, owns_stdout: bool = False) -> int:
    """Run one command and return its exit code.

    owns_stdout: the process has no other purpose, so that file descriptor 1 may be redirected.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if owns_stdout:
        _open_streams()
    args = argparse.Namespace(out=sys.stdout)
    try:
        if given and given[0] not in _OWN and not given[0].startswith("-"):
            code = commands.run(given[0], given[1:])
            if code is not None:
                args.out.flush()
                return code
        _parser(given).parse_args(given, args)
        with _alone_on_stdout(args, owns_stdout) if args.answers else nullcontext():
            code = int(args.run(args))
            args.out.flush()
        return code
    except MoekitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for example, has had enough
        # Otherwise Python writes what is left again, and complains, when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), args.out.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(
            f"error: {error.filename} cannot be read or written ({error.strerror}): choose a file "
            "or folder that exists and is yours",
            file=sys.stderr,
        )
        return 2


def _open_streams() -> None:
    """Make stdout and stderr take every text, also where they are closed or take ASCII alone."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, as in `>&-`
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")


@contextmanager
def _alone_on_stdout(args: argparse.Namespace, owns_stdout: bool) -> Iterator[None]:
    """Leave stdout to what moekit prints on ``args.out``: what plugins print goes to stderr.

    In a process that owns stdout this includes what a C library writes to file descriptor 1, and
    what is written after the answer.
    """
    with ExitStack() as stack:
        if owns_stdout and sys.stdout.fileno() == 1:
            sys.stdout.flush()
            own = os.dup(1)
            args.out = open(own, "w", encoding=sys.stdout.encoding, errors="backslashreplace")
            stack.callback(args.out.close)
            os.dup2(2, 1)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; it knows other packages' commands where it has to list them."""
    parser = argparse.ArgumentParser(
        prog="python -m moekit", description="Mixture-of-Experts layers from what is installed."
    )
    parser.add_argument("--version", action="version", version=f"moekit {moekit.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="command")

    listing = verbs.add_parser("plugins", help="what is installed, and what is wrong with it")
    plugins.add_arguments(listing)
    listing.set_defaults(run=plugins.run, answers=True)

    explaining = verbs.add_parser(
        "explain",
        help="which backends can do a problem, which is chosen, and why not the others",
        description="Say which backends can run a problem, which `compose` would choose, and why "
        "not the others. Give the sizes of a layer, or a model's folder. Exit code 0: one can run "
        "it; 1: none can; 2: the arguments are wrong.",
    )
    explain.add_arguments(explaining)
    explaining.set_defaults(run=explain.run, answers=True)

    check = verbs.add_parser(
        "check",
        help="run the conformance kit on an installed backend",
        description="Run the conformance kit on an installed backend. Exit code 0: every test "
        "passed; 1: a test failed; 2: the arguments are wrong.",
    )
    check.add_argument(
        "--gradients", action="store_true", help="run the gradient kit (write it before the name)"
    )
    check.add_argument("name", help="a dispatcher, experts backend or composite")
    options = "options of pytest, for example -k graph"
    check.add_argument("pytest_args", nargs=argparse.REMAINDER, help=options).required = False
    check.set_defaults(run=_check, answers=False)

    doctor = verbs.add_parser(
        "doctor",
        help="try what is installed: versions, backends, devices",
        description="Try what is installed on this machine. Exit code 0: no fault was found; 1: "
        "at least one was.",
    )
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    doctor.add_argument(
        "--time-limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="end a plugin that takes longer (default: %(default)g)",
    )
    doctor.set_defaults(run=_doctor, answers=True)

    if not given or given[0] not in _OWN:
        for name, line in commands.helps().items():
            added = verbs.add_parser(name, help=line.replace("%", "%%"))
            added.set_defaults(run=lambda _, name=name: commands.run(name, []) or 0, answers=False)
    return parser


_OWN = ("plugins", "explain", "check", "doctor")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0 (got {text!r})")


def _check(args: argparse.Namespace) -> int:
    if not __debug__:
        raise MoekitError(
            "Python runs without assertions (-O or PYTHONOPTIMIZE), so no test could fail: run "
            "`check` without that"
        )
    known = registry()
    if "|" in args.name and args.name not in known.experts:
        if args.name.partition(":")[0] in known.dispatchers:
            known.register(named(args.name, known.dispatcher))
        else:
            known.register(named(args.name, known.expert))
    if importlib.util.find_spec("pytest") is None:
        raise MoekitError(
            "`check` needs pytest, which is an optional extra: pip install 'moekit[testing]'"
        )
    kit = importlib.import_module("moekit.testing")
    return int(kit.run(args.name, args.pytest_args, gradients=args.gradients))


def _doctor(args: argparse.Namespace) -> int:
    doctor = importlib.import_module("moekit.cli.doctor")
    return int(doctor.run(args.out, as_json=args.json, seconds=args.time_limit))
