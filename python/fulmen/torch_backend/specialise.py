"""A graph, or a part of one, with its programs: one for each set of sizes it was called with, up to a limit.

Dynamo guards the layout of every argument whose sizes it took as fixed, so such a graph has one program and its calls
check nothing here. Where sizes are symbolic each new set is recorded and compiled once; past the limit one warning says
what to do, and the graph runs as PyTorch's own.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field

import torch

from .. import _core
from .bridge import Runner
from .overlap import written_overlaps
from .record import GraphRecorder, Modes, RecordedGraph
from .recording import known
from .values import Unmapped

_transform = torch._C._functorch.peek_interpreter_stack


@dataclass
class Options:
    executors: list | None = None
    deterministic: bool = False
    skip_passes: list = field(default_factory=list)
    keep_texts: bool = False
    specialisations: int = 8


@dataclass
class MadeProgram:
    """A compiled program with what it was made of."""

    trace: _core.Trace
    compiled: _core.Compiled
    how: dict  # the arguments of _core.compile

    def texts(self) -> dict:
        """Stage -> the text of the trace after it. Made again, in the same way, where they weren't kept."""
        compiled = self.compiled
        if not any(stage.text for stage in compiled.stages):
            compiled = _core.compile(self.trace, keep_texts=True, **self.how)
        return {stage.name: stage.text for stage in compiled.stages}


def _is_symbolic(value) -> bool:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    return isinstance(value, torch.Tensor) and any(isinstance(v, torch.SymInt) for v in (*value.shape, *value.stride()))


def _layout(value):
    if isinstance(value, torch.Tensor):
        return tuple(map(known, value.shape)), tuple(map(known, value.stride())), value.dtype, value.requires_grad
    if isinstance(value, torch.SymInt):
        return known(value)
    return value


class Part:
    """The callable that stands for a graph."""

    def __init__(self, module: torch.fx.GraphModule, modes: Modes, options: Options, name: str, on_compiled=None, on_left=None):
        self.module = module
        self.modes = modes
        self.options = options
        self.name = name
        self.on_compiled = on_compiled
        self.on_left = on_left
        self.programs: dict = {}
        self.only = None  # the runner of a graph without symbolic sizes
        self.eager_reason: str | None = None
        self.overlap_told = False
        self.lock = threading.Lock()
        examples = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
        self.symbolic = [place for place, value in enumerate(examples) if value is None or _is_symbolic(value)]

    def compile(self, recorded: RecordedGraph):
        options = self.options
        how = dict(
            executors=options.executors, training=recorded.needs_grad and self.modes.grad_enabled,
            deterministic=options.deterministic or torch.are_deterministic_algorithms_enabled(), skip_passes=options.skip_passes,
        )
        compiled = _core.compile(recorded.trace, keep_texts=options.keep_texts, **how)
        if self.on_compiled is not None:
            self.on_compiled(MadeProgram(recorded.trace, compiled, how))
        return Runner(recorded, compiled).callable()

    def adopt(self, arguments, recorded: RecordedGraph) -> None:
        """Takes a recording that was made for these arguments already."""
        self._keep(arguments, self.compile(recorded))

    def _key(self, arguments) -> tuple:
        return tuple(_layout(arguments[place]) for place in self.symbolic)

    def _keep(self, arguments, runner):
        if self.symbolic:
            self.programs[self._key(arguments)] = runner
        else:
            self.only = runner
        return runner

    def leave(self, error: Exception) -> None:
        """The graph runs as PyTorch's own from here on, and a warning says why."""
        self._leave(str(error))
        warnings.warn(f"fulmen: {self.name} runs with PyTorch: {error}", stacklevel=3)

    def _leave(self, reason: str) -> None:
        self.eager_reason = reason
        if self.on_left is not None:
            self.on_left(self, reason)

    def __call__(self, *arguments):
        if _transform() is not None:  # tensors of a torch.func transform have no elements to read
            return self.module(*arguments)
        runner = self.only
        if runner is None:
            runner = self.programs.get(self._key(arguments)) if self.symbolic else None
            if runner is None:
                runner = self._specialise(arguments)
                if runner is self.module:
                    return runner(*arguments)
        if type(runner) is Runner and runner.written and written_overlaps(arguments, runner.places, runner.written):
            self._say_overlap()
            return self.module(*arguments)
        return runner(*arguments)

    def _say_overlap(self) -> None:
        reason = "an argument that it writes to shares memory with another argument"
        if not self.overlap_told:
            self.overlap_told = True
            if self.on_left is not None:
                self.on_left(self, reason)
            warnings.warn(f"fulmen: {self.name}: {reason}; such calls run with PyTorch", stacklevel=4)

    def _specialise(self, arguments):
        with self.lock:
            known = self.only or self.programs.get(self._key(arguments))
            if known is not None:
                return known
            if self.eager_reason is not None:
                return self.module
            if len(self.programs) >= self.options.specialisations:
                self._leave(f"it was called with more than {self.options.specialisations} sets of sizes")
                warnings.warn(
                    f"fulmen: {self.name} {self.eager_reason}; new sizes now run with PyTorch. Pad to a few sizes, or raise "
                    'the limit: torch.compile(..., backend="fulmen", options={"specialisations": N})',
                    stacklevel=3,
                )
                return self.module
            try:
                recorded = GraphRecorder(self.module, arguments, self.modes, self.name).run()
                return self._keep(arguments, self.compile(recorded))
            except (Unmapped, _core.UnsupportedError) as error:
                if self.options.executors is not None and isinstance(error, _core.UnsupportedError):
                    raise  # those that were asked for refuse
                self.leave(error)
                return self.module
