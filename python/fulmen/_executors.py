"""Executors, targets and caches as users see them."""

from fulmen import _core
from fulmen._core import TypeError, UnsupportedError

_python_executors = {}  # name -> _core.Executor, of those written in Python


def default_executors():
    """The default list, in the order in which executors are asked."""
    return _core.default_executors()


def executors():
    """All executors there are: the default list, then those written in Python."""
    return [*_core.default_executors(), *_python_executors.values()]


def executor(name, doc=""):
    """An executor written in Python; `.implements(op, ...)` decorates the functions that run its ops."""
    from fulmen._python_executor import PythonExecutor

    made = PythonExecutor(name, doc)
    _python_executors[name] = made.handle
    return made


def resolve(chosen):
    """A list of _core.Executor from names, executors or one of either; None is the default list."""
    if chosen is None:
        return None
    if isinstance(chosen, str) or not hasattr(chosen, "__iter__"):
        chosen = [chosen]
    known = {e.name: e for e in executors()}
    result = []
    for item in chosen:
        handle = getattr(item, "handle", item)
        if isinstance(handle, str):
            if handle not in known:
                raise UnsupportedError(f"executors: there is no executor '{handle}'; known: {', '.join(known)}")
            handle = known[handle]
        if not isinstance(handle, _core.Executor):
            raise TypeError(f"executors: a name or an executor is needed, found {type(item).__name__}")
        result.append(handle)
    return result


def set_default_executors(chosen=None):
    """The list that fulmen.sdpa asks from now on; None returns to the default list."""
    _core.sdpa_use_executors(resolve(chosen))


def targets():
    """What can be compiled for or asked about: this CPU, GPUs at hand, described devices."""
    return _core.known_targets()


def cache_info():
    """Counts of the caches: attention's programs, the memory kept for programs to use again, and what executors of the
    default list count (cuDNN's: claims, plans built in each direction, plans loaded from and written to disk)."""
    counts = {executor.name: executor.counters for executor in _core.default_executors()}
    return {
        "sdpa": _core.sdpa_cache_info(),
        "memory": _core.memory(),
        "executors": {name: each for name, each in counts.items() if each},
    }


def clear_caches():
    """Drops attention's programs and the answers kept by fulmen.claims, and gives kept memory back to the system."""
    from fulmen._claims import _known

    _known.clear()
    _core.sdpa_cache_clear()
    _core.release_memory()
