"""Functions over arrays: recording them, and running what they become.

A function written with `fulmen.ops` and Python operators is called once with `Array`s, which stand for its arguments;
each operation adds a node to a trace. The trace is compiled, and runs on NumPy, JAX, CuPy or PyTorch arrays through
DLPack. Python floats and ints are run-time values, unless the function uses an int as a size or an axis: then the
program is made for that number. fulmen.jit, fulmen.grad and fulmen.value_and_grad are made of this.
"""

import builtins
import operator
import warnings

from fulmen import _core
from fulmen._arguments import describe
from fulmen._core import ShapeError, TypeError, UnsupportedError

_float_dtypes = ("f16", "bf16", "f32", "f64")
_program_limit = 64  # programs a function keeps; the warning names the reason for more
_current = []  # the recordings in progress, innermost last


class Array:
    """A value of a trace being recorded. Has `shape`, `dtype`, `ndim`, operators, indexing and the methods of NumPy
    arrays that fulmen.ops has."""

    __array_priority__ = 1000
    __slots__ = ("recording", "id", "dtype", "shape")

    def __init__(self, recording, id):
        self.recording, self.id = recording, id
        self.dtype, self.shape = recording.recorder.type(id)[:2]

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def T(self):
        return emit("permute", [self], dims=tuple(reversed(range(self.ndim))))

    @property
    def mT(self):
        dims = list(range(self.ndim))
        dims[-2:] = dims[-1], dims[-2]
        return emit("permute", [self], dims=tuple(dims))

    def __len__(self):
        if not self.shape:
            raise TypeError("an array without dims has no length")
        return self.shape[0]

    def __bool__(self):
        raise TypeError("a traced array has no value yet, so Python can't branch on it; use fulmen.ops.where")

    def __array__(self, *_, **__):
        raise TypeError("a traced array has no value yet, so NumPy can't work on it; use the function of that name in fulmen.ops")

    def __repr__(self):
        return f"<fulmen array {self.dtype}{list(self.shape)}>"

    def __getitem__(self, index):
        return _index(self, index)

    def __getattr__(self, name):
        from fulmen import ops

        if name.startswith("_") or name not in ops.__dir__():
            raise AttributeError(f"a fulmen array has no '{name}'")
        function = getattr(ops, name)
        return lambda *args, **kwargs: function(self, *args, **kwargs)


def _operator(op, swapped=False):
    def apply(self, other):
        if not isinstance(other, (Array, int, float)) and not _core.is_tensor(other):
            return NotImplemented
        return emit(op, [other, self] if swapped else [self, other])

    return apply


for _python, _op in (
    ("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("pow", "pow"), ("mod", "remainder"), ("matmul", "matmul"),
    ("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor"),
):
    setattr(Array, f"__{_python}__", _operator(_op))
    setattr(Array, f"__r{_python}__", _operator(_op, swapped=True))
for _python in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Array, f"__{_python}__", _operator(_python))
Array.__hash__ = object.__hash__
Array.__neg__ = lambda self: emit("neg", [self])
Array.__abs__ = lambda self: emit("abs", [self])
Array.__invert__ = lambda self: emit("logical_not" if self.dtype == "bool" else "bitwise_not", [self])


class Number(Array):
    """A Python number among the arguments: a run-time value, until something asks for the number itself."""

    __slots__ = ("value", "argument")

    def __init__(self, recording, id, value, argument):
        super().__init__(recording, id)
        self.value, self.argument = value, argument

    def _fixed(self):
        self.recording.fixed.add(self.argument)
        return self.value

    def __index__(self):
        if not isinstance(self.value, int):
            raise TypeError("a float is no size or axis")
        return self._fixed()

    def __int__(self):
        return int(self._fixed())

    def __float__(self):
        return float(self._fixed())

    def __bool__(self):
        return bool(self._fixed())


