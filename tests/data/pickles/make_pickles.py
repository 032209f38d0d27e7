"""Makes ``pickles.json``: values that checkpoints hold, as the picklers of many Pythons write them.

Run ``python tests/data/pickles/make_pickles.py PYTHON ...`` with the interpreters to ask: each writes every value
that it has, in protocols 2 to 5.  An entry lists all interpreters that wrote these bytes.  This file runs under
Python 2.7 and 3.6 to 3.14.  numpy, torch and DeepSpeed are the real ones where an interpreter has them; without them
numpy's values are left out, and stand-ins reduce to what torch 2.13.0 reduces to (``torch/csrc/Dtype.cpp``,
``Device.cpp``, ``Size.cpp``).
"""

from __future__ import print_function

import argparse
import base64
import collections
import datetime
import json
import os
import pickle
import platform
import subprocess
import sys
import types

try:
    import enum
    import pathlib
except ImportError:  # Python 2.7
    enum = pathlib = None
try:
    import dataclasses
except ImportError:  # before 3.7
    dataclasses = None
try:
    import numpy
except ImportError:
    numpy = None

PROTOCOLS = (2, 3, 4, 5)


def _module(name):
    """The module, made with its parents unless it is there."""
    parent, _, leaf = name.rpartition(".")
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        if parent:
            setattr(_module(parent), leaf, sys.modules[name])
    return sys.modules[name]


def _put(module, cls, qualname=None):
    cls.__module__ = module
    cls.__qualname__ = qualname or cls.__name__
    setattr(_module(module), cls.__name__, cls)
    return cls


def _zero_stage():
    """DeepSpeed's class, or one that is written like it."""
    try:
        from deepspeed.runtime.zero.config import ZeroStageEnum
    except ImportError:

        class ZeroStageEnum(int, enum.Enum):
            disabled = 0
            optimizer_states = 1
            gradients = 2
            weights = 3
            max_stage = 3

        _put("deepspeed.runtime.zero.config", ZeroStageEnum)
    return ZeroStageEnum


def _listed_enums():
    stage = _zero_stage()

    class ModelType(enum.Enum):
        encoder_or_decoder = 1
        encoder_and_decoder = 2

    class Fp8Recipe(str, enum.Enum):
        delayed = "delayed"
        tensorwise = "tensorwise"

    _put("megatron.core.enums", ModelType)
    _put("megatron.core.enums", Fp8Recipe)
    return {
        "listed enum of DeepSpeed": [stage.weights, stage.disabled, stage.gradients, stage.max_stage],
        "listed enum of Megatron": {"model_type": ModelType.encoder_and_decoder, "again": ModelType.encoder_or_decoder},
        "listed enum of texts": [Fp8Recipe.delayed, Fp8Recipe.tensorwise],
        "listed enum in a namespace": argparse.Namespace(model_type=ModelType.encoder_or_decoder, stage=stage(2)),
    }


def _foreign_enums():
    class Color(enum.Enum):
        RED = "red"
        BLUE = ("b", 2)

    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 9

    class Rights(enum.Flag):
        READ = 1
        WRITE = 2
        RUN = 4

    class Bits(enum.IntFlag):
        ONE = 1
        TWO = 2

    class Outer(object):
        class Kind(enum.Enum):
            FIRST = 1

        class Middle(object):
            class Kind(enum.IntEnum):
                SECOND = 2

    for cls in (Color, Level, Rights, Bits, Outer):
        _put("acme.options", cls)
    for cls, name in (
        (Outer.Kind, "Outer.Kind"),
        (Outer.Middle, "Outer.Middle"),
        (Outer.Middle.Kind, "Outer.Middle.Kind"),
    ):
        cls.__module__, cls.__qualname__ = "acme.options", name
    return {
        "foreign enum": [Color.RED, Color.BLUE],
        "foreign enum of integers": [Level.HIGH, Level.LOW, Level.HIGH],
        "foreign flag": [Rights.READ, Rights.READ | Rights.RUN, Rights.READ | Rights.WRITE | Rights.RUN, Rights(0)],
        "foreign flag of integers": [Bits.TWO, Bits.ONE | Bits.TWO],
        "foreign nested enum": [Outer.Kind.FIRST, Outer.Middle.Kind.SECOND],
        "foreign nested class": Outer.Middle,
    }


def _paths():
    return {
        "paths": [
            pathlib.PosixPath("/data/run 1/step_3.pt"),
            pathlib.PosixPath("relative/path"),
            pathlib.PosixPath("."),
            pathlib.PosixPath("//two/slashes"),
            pathlib.PosixPath("a//b/./c/"),
        ],
        "pure paths": [pathlib.PurePosixPath("/a/../b"), pathlib.PureWindowsPath("C:\\runs\\a"), pathlib.PurePosixPath()],
    }


def _dates():
    day = datetime.date(2024, 2, 29)
    values = {
        "dates": [day, datetime.datetime(2024, 2, 29, 23, 59, 58, 123456), datetime.time(1, 2, 3, 4)],
        "time deltas": [datetime.timedelta(3, 4, 5), datetime.timedelta(-1)],
    }
    if hasattr(datetime, "timezone"):
        east = datetime.timezone(datetime.timedelta(hours=2), "CEST")
        values["zones"] = [
            datetime.timezone.utc,
            east,
            datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
            datetime.datetime(2024, 2, 29, 1, tzinfo=east),
            datetime.time(1, 2, tzinfo=datetime.timezone.utc),
        ]
    return values


