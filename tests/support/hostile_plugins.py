# ruff: noqa: E501 (a case is a line)
"""Hostile plugins, a table: what each does, its state, and words of the reason.

`hostile_driver.py` installs each beside two good plugins and looks whether those stay usable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fake_plugins import offers

HEAD = offers().partition("@moekit.hookimpl")[0]
HOOK = HEAD + "@moekit.hookimpl\ndef moekit_experts():\n    "
LATE = "fake_bad_dist.late:Late"


@dataclass(frozen=True)
class Case:
    """One hostile distribution, ``bad-dist`` with the entry point ``bad`` if not said otherwise.

    source: of its package; late: of the module with its backend's class. state: None if it is not
    listed. says: words of the state's reason. rejected: words of the reason why `explain` leaves out
    the backend "bad". named: words of the error when "bad" is composed and packed by name; the
    choice without a name passes over it. beside: more plugins, by name.
    """

    source: str = ""
    state: str | None = "broken"
    says: tuple[str, ...] = ()
    late: str = ""
    rejected: str = ""
    named: str = ""
    entries: str | None = None
    metadata: str | None = None
    listed: str = "bad"
    beside: Mapping[str, str] = field(default_factory=dict)
    packs: bool = False


def imports(source: str, *says: str) -> Case:
    return Case(source, says=says)


def hook(body: str, *says: str) -> Case:
    return Case(HOOK + body, says=says)


def fact(changes: str, *says: str) -> Case:
    """A field of its spec."""
    return hook(f"return [spec('bad', {changes})]", *says)


def checks(source: str, rejected: str) -> Case:
    """Its backend's check, which is to reject it."""
    more = ", priority=1000, check=check"
    return Case(f"{source}\n{offers('bad', more=more)}", state="ok", rejected=rejected)


def late(source: str, named: str, *, packs: bool = False) -> Case:
    """The module of its backend's class. packs: it composes, and `pack` is at fault."""
    more = ", priority=1000"
    source = f"import sys\nfrom moekit.backends.torch_experts import TorchExperts\n{source}"
    return Case(
        offers("bad", target=LATE, more=more), state="ok", late=source, named=named, packs=packs
    )


def method(body: str, named: str, *, packs: bool = False) -> Case:
    return late(f"class Late(TorchExperts):\n    {body}", named, packs=packs)


def dispatches(body: str, named: str) -> Case:
    """A dispatcher "bad" with one method changed."""
    return Case(
        "import moekit\n@moekit.hookimpl\ndef moekit_dispatchers():\n"
        f"    return [moekit.DispatcherSpec(name='bad', target={LATE!r}, moves_tokens=False,\n"
        "        format=moekit.ActivationFormat.STANDARD, priority=1000)]",
        state="ok",
        late=f"from moekit.backends.local import LocalDispatcher\nclass Late(LocalDispatcher):\n    {body}",
        named=named,
    )


def noise(source: str) -> Case:
    """A plugin that works, and prints."""
    return Case(f"{source}\n{offers('bad')}", state="ok")


def entry(entries: str, *says: str, listed: str = "bad") -> Case:
    return Case(offers("bad"), entries=entries, says=says, listed=listed)


PANIC = "class PanicException(BaseException): pass\n"
UNREADABLE = "class Unreadable(Exception):\n    def __str__(self): "
ESCAPES = "\\x1b[31m\\x07\\n\\u202e\\ud800"