def _index(array, index):
    index = index if isinstance(index, tuple) else (index,)
    given = sum(1 for i in index if i is not None and i is not Ellipsis)
    if given > array.ndim:
        raise ShapeError(f"index has {given} entries, the array has {array.ndim} dims")
    if not any(i is Ellipsis for i in index):
        index = (*index, Ellipsis)
    at = next(n for n, i in enumerate(index) if i is Ellipsis)
    index = (*index[:at], *[slice(None)] * (array.ndim - given), *[i for i in index[at + 1 :] if i is not Ellipsis])
    dim = 0
    for item in index:
        if item is None:
            array = emit("unsqueeze", [array], dim=dim)
            dim += 1
        elif isinstance(item, slice):
            begin, end, step = item.indices(array.shape[dim])
            if step < 1:
                raise UnsupportedError(f"a slice with step {step} is not supported; use fulmen.ops.flip")
            if (begin, end, step) != (0, array.shape[dim], 1):
                array = emit("slice", [array], dim=dim, begin=begin, end=max(begin, end), step=step)
            dim += 1
        elif isinstance(item, Array) and not isinstance(item, Number):
            raise UnsupportedError("indexing with an array is not supported; use fulmen.ops.take_along_axis or fulmen.ops.index_select")
        elif isinstance(item, bool):
            raise UnsupportedError("indexing with a bool is not supported; use fulmen.ops.unsqueeze or fulmen.ops.where")
        else:
            try:
                number = operator.index(item)
            except builtins.TypeError:
                raise TypeError(f"an index is {describe(item)}; an integer, a slice, None or ... is needed") from None
            size = array.shape[dim]
            if not -size <= number < size:
                raise ShapeError(f"index {number} is out of range for dim {dim} of size {size}")
            array = emit("select", [array], dim=dim, index=number % size)
    return array


class Recording:
    """One trace being recorded."""

    def __init__(self, name, autocast=None):
        self.recorder = _core.Recorder(name)
        self.recorder.set_autocast(autocast)
        self.fixed = set()  # arguments whose numbers the program was made for
        self.constants = []  # arrays that the function closed over: hidden inputs
        self.constant_ids = []

    def input(self, type, name, requires_grad=False):
        return self.recorder.input(name, type.dtype, type.shape, type.strides, type.device, requires_grad)

    def operand(self, value):
        """The id of an operand: an array of this trace, a number, or an outside array, which becomes a hidden input."""
        if value is None:
            return None
        if isinstance(value, Array):
            if value.recording is not self:
                raise TypeError("an array of another traced function was used; pass it as an argument")
            return value.id
        if isinstance(value, (bool, int, float)):
            return self.recorder.number(value)
        for constant, id in zip(self.constants, self.constant_ids):
            if constant is value:
                return id
        id = self.input(_core.type_of(value), f"constant{len(self.constants)}")
        self.constants.append(value)
        self.constant_ids.append(id)
        return id


def emit(op, operands, **attributes):
    """Adds a node to the trace being recorded; gives its result, or a tuple of them."""
    recording = next((o.recording for o in operands if isinstance(o, Array)), None) or (_current[-1] if _current else None)
    if recording is None:
        raise UnsupportedError(f"fulmen.ops: {op} was called outside a traced function; wrap the function with fulmen.jit")
    results = [Array(recording, id) for id in recording.recorder.emit(op, [recording.operand(o) for o in operands], attributes)]
    return results[0] if len(results) == 1 else tuple(results)


