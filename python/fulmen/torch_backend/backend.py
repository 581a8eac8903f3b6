"""The torch.compile backend: torch.compile(model, backend="fulmen").

Dynamo hands over a graph of PyTorch calls; it is recorded (record.py), cut where calls are not known (partition.py) and
compiled (specialise.py), and what comes back runs it with autograd (bridge.py). On CUDA only attention is Fulmen's.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from dataclasses import dataclass, field

import torch

from .._executors import resolve
from .partition import partition
from .record import Fallback, Modes, RecordedGraph, record
from .specialise import Options, Part

_SDPA_NAMES = ("scaled_dot_product_attention",)


@dataclass
class Report:
    """What became of one graph; explain and last_traces read it. Programs join as they are compiled."""

    name: str
    recorded: RecordedGraph
    programs: list = field(default_factory=list)  # MadeProgram
    graph: object = None  # weak reference to Dynamo's graph

    @property
    def fallbacks(self) -> list[Fallback]:
        return self.recorded.fallbacks


_listeners: list = []
_last: Report | None = None


@contextlib.contextmanager
def listen():
    """Gives a list to which the report of every graph compiled meanwhile is appended; their stage texts are kept."""
    reports: list[Report] = []
    _listeners.append(reports)
    try:
        yield reports
    finally:
        _listeners[:] = [other for other in _listeners if other is not reports]


def last_report() -> Report | None:
    return _last


def _announce(report: Report) -> None:
    global _last
    _last = report
    # torch.compile(..., backend="fulmen") has an object of its own for each compiled function, through which Dynamo
    # calls a backend; last_traces finds the reports there.
    frame = sys._getframe(1)
    for _ in range(4):
        frame = frame and frame.f_back
        caller = frame and frame.f_locals.get("self")
        if type(caller).__name__ == "_TorchCompileWrapper":
            caller.fulmen_reports = [*getattr(caller, "fulmen_reports", []), report][-8:]
            break
    for reports in _listeners:
        reports.append(report)


def _on_cuda(example_inputs) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs)


def _cuda_graph(module: torch.fx.GraphModule, report: Report):
    """On a GPU attention alone is Fulmen's: its calls become fulmen.sdpa, the rest stays as it is."""
    import fulmen

    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        report.recorded.node_count += 1
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _SDPA_NAMES:
            node.target = fulmen.sdpa
        elif node.target is torch.ops.fulmen.attention.default:
            pass  # it asks the executors itself
        else:
            text = node.format_node() or str(node)
            reason = "on a CUDA device Fulmen runs attention only"
            report.recorded.fallbacks.append(Fallback(text, str(node.target), reason))
            report.recorded.eager_nodes[node] = reason
    module.recompile()
    return module.forward


def fulmen_backend(module: torch.fx.GraphModule, example_inputs, *, mode=None, options=None, **kwargs):
    """Compiles one of Dynamo's graphs. `options`: executors, deterministic, skip_passes, keep_texts, specialisations."""
    if not isinstance(options, Options):
        options = Options(**(options or {}))
        options.executors = resolve(options.executors)
    if _listeners:
        options.keep_texts = True
    report = Report("graph", RecordedGraph())
    report.graph = weakref.ref(module)
    _announce(report)
    if _on_cuda(example_inputs):
        return _cuda_graph(module, report)
    modes = Modes.ambient()
    recorded = report.recorded = record(module, example_inputs, modes)
    if recorded.node_count == 0:
        return module.forward

    def make_part(graph: torch.fx.GraphModule, part_modes: Modes, name: str) -> Part:
        return Part(graph, part_modes, options, name, report.programs.append)

    if not recorded.fallbacks:
        whole = make_part(module, modes, "program")
        whole.adopt(example_inputs, recorded)
        return whole.only or whole  # with fixed sizes there is one program, and nothing to choose
    _tell(recorded)
    mixed = partition(module, recorded, modes, lambda graph, part_modes, name: _PartModule(make_part(graph, part_modes, name)))
    return mixed.forward


class _PartModule(torch.nn.Module):
    """A part as a module, which FX graphs can call."""

    def __init__(self, part: Part):
        super().__init__()
        self.__dict__["part"] = part

    def forward(self, *arguments):
        return self.part(*arguments)


def _tell(recorded: RecordedGraph) -> None:
    calls: dict = {}
    for fallback in recorded.fallbacks:
        calls.setdefault((fallback.call, fallback.reason), 0)
        calls[fallback.call, fallback.reason] += 1
    listed = "; ".join(f"{call} ({reason})" + (f" x{count}" if count > 1 else "") for (call, reason), count in list(calls.items())[:8])
    more = f" and {len(calls) - 8} more" if len(calls) > 8 else ""
    warnings.warn(f"fulmen: {len(recorded.fallbacks)} of {recorded.node_count} calls stay with PyTorch: {listed}{more}", stacklevel=2)
