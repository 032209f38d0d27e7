"""Pickles that would run something: GLOBAL, REDUCE, BUILD and their kin. Each leaves `canary` behind if it runs.

`pickle.forbidden_call` in `convert` means: met before anything else, and never run. `inspect` writes nothing, so it
lists such names and goes on; arguments that no writer gives to an allow-listed name are refused by both.
"""

from __future__ import annotations

import pickle

from adversarial.corpus import carriers, opcodes as op
from adversarial.corpus.entry import OK, Entry

CANARY = "reshard-canary"
COMMAND = f"touch {CANARY}"
PYTHON = f"open({CANARY!r}, 'w').close()"

CALL, BUILD, GLOBAL = "pickle.forbidden_call", "pickle.forbidden_build", "pickle.forbidden_global"
SYSTEM = op.name("os", "system")


def _control(code: bytes) -> bytes:
    # Python maps the names of Python 2 up to protocol 2, and follows dots in names from protocol 4 on.
    return (b"\x80\x02" if b"__builtin__" in code else b"\x80\x04") + code + b"."


def _value(number: int, name: str, code: bytes, expected: str = CALL, *, runs: bool = True, why: str = "") -> Entry:
    """A value that `convert` refuses by name, and that `inspect` lists."""
    control = _control(code) if runs else None
    return Entry(number, name, expected, carriers.payload(code), inspect=OK, runs=control, why=why)


def _refused(number: int, name: str, code: bytes, expected: str = CALL, *, runs: bool = False, why: str = "") -> Entry:
    """A value that both commands refuse."""
    control = _control(code) if runs else None
    return Entry(number, name, expected, carriers.payload(code), runs=control, why=why)


def _gadget(module: str, qualified: str, *args: object) -> bytes:
    return op.call(op.name(module, qualified), *args)


def _stack_name(module: str, qualified: str) -> bytes:
    return op.push(module) + op.push(qualified) + b"\x93"


_NESTED = pickle.dumps(None)[:-1] + b"0" + op.call(SYSTEM, COMMAND) + b"."
"""A pickle in bytes that calls."""

_HIDDEN_BYTES = op.call(op.name("_codecs", "encode"), _NESTED.decode("latin-1"), "latin1")

_GETATTR = op.call(
    op.Code(
        op.call(op.name("builtins", "getattr"), op.Code(op.call(op.name("builtins", "__import__"), "os")), "system")
    ),
    COMMAND,
)
_WRAPPER = op.name("torch._utils", "_rebuild_wrapper_subclass")
_QUANTIZED = op.name("torchao.optim.subclass_8bit", "OptimState8bit")


def _made_of(kind: op.Code, *, other: op.Code | None = None, dtype: op.Code | None = None, **state: object) -> bytes:
    """A tensor that is made of others, by a class of its own."""
    inner = (other or kind, dtype or op.name("torch", "float32"), (2, 2), (2, 1), 0, None, None, False)
    return op.call(op.name("torch._tensor", "_rebuild_from_type_v2"), _WRAPPER, kind, inner, state)


_STAGE = op.name("deepspeed.runtime.zero.config", "ZeroStageEnum")


def _getattr(owner: op.Code, attribute: str) -> op.Code:
    return op.Code(op.call(op.name("builtins", "getattr"), owner, attribute))


_ATTRGETTER = op.call(
    op.Code(
        op.call(
            op.Code(op.call(op.name("operator", "attrgetter"), "system")),
            op.call(op.name("builtins", "__import__"), "os"),
        )
    ),
    COMMAND,
)
_PARTIAL = op.call(op.Code(op.call(op.name("functools", "partial"), SYSTEM, COMMAND)))
_RESOLVED = op.call(op.Code(op.call(op.name("pkgutil", "resolve_name"), "os:system")), COMMAND)