def flatten(value):
    """(leaves, structure) of nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        parts = [flatten(item) for item in value]
        return [leaf for leaves, _ in parts for leaf in leaves], (type(value).__name__, tuple(s for _, s in parts))
    if isinstance(value, dict):
        parts = [flatten(item) for item in value.values()]
        return [leaf for leaves, _ in parts for leaf in leaves], ("dict", tuple(zip(value, (s for _, s in parts))))
    return [value], "leaf"


def unflatten(structure, leaves):
    """Undoes flatten; `leaves` is an iterator."""
    if structure == "leaf":
        return next(leaves)
    kind, parts = structure
    if kind == "dict":
        return {key: unflatten(s, leaves) for key, s in parts}
    items = [unflatten(s, leaves) for s in parts]
    return items if kind == "list" else tuple(items)


class _Program:
    """A compiled call of a traced function."""

    def __init__(self, trace, compiled, constants, has_seed, structure, taken, copied):
        self.trace, self.compiled, self.constants, self.has_seed = trace, compiled, constants, has_seed
        self.structure, self.taken, self.copied = structure, taken, copied


_of_program = object()  # stands in `copied` where a result is the program's


class TracedFunction:
    """A Python function over arrays, compiled for each kind of arguments it is called with."""

    def __init__(self, function, executors=None, wanted=None, autocast=None):
        self.function = function
        self.executors = executors
        self.autocast = autocast
        self.wanted = wanted  # argument numbers that gradients are asked for; None: no gradient
        self.programs = {}
        self.builds = 0
        self.last = None
        self.fixed = {}  # structure of a call -> arguments whose numbers are part of the key
        self.__name__ = getattr(function, "__name__", "function")
        self.__doc__ = function.__doc__

    def __call__(self, *args, **kwargs):
        if any(isinstance(leaf, Array) for leaf in flatten((args, kwargs))[0]):
            if self.wanted is not None:
                raise UnsupportedError("a gradient inside a traced function is not supported; take fulmen.grad of the whole function")
            return self.function(*args, **kwargs)
        leaves, structure = flatten((args, kwargs))
        kinds = tuple(str(_core.type_of(leaf)) + _core.type_of(leaf).device if _core.is_tensor(leaf) else type(leaf).__name__ for leaf in leaves)
        kind = (kinds, structure)
        fixed = self.fixed.get(kind, ())
        statics = tuple(leaf if not _core.is_tensor(leaf) and (not isinstance(leaf, (int, float)) or isinstance(leaf, bool) or i in fixed) else None for i, leaf in enumerate(leaves))
        program = self.programs.get((kind, statics))
        if program is None:
            program = self._build(args, kwargs, leaves, kind)
        self.last = program
        return self._run(program, leaves)

    def _build(self, args, kwargs, leaves, kind):
        recording = Recording(self.__name__, self.autocast)
        wanted = set()
        if self.wanted is not None:
            at = 0
            for number, argument in enumerate(args):
                count = len(flatten(argument)[0])
                if number in self.wanted:
                    wanted.update(range(at, at + count))
                at += count
        traced, taken = [], []
        for i, leaf in enumerate(leaves):
            if _core.is_tensor(leaf):
                type = _core.type_of(leaf)
                if i in wanted and type.dtype not in _float_dtypes:
                    raise TypeError(f"{self.__name__}: a gradient of argument {i} is asked for, its dtype is {type.dtype}; a float is needed")
                traced.append(Array(recording, recording.input(type, f"x{i}", i in wanted)))
            elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                if i in wanted:
                    raise TypeError(f"{self.__name__}: a gradient of argument {i} is asked for, it is a Python number; an array is needed")
                dtype = "f32" if isinstance(leaf, float) else "i64"
                traced.append(Number(recording, recording.recorder.input(f"x{i}", dtype, (), (), "cpu", False, True), leaf, i))
            else:
                traced.append(leaf)
                continue
            taken.append(i)
        traced_args, traced_kwargs = unflatten(kind[1], iter(traced))
        _current.append(recording)
        try:
            result = self.function(*traced_args, **traced_kwargs)
        finally:
            _current.pop()
        if self.wanted is not None and not wanted:
            raise TypeError(f"{self.__name__}: a gradient of argument {min(self.wanted, default=0)} is asked for, it has no array")
        outputs, structure = flatten(result)
        if self.wanted is not None and (len(outputs) != 1 or getattr(outputs[0], "shape", None) != ()):
            found = [list(getattr(o, "shape", ())) for o in outputs]
            raise ShapeError(f"{self.__name__}: a gradient needs a function with one result without dims; its results have shapes {found}")
        ids, copied = [], []
        for output in outputs:
            if isinstance(output, Array):
                ids.append(recording.operand(output))
                copied.append(_of_program)
            else:
                copied.append(output)
        recording.recorder.output(ids)
        trace = recording.recorder.finish()
        compiled = _core.compile(trace, self.executors, training=self.wanted is not None)
        program = _Program(trace, compiled, recording.constants, recording.recorder.has_seed, structure, taken, copied)
        self.fixed[kind] = tuple(sorted({*self.fixed.get(kind, ()), *recording.fixed}))
        statics = tuple(leaf if not _core.is_tensor(leaf) and (not isinstance(leaf, (int, float)) or isinstance(leaf, bool) or i in self.fixed[kind]) else None for i, leaf in enumerate(leaves))
        self.programs[(kind, statics)] = program
        self.builds += 1
        if len(self.programs) > _program_limit:
            self.programs.pop(next(iter(self.programs)))
        if self.builds == _program_limit:
            warnings.warn(
                f"fulmen.jit: {self.__name__} was compiled for {self.builds} kinds of arguments, the last with {', '.join(kind[0])}"
                + (f" and the numbers {[s for s in statics if s is not None]}" if any(s is not None for s in statics) else "")
                + "; pad arrays to a few shapes, or pass numbers that are used as sizes as they are needed",
                RuntimeWarning,
                stacklevel=3,
            )
        return program

    def _run(self, program, leaves):
        inputs = [leaves[i] for i in program.taken] + program.constants
        if program.has_seed:
            inputs.append(_seed_like(inputs))
        outputs, saved = program.compiled.forward(inputs)
        arrays = iter(outputs)
        value = unflatten(program.structure, iter([next(arrays) if c is _of_program else c for c in program.copied]))
        if self.wanted is None:
            return value
        grads = program.compiled.backward(saved, [1.0], None, True)
        by_leaf = dict(zip(program.taken, grads))
        return value, [by_leaf.get(i) for i in range(len(leaves))]

    def traces(self):
        """The text of the last call's trace after each stage."""
        if self.last is None:
            return {}
        compiled = _core.compile(self.last.trace, self.executors, training=self.wanted is not None, keep_texts=True)
        return {stage.name: stage.text for stage in compiled.stages}