CASES: dict[str, Case] = {
    # -- what an import raises
    "panic": imports(PANIC + "raise PanicException('unwrap on None')", "PanicException: unwrap"),
    "skipped": imports("import pytest\npytest.skip('no GPU', allow_module_level=True)", "no GPU"),
    "exit": imports("import sys\nsys.exit('no driver')", "SystemExit: no driver"),
    "memory": imports("x = bytearray(1 << 60)", "MemoryError"),
    "syntax": imports("def (", "SyntaxError"),
    "deep": imports("x = " + "(" * 10000 + ")" * 10000, "Error"),
    "missing": imports("import no_such_vendor", "No module named 'no_such_vendor'"),
    "str_raises": imports(UNREADABLE + "raise RuntimeError\nraise Unreadable", "Unreadable", "raised RuntimeError"),
    "str_panics": imports(PANIC + UNREADABLE + "raise PanicException\nraise Unreadable", "raised PanicException"),
    "str_subclass": imports(
        "class S(str):\n    def __format__(self, spec): raise OSError\n"
        "    __len__ = __iter__ = isprintable = __getitem__ = __format__\n"
        + UNREADABLE + "return S('sly')\nraise Unreadable", "Unreadable: sly",
    ),
    "surrogates": imports("raise OSError('no \\udcff file')", "no \\udcff file"),
    "escapes": imports(f"raise OSError('{ESCAPES}')", ESCAPES),
    "long": imports("raise OSError('x' * 10**7)", "characters more)"),
    "name_escapes": imports("raise type('A\\x1bB\\n', (Exception,), {})('hm')", "A\\x1bB\\n: hm"),
    "name_raises": imports(
        "class M(type):\n    __name__ = property(lambda self: 1 / 0)\n"
        "class E(Exception, metaclass=M): pass\nraise E('hm')", "raised ZeroDivisionError", "hm",
    ),
    "asks_for_registry": imports("import moekit\nmoekit.registry()", "call it where the backend"),
    "module_getattr": imports("def __getattr__(name): raise OSError(name)\ndef __dir__(): return ['moekit_x']", "moekit_"),  # its OSError only with pluggy < 1.7
    # -- what its hooks return
    "no_hooks": imports("x = 1", "implements no moekit hook"),
    "typo": imports(offers("bad").replace("def moekit_experts", "def moekit_expert"), "'moekit_expert'"),
    "hook_string": hook("return 'bad'", "returned 'b'"),
    "hook_dict": hook("return {'bad': spec('bad')}", "returned 'bad', expected"),
    "hook_endless": hook("return (spec(f'bad{n}') for n in range(10**9))", "more than 1000"),
    "hook_twice": hook("return [spec('bad'), spec('bad')]", "offers 'bad' twice"),
    "hook_subclass": hook("return [type('Mine', (moekit.ExpertsSpec,), {}).__new__(moekit.ExpertsSpec)]", "name"),
    "hook_repr": hook("return [type('R', (), {'__repr__': lambda s: 1 / 0})()]", "<R instance at"),
    "hook_yields": hook("yield spec('bad'); raise OSError('gone')", "OSError: gone"),
    "hook_foreign": imports("import pluggy\n@pluggy.HookimplMarker('other')\ndef moekit_experts(): return []", "implements no moekit hook"),
    "hook_arguments": imports(offers("bad").replace("experts()", "experts(problem)"), "problem"),
    "hook_other": imports(offers("bad").replace("moekit_experts", "moekit_dispatchers"), "DispatcherSpec"),
    "fact": fact("priority='high'", "priority='high'", "it must be an integer"),
    "fact_missing": hook("return [moekit.ExpertsSpec(name='bad')]", "missing"),
    "fact_unknown": fact("speed=9", "speed"),
    "hook_forced": hook("s = spec('bad'); object.__setattr__(s, 'priority', 'high'); return [s]", "priority='high'"),
    "hook_wrapper": Case(
        HEAD + "import pluggy\n@pluggy.HookimplMarker('moekit')(wrapper=True)\n"
        "def moekit_experts():\n    yield\n    raise OSError('wrapped')", says=("wrapped",)),
    # -- its check
    "check_raises": checks("def check(p): 1 / 0", "ZeroDivisionError"),
    "check_none": checks("def check(p): pass", "check returned None, expected a list of reasons"),
    "check_generator": checks("def check(p): yield 'x'", "expected a list of reasons"),
    "check_falses": checks("def check(p): return [False]", "check returned [False], expected a list of reasons"),
    "check_blank": checks("def check(p): return [' ']", "expected a list of reasons"),
    "check_escapes": checks(f"def check(p): return ['{ESCAPES}']", ESCAPES),
    "check_unreadable": checks(UNREADABLE + "raise SystemExit\ndef check(p): raise Unreadable", "raised SystemExit"),
    # -- its backend's class
    "late_missing": late("", "has no attribute 'Late'"),
    "late_panics": late(PANIC + "raise PanicException('x')", "PanicException: x"),
    "late_function": late("def Late(*args): return TorchExperts(*args)", "does not derive from Permute"),
    "late_abstract": late("from moekit.kernel import PermuteExpertsUnpermute as Late", "lacks apply, pack, workspace"),
    "init_raises": method("def __init__(self, *a): raise RuntimeError('no context')", "cannot be made: RuntimeError: no context"),
    "init_panics": late(PANIC + "class Late(TorchExperts):\n    def __init__(self, *a): raise PanicException('x')", "PanicException: x"),
    "init_arguments": method("def __init__(self): pass", "cannot be made: TypeError"),
    "init_without_super": method("def __init__(self, *a): pass", "call super().__init__"),
    "new_none": method("def __new__(cls, *a): return None", "call super().__init__"),
    "refuses": method("def __init__(self, *a):\n        import moekit.errors\n        raise moekit.errors.Unsupported(\"'bad' rests on Tuesdays\")", "rests on Tuesdays"),
    "workspace_none": method("def workspace(self, rows): return None", "workspace(1) failed: TypeError"),
    "workspace_shape": method("def workspace(self, rows):\n        import moekit, torch\n        return [moekit.BufferSpec((-1, 2.5), torch.int8)]", "workspace(1) returned"),
    "transient_float": method("def transient_bytes(self, rows): return 0.5", "transient_bytes(1) returned 0.5"),
    "pack_dict": method("def pack(self, weights): return {'w13': weights.w13}", "pack() returned {", packs=True),
    "dispatcher_raises": dispatches("def __init__(self, *a): raise RuntimeError('no link')", "cannot be made: RuntimeError: no link"),
    "dispatcher_rows": dispatches("def max_rows(self, n): return None", "max_rows(1) returned None, expected an int"),
    "dispatcher_buffers": dispatches("def buffer_bytes(self): return -1", "buffer_bytes() returned -1"),
    # -- its entry point and metadata
    "no_module": entry("[moekit]\nbad = fake_nowhere\n", "No module named 'fake_nowhere'"),
    "no_object": entry("[moekit]\nbad = fake_bad_dist:nothing\n", "no attribute 'nothing'"),
    "no_value": entry("[moekit]\nbad =\n", "expected 'package' or 'package.module:object'"),
    "odd_value": entry("[moekit]\nbad = a b; c\n", "expected 'package' or 'package.module:object'"),
    "no_equals": entry("[moekit]\nbad\n", "bad_dist-1.0.dist-info", listed="bad_dist-1.0"),
    "stdlib": entry("[moekit]\nbad = os:system\n", "implements no moekit hook"),
    "named_twice": entry("[moekit]\nbad = fake_bad_dist\nbad = fake_other\n", "twice, for 'fake_bad_dist' and 'fake_other'"),
    "named_core": entry("[moekit]\nCore = fake_bad_dist\n", "called 'core'", listed="Core"),
    "name_of_escapes": entry("[moekit]\nb\x1b[31md = fake_nowhere\n", "No module named", listed="b\\x1b[31md"),
    "long_name": entry(f"[moekit]\n{'b' * 200} = fake_nowhere\n", "No module named", listed="b" * 80 + "... (120 characters more)"),
    "no_metadata": Case(offers("bad"), metadata="", says=("it names no distribution",), listed="bad_dist-1.0"),
    "version_of_escapes": Case("1 / 0", metadata="Name: bad-dist\nVersion: 1\x1b[2J\n", says=("ZeroDivisionError",)),
    "bytes": Case(offers("bad"), entries="[moekit]\nbad = \udcff\udcfe\n", state=None),
    # -- names of others
    "takes_torch": Case(offers("torch", "reference"), "clash", ("'torch' is a name of moekit's own", "'reference' is a name")),
    "takes_a_rivals": Case(offers("shared"), "clash", ("'shared' is also offered by beside-dist 1.0",), beside={"beside": offers("shared")}),
    # -- what it prints
    "prints": noise("print('{hello')"),
    "prints_to_fd": noise("import os\nos.write(1, b'{hello')"),
    "prints_at_exit": noise("import atexit, os\natexit.register(print, '{hello')\natexit.register(os.write, 1, b'{')"),
    "prints_from_child": noise("import os\nos.system('echo {hello')"),
    "takes_stdout": noise("import sys, io\nsys.stdout = io.StringIO()"),
    "closes_stdout": noise("import os, sys\nos.close(1)"),
    "no_stdout": noise("import sys\nsys.stdout = sys.stderr = None"),
    "logs": noise("import logging, sys\nlogging.basicConfig(stream=sys.stdout, level=0)\nlogging.error('{hello')"),
    "warns": noise("import warnings\nwarnings.warn('{hello')"),
    "hint": Case(offers("bad", more=f", requires=('no_such',), install_hint='{ESCAPES}'"), "ok", rejected=f"no_such is not installed ({ESCAPES})"),
    "finder": Case("import sys\nclass F:\n    def find_spec(*a): raise SystemExit\nsys.meta_path.append(F())\n" + offers("bad", more=", requires=('no_such',)"), "ok", rejected="no_such is not installed"),
}  # fmt: skip


