"""Fulmen: a deep-learning compiler that says who runs what, and why.

Importing it costs little and needs neither PyTorch nor NumPy; each name below loads what it needs when it is first used.
"""

import importlib as _importlib
import os as _os

# In a build tree this file is a link beside the extension; the other Python files are where it points.
_source = _os.path.dirname(_os.path.realpath(__file__))
if _source not in __path__:
    __path__.append(_source)

try:
    from fulmen import _core  # noqa: E402
except ImportError as error:
    if "partially initialized" not in str(error):
        raise
    raise ImportError(f"fulmen: {_os.path.dirname(__file__)} has no extension _core for this Python; build it with `make build`") from None
from fulmen._core import DeviceError, Error, InternalError, ShapeError, TypeError, UnsupportedError  # noqa: E402

__version__ = "0.1.0"

# Public name -> the module that has it.
_lazy = {
    "sdpa": "_attention",
    "attention": "_attention",
    "attention_for_torch": "_attention_for_torch",
    "install": "_attention_for_torch",
    "uninstall": "_attention_for_torch",
    "claims": "_claims",
    "Claims": "_claims",
    "executor": "_executors",
    "executors": "_executors",
    "default_executors": "_executors",
    "set_default_executors": "_executors",
    "targets": "_executors",
    "cache_info": "_executors",
    "clear_caches": "_executors",
    "jit": "_jit",
    "last_traces": "_jit",
    "profile": "_profile",
    "audit": "_audit",
    "grad": "_arrays",
    "value_and_grad": "_arrays",
    "explain": "_explain",
    "Explanation": "_explain",
}
_modules = ("ops", "transformers", "torch_backend", "testing", "cli")

__all__ = ["DeviceError", "Error", "InternalError", "ShapeError", "TypeError", "UnsupportedError", *_lazy]


def __getattr__(name):
    if name in _lazy:
        value = getattr(_importlib.import_module("fulmen." + _lazy[name]), name)
        globals()[name] = value
        return value
    if name in _modules:
        return _importlib.import_module("fulmen." + name)
    raise AttributeError(f"module 'fulmen' has no attribute '{name}'")


def __dir__():
    return sorted([*globals(), *_lazy, *_modules])
