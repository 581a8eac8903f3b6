"""fulmen.explain of PyTorch modules and functions: compiled afresh, run once, and told from the backend's reports."""

import contextlib
import warnings

import torch

from fulmen._explain import Explanation


def explain_torch(fn, args, kwargs, executors, autocast=None):
    """Compiles `fn` by itself: nothing that was compiled before is touched. The call is made under the caller's modes
    (grad, autocast, training); its results are dropped."""
    from fulmen import torch_backend
    from fulmen._jit import autocast_of

    options = {} if executors is None else {"executors": executors}
    fn = getattr(fn, "_orig_mod", fn)  # of torch.compile
    name = type(fn).__name__ if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", "function")
    breaks = []
    random_state = torch.random.get_rng_state()
    before = dict(torch._dynamo.utils.counters["graph_break"])

    def backend(module, example_inputs):  # a new function each time: Dynamo never uses another one's graphs for it
        return torch_backend.fulmen_backend(module, example_inputs, options=dict(options))

    try:
        # Each explanation adds a graph to what Dynamo keeps for a code object: its limits are for users' own recompiles.
        limits = {name: 1 << 20 for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(torch._dynamo.config, name)}
        with torch._dynamo.config.patch(limits), torch_backend.listen() as reports, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # fallbacks are told in the explanation
            compiled = torch.compile(fn, backend=backend)
            with contextlib.nullcontext() if autocast is None else autocast_of(autocast, args, kwargs):
                result = compiled(*args, **kwargs)
            _look_up_break_reasons(before, breaks)
            del result
    finally:
        torch.random.set_rng_state(random_state)
    parts, fallbacks, node_count = [], [], 0
    for report in reports:
        node_count += report.recorded.node_count
        fallbacks += [(f.node, f.call, f.reason) for f in report.fallbacks]
        parts += [(made.trace, made.compiled) for made in report.programs]
    if not reports:
        breaks.append(
            "Dynamo gave no graph: there is no tensor operation to compile, or this code was compiled more often than "
            "torch._dynamo.config.recompile_limit allows; torch._dynamo.reset() starts afresh"
        )
    return Explanation(name, parts, fallbacks, node_count, breaks)


def _look_up_break_reasons(before, breaks):
    for reason, times in torch._dynamo.utils.counters["graph_break"].items():
        new = times - before.get(reason, 0)
        if new > 0:
            breaks.append(f"{str(reason).splitlines()[0]} (x{new})")