HANG = "import time\nwhile True: time.sleep(1)\n"

# Plugins that no process survives, and what doctor says of them: source, words, module of its class.
DEADLY: dict[str, tuple[str, str, str]] = {
    "exits": ("import os; os._exit(0)", "while it was loaded: it exited with code 0 before it had answered", ""),
    "segfaults": ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV ended it", ""),
    "aborts": ("import os, sys; print('two versions of NCCL', file=sys.stderr, flush=True); os.abort()", "signal SIGABRT ended it; it printed last: two versions of NCCL", ""),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
    "hangs": (HANG, "it did not end within", ""),
    "hangs_deaf": ("import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n" + HANG, "it did not end within", ""),
    "hangs_in_c": ("import ctypes; ctypes.PyDLL(None).pause()", "it did not end within", ""),
    "stops": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "it did not end within", ""),
    "reads": ("input()", "EOFError", ""),
    "floods": ("while True: print('x' * 10**6)", "File too large", ""),
    "answers": ("import os, stat\nfor fd in range(3, 99):\n    try: stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b'{[\\n[]\\n[5]\\n[\"finding\"]\\n\\xff\\n')\n    except OSError: pass\nos._exit(0)", "it exited with code 0", ""),
    "forks": ("import os\nfor _ in range(3): os.fork()\n" + offers("bad"), "serves schemes: none", ""),
    "forks_and_hangs": ("import os\nif os.fork():\n    " + HANG.replace("\n", "\n    ") + "\n" + HANG, "it did not end within", ""),
    "leaves_a_child": ("import os, time\nif not os.fork(): os.setsid(); time.sleep(5); os._exit(0)\n" + offers("bad"), "serves schemes: none", ""),
    "hungry": ("hoard = []\nwhile True: hoard.append(bytes(2**26))", "MemoryError", ""),
    "hangs_in_check": (HANG.partition("while")[0] + "def check(p):\n    while True: time.sleep(1)\n" + offers("bad", more=", check=check"), "it did not end within", ""),
    "exits_in_load": (offers("bad", target=LATE), "was tried: it exited with code 3", "import os; os._exit(3)"),
    "exits_by_sys": ("import sys; sys.exit(0)", "broken: SystemExit: 0", ""),
}  # fmt: skip