def _seed_like(inputs):
    """A seed, int64 (2,), from the generator of the arrays' framework."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(x, torch.Tensor) for x in inputs):
        from fulmen._attention import _draw_seed

        return _draw_seed(next(x for x in inputs if isinstance(x, torch.Tensor)).device)
    import numpy

    return numpy.array([numpy.random.randint(0, 2**62), 0], dtype=numpy.int64)


def value_and_grad(function, argnums=0):
    """A function that gives (value, gradients): of `function`, whose one result has no dims, by the arguments of the
    numbers `argnums` (an int, or a tuple of them, then a tuple of gradients). Arguments may be nested."""
    from fulmen._executors import resolve

    if not callable(function):
        raise TypeError(f"grad: a function is needed, found {type(function).__name__}")
    try:
        numbers = (operator.index(argnums),) if hasattr(argnums, "__index__") else tuple(map(operator.index, argnums))
    except builtins.TypeError:
        raise TypeError(f"grad: argnums is {describe(argnums)}; an int or a tuple of them is needed") from None
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ShapeError(f"grad: argnums is {describe(argnums)}; numbers of arguments are needed, from 0 on and each once")
    single = hasattr(argnums, "__index__")
    inner, executors, autocast = function, None, None
    if hasattr(function, "array_form"):  # of fulmen.jit: its executors and autocast hold here too
        inner, (executors, autocast, _) = function.function, function.options
    traced = TracedFunction(inner, resolve(executors), set(numbers), autocast)

    def call(*args, **kwargs):
        if max(numbers) >= len(args):
            raise TypeError(f"{traced.__name__}: argument {max(numbers)} is asked for, {len(args)} are given by position")
        value, grads = traced(*args, **kwargs)
        at, by_number = 0, {}
        for number, argument in enumerate(args):
            leaves, structure = flatten(argument)
            if number in numbers:
                by_number[number] = unflatten(structure, iter(grads[at : at + len(leaves)]))
            at += len(leaves)
        return value, by_number[numbers[0]] if single else tuple(by_number[n] for n in numbers)

    call.__name__, call.__doc__, call.traced = traced.__name__, function.__doc__, traced
    return call


def grad(function, argnums=0):
    """The gradients of value_and_grad alone."""
    both = value_and_grad(function, argnums)

    def call(*args, **kwargs):
        return both(*args, **kwargs)[1]

    call.__name__, call.__doc__, call.traced = both.__name__, function.__doc__, both.traced
    return call