def _collections():
    groups = collections.defaultdict(list)
    groups["a"].append(1)
    counts = collections.defaultdict(int, b=2)
    shared = [1, 2]
    values = {
        "ordered dicts": collections.OrderedDict([("b", 1), ("a", collections.OrderedDict())]),
        "default dicts": [groups, counts, collections.defaultdict(None)],
        "counters": collections.Counter("aab"),
        "deques": [collections.deque([1, 2]), collections.deque([1, 2, 3], maxlen=2), collections.deque()],
        "sets": [set([1]), frozenset(["a"]), set(), frozenset()],
        "namespaces": argparse.Namespace(lr=0.1, betas=(0.9, 0.95), name=u"run"),
        "numbers": [0, -1, 255, 65536, 2**31, 2**70, -(2**70), 0.1, float("inf"), 1 + 2j, True, None],
        "texts": [u"", u"text", u"\u00fc\u20ac", u"\U0001f600", u"a\nb"],
        "bytearrays": [bytearray(b""), bytearray(b"\x00\xff")],
        "aliases": [shared, shared, (shared,)],
    }
    if sys.version_info[0] > 2:
        values["bytes"] = [b"", b"\x00\xff", b"text"]
        values["simple namespaces"] = types.SimpleNamespace(a=1, inner=types.SimpleNamespace())
    return values


def _arrays():
    return {
        "arrays": [
            numpy.arange(6, dtype="float32").reshape(2, 3),
            numpy.asfortranarray(numpy.arange(6, dtype="int16").reshape(2, 3)),
            numpy.zeros((0, 4)),
            numpy.array([True, False]),
            numpy.array(["ab", "c"]),
            numpy.array(2.5),
        ],
        "numpy scalars": [numpy.float64(2.5), numpy.float32(0.5), numpy.int64(-3), numpy.bool_(True)],
        "numpy dtypes": [numpy.dtype("float32"), numpy.dtype(">i8"), numpy.dtype("U3")],
        "random state": numpy.random.RandomState(3).get_state()[:1] + (numpy.arange(8, dtype="uint32"), 624, 0, 0.0),
    }


def _torch_values():
    try:
        import torch
    except ImportError:
        torch = _torch_stand_ins()
    return {
        "torch sizes": [torch.Size((2, 3)), torch.Size(())],
        "torch dtypes": [torch.bfloat16, torch.float32, torch.int64],
        "torch devices": [torch.device("cpu"), torch.device("cuda", 1)],
    }


def _torch_stand_ins():
    class Size(tuple):
        def __reduce__(self):
            return Size, (tuple(self),)

    class device(object):  # noqa: N801 - torch's name
        def __init__(self, kind, index=None):
            self.args = (kind,) if index is None else (kind, index)

        def __reduce__(self):
            return device, self.args

        def __eq__(self, other):
            return self.args == other.args

        __hash__ = None

    class dtype(object):  # noqa: N801 - torch's name
        def __init__(self, name):
            self.name = name
            self.__module__ = "torch"

        def __reduce__(self):
            return self.name

    for cls in (Size, device, dtype):
        _put("torch", cls)
    for name in ("bfloat16", "float32", "int64"):
        setattr(sys.modules["torch"], name, dtype(name))
    return sys.modules["torch"]


def _instances():
    class Plain(object):
        def __init__(self, a):
            self.a = a

        def __eq__(self, other):
            return self.a == other.a

        __hash__ = None

    _put("acme.options", Plain)
    values = {"foreign object": Plain(u"x")}
    if dataclasses is not None:
        run = dataclasses.make_dataclass("Run", [("lr", float), ("names", list)])
        frozen = dataclasses.make_dataclass("Frozen", [("lr", float)], frozen=True)
        _put("acme.options", run)
        _put("acme.options", frozen)
        values["foreign dataclasses"] = [run(0.5, [u"a"]), frozen(0.25)]
    return values


def values():
    """What this interpreter has of the values, by name. Names of classes off the allow-list begin with "foreign"."""
    found = dict(_collections(), **_dates())
    found.update(_instances())
    found.update(_torch_values())
    if enum is not None:
        for more in (_listed_enums, _foreign_enums, _paths):
            found.update(more())
    if numpy is not None:
        found.update(_arrays())
    return found


def _packages():
    found = {}
    for name in ("numpy", "torch", "deepspeed"):
        module = sys.modules.get(name)
        if hasattr(module, "__version__"):
            found[name] = str(module.__version__)
    return found


def _write_all():
    written = []
    for name, value in sorted(values().items()):
        for protocol in PROTOCOLS:
            if protocol <= pickle.HIGHEST_PROTOCOL:
                data = base64.b64encode(pickle.dumps(value, protocol)).decode("ascii")
                written.append([name, protocol, data])
    json.dump({"python": platform.python_version(), "packages": _packages(), "written": written}, sys.stdout)


def _collect(pythons):
    writers, entries = {}, collections.OrderedDict()
    for python in pythons:
        out = subprocess.check_output([python, os.path.abspath(__file__), "--write"])
        one = json.loads(out.decode("ascii").splitlines()[-1])
        writers[one["python"]] = one["packages"]
        for name, protocol, data in one["written"]:
            entries.setdefault((name, protocol, data), []).append(one["python"])
    lines = [
        json.dumps({"value": name, "protocol": protocol, "pickle": data, "writers": by})
        for (name, protocol, data), by in sorted(entries.items())
    ]
    text = '{"writers": %s,\n"entries": [\n%s\n]}\n' % (json.dumps(writers, sort_keys=True), ",\n".join(lines))
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "pickles.json"), "w") as out:
        out.write(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        _write_all()
    else:
        _collect(sys.argv[1:])
