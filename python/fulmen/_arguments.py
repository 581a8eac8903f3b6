"""Reads the arguments of public functions that are no tensors: what is given becomes a plain Python value, or an error
that names the argument, what was found and what is needed. `where` is the function's name in those errors.
"""

import builtins
import operator

from fulmen._core import ShapeError, TypeError

_no_limit = 1 << 40  # no length reaches it, and every arithmetic of offsets holds it


def describe(value):
    """A value as an error shows it, short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def read_flag(where, argument, value):
    """A bool; NumPy's bools, 0 and 1 mean the same. Nothing else is taken for true: "no" and a tensor aren't."""
    if value is True or value is False:
        return value
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "shape", None) == ():
        return bool(value)
    raise TypeError(f"{where}: {argument} is {describe(value)}; True or False is needed")


def read_number(where, argument, value):
    """A float, from whatever Python takes for a real number: NumPy's numbers and tensors with one element too."""
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes, bytearray, complex)):
        raise TypeError(f"{where}: {argument} is {describe(value)}; a number is needed")
    try:
        return float(value)
    except OverflowError:
        raise ShapeError(f"{where}: {argument} is {describe(value)}; a number that a float holds is needed") from None
    except (builtins.TypeError, ValueError, RuntimeError):
        raise TypeError(f"{where}: {argument} is {describe(value)}; a number is needed") from None


def read_probability(where, argument, value):
    number = read_number(where, argument, value)
    if not 0.0 <= number <= 1.0:
        raise ShapeError(f"{where}: {argument} is {describe(value)}; it is a probability, from 0 to 1")
    return number


def read_window(where, value):
    """(left, right) of attention's window, -1 where there is no limit."""
    if value is None:
        return -1, -1
    wrong = f"{where}: window is {describe(value)}; an integer or (left, right) is needed, None for no limit"
    if hasattr(value, "__index__") and not getattr(value, "shape", None):
        sides = (value, value)
    else:
        try:
            sides = () if isinstance(value, (str, bytes, dict)) else tuple(value)
        except builtins.TypeError:
            sides = ()
        if len(sides) != 2:
            raise TypeError(wrong)
    try:
        left, right = (-1 if side is None else operator.index(side) for side in sides)
    except builtins.TypeError:
        raise TypeError(wrong) from None
    return (-1 if left < 0 else min(left, _no_limit)), (-1 if right < 0 else min(right, _no_limit))


def read_corner(where, value):
    """Whether the diagonal ends at the last key."""
    if not isinstance(value, str):
        raise TypeError(f"{where}: causal_corner is {describe(value)}; 'upper_left' or 'lower_right' is needed")
    if value not in ("upper_left", "lower_right"):
        raise ShapeError(f"{where}: causal_corner is {value!r}; 'upper_left' or 'lower_right' is needed")
    return value == "lower_right"
