"""Traced tensors: what stands for a torch tensor while a graph is recorded.

A trace has values and no memory; PyTorch has memory, views of it and in-place ops. Here a `Memory` is one torch storage,
with the trace value that holds its present contents, and a `Traced` tensor is a chain of view steps over a memory.
Writing to a tensor makes a new value for its memory, by undoing its steps one by one; every other view of the memory is
then made again from the new value when it is next read. recording.py has the operations; the steps are below.
"""

from __future__ import annotations

from math import prod


class Unmapped(Exception):
    """A call that Fulmen leaves to PyTorch; the message is the reason shown to the user."""


class NotTakenApart(Unmapped):
    """A call whose parts would lose what it does besides its result: how its gradient is made, what it writes."""


class Memory:
    """One torch storage: `value` is the trace value of its contents, seen in the shape it was made with."""

    __slots__ = ("value", "version", "input_index", "shared")

    def __init__(self, value: int, input_index: int | None = None):
        self.value = value
        self.version = 0
        self.input_index = input_index  # the caller's argument k, or ~k for the graph's own tensor k
        self.shared = False  # with another argument of the graph

    def write(self, value: int) -> None:
        if self.shared:
            raise Unmapped("a write to an argument that shares memory with another argument")
        self.value = value
        self.version += 1


class Reshape:
    __slots__ = ("before", "after")

    def __init__(self, before: tuple, after: tuple):
        self.before, self.after = before, after

    def apply(self, recorder, value):
        return recorder.emit("reshape", [value], {"shape": self.after})[0]

    def undo(self, recorder, whole, part):
        return recorder.emit("reshape", [part], {"shape": self.before})[0]

    def on_torch(self, tensor):
        return tensor.reshape(self.after)


class Permute:
    __slots__ = ("dims",)

    def __init__(self, dims: tuple):
        self.dims = dims

    def apply(self, recorder, value):
        return recorder.emit("permute", [value], {"dims": self.dims})[0]

    def undo(self, recorder, whole, part):
        inverse = [0] * len(self.dims)
        for position, dim in enumerate(self.dims):
            inverse[dim] = position
        return recorder.emit("permute", [part], {"dims": inverse})[0]

    def on_torch(self, tensor):
        return tensor.permute(self.dims)


class Slice:
    __slots__ = ("dim", "begin", "end", "step")

    def __init__(self, dim: int, begin: int, end: int, step: int):
        self.dim, self.begin, self.end, self.step = dim, begin, end, step

    def _attributes(self):
        return {"dim": self.dim, "begin": self.begin, "end": self.end, "step": self.step}

    def apply(self, recorder, value):
        return recorder.emit("slice", [value], self._attributes())[0]

    def undo(self, recorder, whole, part):
        return recorder.emit("slice_scatter", [whole, part], self._attributes())[0]

    def on_torch(self, tensor):
        return tensor[(slice(None),) * self.dim + (slice(self.begin, self.end, self.step),)]


class Expand:
    __slots__ = ("shape",)

    def __init__(self, shape: tuple):
        self.shape = shape

    def apply(self, recorder, value):
        return recorder.emit("broadcast_to", [value], {"shape": self.shape})[0]

    def undo(self, recorder, whole, part):
        raise Unmapped("a write to an expanded tensor")

    def on_torch(self, tensor):
        return tensor.expand(self.shape)


class Detach:
    __slots__ = ()

    def apply(self, recorder, value):
        return recorder.detach(value)

    def undo(self, recorder, whole, part):
        return part

    def on_torch(self, tensor):
        return tensor.detach()


class Traced:
    """A tensor of the graph: `steps` lead from its memory's value to its own."""

    __slots__ = ("recorder", "memory", "steps", "dtype", "shape", "_value", "_version")

    def __init__(self, recorder, memory: Memory, steps: tuple, value: int):
        self.recorder = recorder
        self.memory = memory
        self.steps = steps
        self._value = value
        self._version = memory.version
        self.dtype, self.shape = recorder.type(value)[:2]

    @property
    def value(self) -> int:
        if self._version != self.memory.version:
            value = self.memory.value
            for step in self.steps:
                value = step.apply(self.recorder, value)
            self._value, self._version = value, self.memory.version
        return self._value

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def requires_grad(self) -> bool:
        return self.recorder.type(self.value)[3]

    @property
    def is_float(self) -> bool:
        return self.dtype in ("f16", "bf16", "f32", "f64")

    def view(self, step) -> "Traced":
        """This tensor seen through one more step; shares its memory."""
        return Traced(self.recorder, self.memory, (*self.steps, step), step.apply(self.recorder, self.value))

    def become(self, view: "Traced") -> "Traced":
        """This very tensor, seen as a view of itself from now on, as x.t_() does; other views stay as they are."""
        self.steps, self.shape = view.steps, view.shape
        self._value, self._version = view._value, view._version
        return self

    def write(self, value: int) -> None:
        """Puts a value of this tensor's shape and dtype into its memory."""
        wholes = [self.memory.value]
        for step in self.steps[:-1]:
            wholes.append(step.apply(self.recorder, wholes[-1]))
        part = value
        for step, whole in zip(reversed(self.steps), reversed(wholes)):
            part = step.undo(self.recorder, whole, part)
        self.memory.write(part)
        self._value, self._version = value, self.memory.version
