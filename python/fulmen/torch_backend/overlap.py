"""Arguments that share memory with one that the graph writes to.

A program has its writes as new values, copied back at its end: right only if no other argument sees the memory written to.
The recorder refuses such writes for the tensors that it was called with (record.py); here later calls are checked, since
Dynamo's guards say nothing about memory that two different tensors share.
"""

from __future__ import annotations

import torch

from .recording import known


def bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last element of a tensor within its storage, in bytes."""
    begin = known(tensor.storage_offset())
    extent = 1 + sum((known(size) - 1) * known(stride) for size, stride in zip(tensor.shape, tensor.stride()))
    width = tensor.element_size()
    return begin * width, (begin + extent if known(tensor.numel()) else begin) * width


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the ranges of two tensors of one storage meet."""
    (a_begin, a_end), (b_begin, b_end) = bounds(a), bounds(b)
    return a_begin < b_end and b_begin < a_end


def written_overlaps(arguments, places: list, written: list) -> bool:
    """Whether an argument at `written` shares memory with another one at `places`."""
    owners: dict = {}
    for place in written:
        owner = arguments[place].untyped_storage()._cdata
        owners.setdefault(owner, []).append(place)
    for place in places:
        found = owners.get(arguments[place].untyped_storage()._cdata)
        if found is not None and any(place != other and overlap(arguments[place], arguments[other]) for other in found):
            return True
    return False