# Published bypasses of scanners, by the names that they used; all are one case to us, and none is listed in the engine.
GADGETS: dict[str, bytes] = {
    "posix-system": _gadget("posix", "system", COMMAND),
    "nt-style-alias": _gadget("os", "popen", COMMAND),
    "subprocess-check-output": _gadget("subprocess", "check_output", ["sh", "-c", COMMAND]),
    "subprocess-getoutput": _gadget("subprocess", "getoutput", COMMAND),
    "builtins-exec": _gadget("builtins", "exec", PYTHON),
    "builtins-eval": _gadget("builtins", "eval", PYTHON),
    "python2-builtin-eval": _gadget("__builtin__", "eval", PYTHON),
    "builtins-open": _gadget("builtins", "open", CANARY, "w"),
    "io-open": _gadget("io", "open", CANARY, "w"),
    "pathlib-touch": _gadget("pathlib", "Path.touch", op.Code(_gadget("pathlib", "Path", CANARY))),
    "pty-spawn": _gadget("pty", "spawn", ["sh", "-c", COMMAND]),
    "code-interact": _gadget("code", "InteractiveInterpreter.runsource", op.Code(_gadget("code", "InteractiveInterpreter")), PYTHON),
    "timeit": _gadget("timeit", "timeit", PYTHON, "pass", op.name("time", "perf_counter"), 1),
    "cprofile-run": _gadget("cProfile", "run", PYTHON),
    "profile-run": _gadget("profile", "run", PYTHON),
    "pdb-run": _gadget("bdb", "Bdb.run", op.Code(_gadget("bdb", "Bdb")), PYTHON),
    "runpy": _gadget("runpy", "_run_code", op.Code(op.call(op.name("builtins", "compile"), PYTHON, "x", "exec")), {}),
    "asyncio-unix": _gadget("asyncio.unix_events", "_UnixSubprocessTransport._start", op.Code(b"}"), COMMAND),
    "doctest": _gadget("doctest", "debug_script", PYTHON),
    "ensurepip": _gadget("ensurepip", "_run_pip", ["--version"]),
    "logging-config": _gadget("logging.config", "_resolve", "os.system"),
    "lib2to3": _gadget("lib2to3.pgen2.grammar", "Grammar.loads", op.Code(_gadget("lib2to3.pgen2.grammar", "Grammar")), _NESTED),
    "multiprocessing": _gadget("multiprocessing.util", "spawnv_passfds", b"/bin/sh", [b"sh", b"-c", COMMAND.encode()], ()),
    "idlelib": _gadget("idlelib.run", "Executive.runcode", None, PYTHON),
    "shutil-rmtree": _gadget("shutil", "copyfile", "/etc/hostname", CANARY),
    "urllib": _gadget("urllib.request", "urlretrieve", "file:///etc/hostname", CANARY),
    "ctypes": _gadget("ctypes", "CDLL", "libc.so.6"),
    "types-function": _gadget("types", "FunctionType", op.Code(_gadget("marshal", "loads", b"N")), {}),
    "yaml": _gadget("yaml", "unsafe_load", f"!!python/object/apply:os.system ['{COMMAND}']"),
    "numpy-testing-runstring": _gadget("numpy.testing._private.utils", "runstring", PYTHON, {}),
    "torch-inductor": _gadget("torch._inductor.codecache", "compile_file", COMMAND, "x", "y"),
    "torch-collect-env": _gadget("torch.utils.collect_env", "run", COMMAND),
    "torch-dynamo": _gadget("torch._dynamo.guards", "GuardBuilder.get", op.Code(b"}"), PYTHON),
    "torch-unsafe-legacy": _gadget("torch.serialization", "_legacy_load", None, None, None),
    "deepspeed-runner": _gadget("deepspeed.launcher.runner", "main", ["--help"]),
    "reshard-itself": _gadget("reshard.cli.main", "main"),
}  # fmt: skip
NOT_RUN_BY_CONTROL = {
    "asyncio-unix", "ensurepip", "logging-config", "idlelib", "types-function", "ctypes", "yaml", "urllib",
    "torch-inductor", "torch-dynamo", "torch-unsafe-legacy", "deepspeed-runner", "reshard-itself", "code-interact",
    "numpy-testing-runstring", "lib2to3", "pathlib-touch", "multiprocessing", "doctest",
}  # fmt: skip
"""They need a package, a terminal or an object that the control does not have; the name alone is refused."""

_LOOK_ALIKE = "co\u0301llections"

