"""fulmen.jit: compiles a PyTorch module or function through Dynamo, or a function over arrays written with fulmen.ops."""

import builtins
import functools
import sys
import weakref

from fulmen._arguments import describe, read_flag
from fulmen._core import TypeError


def jit(fn_or_module=None, *, executors=None, autocast=None, dynamic=None):
    """The compiled form of a function or torch.nn.Module.

    executors: names or executors, in the order in which they are asked; None is the default list. autocast: a dtype,
    "bf16" or "f16", that matrix products and attention run in, as torch.autocast; None follows the caller's. dynamic: as
    torch.compile's. Usable as a decorator, with or without arguments.
    """
    if autocast is not None:
        autocast = _autocast_dtype(autocast)
    if dynamic is not None:
        dynamic = read_flag("jit", "dynamic", dynamic)
    if fn_or_module is None:
        return functools.partial(jit, executors=executors, autocast=autocast, dynamic=dynamic)
    if not callable(fn_or_module):
        raise TypeError(f"jit: a function or a torch.nn.Module is needed, found {type(fn_or_module).__name__}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(fn_or_module, torch.nn.Module):
        return _compile_torch(fn_or_module, executors, autocast, dynamic)
    return _Function(fn_or_module, executors, autocast, dynamic)


def _autocast_dtype(given):
    """"bf16" or "f16", from their names and from torch's dtypes."""
    name = {"bfloat16": "bf16", "float16": "f16", "half": "f16"}.get(word := str(given).rpartition(".")[2], word)
    if name not in ("bf16", "f16"):
        raise TypeError(f"jit: autocast is {describe(given)}; 'bf16', 'f16' or None is needed")
    return name


_reports = weakref.WeakKeyDictionary()  # a compiled module or function -> the backend's reports of its graphs


_made_of = weakref.WeakKeyDictionary()  # a compiled module or function -> what was compiled, its executors, its autocast


def made_of(fn):
    """(function or module, executors, autocast) of what fulmen.jit gave; itself and None for anything else."""
    if isinstance(fn, _Function):
        return fn.function, *fn.options[:2]
    try:
        return _made_of.get(fn, (fn, None, None))
    except builtins.TypeError:  # it can't be a key
        return fn, None, None


def autocast_of(name, args, kwargs):
    """PyTorch's autocast to that dtype, on the device of the first tensor."""
    import torch

    from fulmen._arrays import flatten

    tensors = [x for x in flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    return torch.autocast(device, dtype={"bf16": torch.bfloat16, "f16": torch.float16}[name])


def _compile_torch(fn, executors, autocast, dynamic):
    import torch

    from fulmen import torch_backend
    from fulmen._executors import resolve

    options = {} if executors is None else {"executors": resolve(executors)}
    reports = []

    def backend(module, example_inputs):
        made = torch_backend.fulmen_backend(module, example_inputs, options=dict(options))
        reports[:] = [*reports, torch_backend.last_report()][-8:]
        return made

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    _reports[compiled] = reports
    _made_of[compiled] = fn, executors, autocast
    if autocast is None:
        return compiled

    @functools.wraps(fn if not isinstance(fn, torch.nn.Module) else type(fn).forward)
    def call(*args, **kwargs):
        with autocast_of(autocast, args, kwargs):
            return compiled(*args, **kwargs)

    _reports[call] = reports
    _made_of[call] = fn, executors, autocast
    return call


class _Function:
    """Chooses at the first call: PyTorch tensors go through Dynamo, other arrays are traced."""

    def __init__(self, function, executors, autocast, dynamic):
        self.function, self.options = function, (executors, autocast, dynamic)
        self.torch_form = self.array_form = None
        self.torch_types = ()
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        if self.torch_form is not None:
            for x in args:  # mostly the first is a tensor, and looking through everything costs more than the call
                if type(x) in self.torch_types:
                    return self.torch_form(*args, **kwargs)
        from fulmen._arrays import TracedFunction, flatten

        torch = sys.modules.get("torch")
        if torch is not None and any(isinstance(x, (torch.Tensor, torch.nn.Module)) for x in flatten((args, kwargs))[0]):
            if self.torch_form is None:
                self.torch_types = (torch.Tensor, torch.nn.Parameter)
                self.torch_form = _compile_torch(self.function, *self.options)
            return self.torch_form(*args, **kwargs)
        if self.array_form is None:
            from fulmen._executors import resolve

            executors, autocast, _ = self.options
            if hasattr(self.function, "traced"):  # fulmen.grad of a function is compiled already
                if executors is not None or autocast is not None:
                    raise TypeError("jit: executors and autocast are of a whole function; give them to fulmen.jit inside fulmen.grad")
                self.array_form = self.function
            else:
                self.array_form = TracedFunction(self.function, resolve(executors), autocast=autocast)
        return self.array_form(*args, **kwargs)


def last_traces(fn=None):
    """The text of the trace after each stage, by the stage's name, in order, of the program that was compiled last for
    `fn`: a function or module of fulmen.jit, fulmen.grad or torch.compile(backend="fulmen"); of the last program of all
    without `fn`. Empty before the first call."""
    from fulmen._arrays import TracedFunction

    form = getattr(fn, "array_form", None) or fn
    traced = getattr(form, "traced", form)
    if isinstance(traced, TracedFunction):
        return traced.traces()
    if fn is None:
        backend = sys.modules.get("fulmen.torch_backend")
        reports = [backend.last_report()] if backend is not None else []
    else:
        reports = _reports_of(fn)
    programs = [made for report in reports if report is not None for made in report.programs]
    return programs[-1].texts() if programs else {}


def _reports_of(fn):
    if isinstance(fn, _Function):
        return _reports_of(fn.torch_form) if fn.torch_form is not None else []
    try:
        if fn in _reports:
            return _reports[fn]
    except builtins.TypeError:  # it can't be a key
        pass
    # Of torch.compile itself: the backend left its reports with the object that stands for this very compilation.
    callback = getattr(getattr(fn, "dynamo_ctx", None), "callback", None)
    names, cells = getattr(getattr(fn, "__code__", None), "co_freevars", ()), getattr(fn, "__closure__", None) or ()
    callback = callback or next((cell.cell_contents for name, cell in zip(names, cells) if name == "callback"), None)
    if callback is None:
        raise TypeError(
            f"last_traces: a function or module of fulmen.jit, fulmen.grad or torch.compile is needed, found {type(fn).__name__} that isn't compiled"
        )
    while callback is not None and not hasattr(callback, "fulmen_reports"):
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return getattr(callback, "fulmen_reports", [])