ENTRIES = (
    _value(1, "global-reduce", op.call(SYSTEM, COMMAND)),
    _value(2, "stack-global-from-memo", op.push("os") + b"q\x01" + op.push("system") + b"q\x0200h\x01h\x02\x93" + op.push((COMMAND,)) + b"R"),
    _value(2, "stack-global", _stack_name("os", "system") + op.push((COMMAND,)) + b"R"),
    _value(3, "inst", b"(S'" + COMMAND.encode() + b"'\nios\nsystem\n", BUILD),
    _value(4, "obj", b"(" + SYSTEM + op.push(COMMAND) + b"o", BUILD),
    _value(5, "newobj-popen", op.name("subprocess", "Popen") + op.push((["sh", "-c", COMMAND],)) + b"\x81", BUILD, runs=False),
    _value(6, "newobj-ex", op.name("subprocess", "Popen") + op.push(()) + op.push({"args": COMMAND, "shell": True}) + b"\x92", BUILD, runs=False),
    _value(7, "build-setstate", op.name("threading", "Thread") + b")\x81" + op.push({"_target": SYSTEM, "_args": (COMMAND,)}) + b"b", BUILD, runs=False, why="a class off the list is refused when it is instantiated, before its state; --opaque keep makes it inert"),
    _refused(8, "build-dunder-on-ordered-dict", op.ordered({}) + op.push({"__class__": 1, "__reduce__": 2}) + b"b", BUILD),
    _refused(8, "build-dunder-on-namespace", op.name("argparse", "Namespace") + b")\x81" + op.push({"__dict__": {}}) + b"b", BUILD),
    _refused(8, "build-slots-dunder", op.ordered({}) + op.push((None, {"__class__": 1})) + b"b", BUILD),
    _refused(9, "ext1", b"\x82\x01", "pickle.ext_forbidden"),
    _refused(9, "ext2", b"\x83\x01\x00", "pickle.ext_forbidden"),
    _refused(9, "ext4", b"\x84\x01\x00\x00\x00", "pickle.ext_forbidden"),
    _refused(10, "getattr-chain", _GETATTR, runs=True),
    _value(10, "getattr-of-names", op.call(op.Code(_getattr(_getattr(op.name("torch", "serialization"), "os"), "system")), COMMAND)),
    _value(10, "getattr-of-an-enum", op.call(op.Code(_getattr(_STAGE, "mro"))), runs=False),
    _value(10, "getattr-of-no-member", _getattr(_STAGE, "optimizer"), GLOBAL, runs=False),
    _value(10, "getattr-of-a-method", _getattr(op.ordered({}), "keys"), runs=False),
    _refused(10, "getattr-dunder", _getattr(_STAGE, "__subclasses__")),
    _refused(10, "getattr-default", op.call(op.name("builtins", "getattr"), _STAGE, "optimizer", SYSTEM)),
    _refused(10, "getattr-build", _getattr(_STAGE, "weights") + op.push({"__class__": SYSTEM}) + b"b", BUILD),
    _refused(10, "getattr-member-called", op.call(op.Code(_getattr(_STAGE, "weights")), COMMAND)),
    _value(10, "getattr-mentioned", op.push([op.name("builtins", "getattr")]), GLOBAL, runs=False),
    _refused(10, "attrgetter-chain", _ATTRGETTER, runs=True),
    _refused(11, "pkgutil-resolve-name", _RESOLVED, runs=True),
    _value(12, "importlib", op.call(op.name("importlib", "import_module"), "os"), runs=False),
    _refused(13, "functools-partial", _PARTIAL, runs=True),
    _value(14, "dotted-global", op.call(op.Code(_stack_name("torch", "serialization.os.system")), COMMAND)),
    _value(14, "dotted-global-by-name", op.call(op.name("torch.serialization", "os.system"), COMMAND), runs=False),
    _value(15, "pickle-loads-nested", op.call(op.name("pickle", "loads"), _HIDDEN_BYTES)),
    _value(15, "c-pickle-loads-nested", op.call(op.name("_pickle", "loads"), _NESTED)),
    _value(15, "torch-load-nested", op.call(op.name("torch", "load"), op.Code(_gadget("io", "BytesIO", _NESTED))), runs=False),
    _value(15, "codecs-decode", op.call(op.name("_codecs", "decode"), b"x", "rot13"), runs=False),
    _refused(15, "codecs-encode-zip", op.call(op.name("_codecs", "encode"), "x" * 50, "zip")),
    _value(16, "torch-hub", op.call(op.name("torch.hub", "load"), "user/repo", "model"), runs=False),
    _value(16, "numpy-f2py", op.call(op.name("numpy.f2py.crackfortran", "getlincoef"), PYTHON, {}), runs=False),
    _value(16, "torch-jit-annotations", op.call(op.name("torch.jit.annotations", "parse_type_line"), PYTHON, None, None), runs=False),
    _value(16, "torch-rpc", op.call(op.name("torch.distributed.rpc.internal", "PythonUDF"), SYSTEM, (COMMAND,), {}), runs=False),
    *(_value(16, f"gadget-{name}", code, runs=name not in NOT_RUN_BY_CONTROL) for name, code in GADGETS.items()),
    _value(17, "call-then-pop", b"N" + op.call(SYSTEM, COMMAND) + b"0"),
    _value(17, "call-then-pop-mark", b"N(" + op.call(SYSTEM, COMMAND) + b"1"),
    _value(17, "call-then-memo", b"(" + op.call(SYSTEM, COMMAND) + b"q\x011N"),
    Entry(18, "payload-then-garbage", CALL, carriers.pickled(b"\x80\x02" + op.call(SYSTEM, COMMAND) + b"\xff\xff\xff"), inspect="pickle.unsupported_op"),
    Entry(18, "payload-then-end", CALL, carriers.pickled(b"\x80\x02" + op.call(SYSTEM, COMMAND)), inspect="pickle.truncated"),
    Entry(19, "build-after-stop", "pickle.trailing", carriers.pickled(carriers.model_states().data_pkl() + op.name("argparse", "Namespace") + b")\x81" + op.push({"__x": SYSTEM}) + b"b"), why="the bytes after STOP are refused as such: nobody reads them"),
    _refused(20, "look-alike-module", op.call(op.Code(_stack_name(_LOOK_ALIKE, "OrderedDict"))), GLOBAL),
    _refused(20, "look-alike-global", op.call(op.name(_LOOK_ALIKE, "OrderedDict")), GLOBAL),
    _refused(20, "look-alike-with-a-space", op.call(op.name("collections ", "OrderedDict")), GLOBAL),
    _refused(20, "name-of-no-parts", op.call(op.Code(_stack_name("os..path", "system."))), GLOBAL),
    Entry(21, "namespace-with-hostile-values", OK, carriers.payload(op.name("argparse", "Namespace") + b")\x81" + op.push({"cmd": COMMAND, "a\x1b[31m": "\u202e", "eval": PYTHON}) + b"b")),
    _value(21, "namespace-that-mentions", op.name("argparse", "Namespace") + b")\x81" + op.push({"hook": SYSTEM}) + b"b", GLOBAL, runs=False),
    _refused(22, "from-type-foreign-func", op.call(op.name("torch._tensor", "_rebuild_from_type_v2"), SYSTEM, op.name("torch", "Tensor"), (COMMAND,), {})),
    _refused(22, "from-type-foreign-type", op.call(op.name("torch._tensor", "_rebuild_from_type_v2"), op.name("torch._utils", "_rebuild_tensor_v2"), op.name("os", "_Environ"), (), {})),
    _value(22, "wrapper-of-a-function", _made_of(SYSTEM), "pickle.forbidden_global", runs=False),
    _refused(22, "wrapper-of-two-classes", _made_of(_QUANTIZED, other=op.name("torch", "Tensor"))),
    _refused(22, "wrapper-that-sets-its-class", _made_of(_QUANTIZED, __class__=op.name("argparse", "Namespace")), BUILD),
    _refused(22, "wrapper-of-no-type", _made_of(_QUANTIZED, dtype=op.name("torch", "device"))),
    _refused(22, "wrapper-called-alone", op.call(_WRAPPER, _QUANTIZED)),
    _refused(22, "layout-of-a-command", op.call(op.name("torch.serialization", "_get_layout"), COMMAND)),
    _refused(23, "rebuild-tensor-two-args", op.call(op.name("torch._utils", "_rebuild_tensor_v2"), 1, 2), "pickle.type_confusion"),
    _refused(23, "rebuild-tensor-nine-args", op.call(op.name("torch._utils", "_rebuild_tensor_v2"), *range(9)), "pickle.type_confusion"),
    _refused(23, "rebuild-tensor-of-a-list", op.call(op.name("torch._utils", "_rebuild_tensor_v2"), [1], 0, (1,), (1,), False, {}), "pickle.type_confusion"),
    _refused(23, "rebuild-tensor-text-offset", op.tensor(op.storage("FloatStorage", "0", 12), (3,), offset="0"), "pickle.type_confusion"),
    _refused(23, "rebuild-parameter-of-text", op.call(op.name("torch._utils", "_rebuild_parameter"), "x", True, {}), "pickle.type_confusion"),
    _refused(24, "numpy-object-dtype", op.call(op.name("numpy", "dtype"), "O8", False, True)),
    _refused(24, "numpy-object-scalar", op.call(op.name("numpy.core.multiarray", "scalar"), op.call(op.name("numpy", "dtype"), "O", 0, 1), _NESTED)),
    _refused(25, "numpy-dtype-state-itemsize", op.Code(op.call(op.name("numpy", "dtype"), "V8", 0, 1)) + op.push((3, "<", None, None, None, 1 << 40, -1, 0)) + b"b", "pickle.type_confusion"),
    _refused(25, "numpy-dtype-state-align", op.Code(op.call(op.name("numpy", "dtype"), "f8", 0, 1)) + op.push((3, "<", None, None, None, -1, 1 << 40, 0)) + b"b", "pickle.type_confusion"),
    _refused(25, "numpy-dtype-state-fields", op.Code(op.call(op.name("numpy", "dtype"), "f8", 0, 1)) + op.push((3, "<", None, ("a",), {"a": 1}, -1, -1, 0)) + b"b", "pickle.type_confusion"),
    _refused(25, "numpy-array-state-shape", op.Code(op.call(op.name("numpy.core.multiarray", "_reconstruct"), op.name("numpy", "ndarray"), (0,), b"b")) + op.push((1, (1 << 40,), op.call(op.name("numpy", "dtype"), "f8", 0, 1), False, b"12345678")) + b"b", "pickle.type_confusion"),
)  # fmt: skip
