"""fulmen.claims: which executor would run a call, and why the others would not. Nothing is run, no GPU is needed."""

import functools
import json

from fulmen import _core
from fulmen._arguments import describe, read_corner, read_flag, read_number, read_probability, read_window
from fulmen._core import TypeError, UnsupportedError

# Python argument -> operand of the op, in the op's order.
_sdpa_operands = ("q", "k", "v", "attn_mask", "sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "key_lengths")
_sdpa_by_position = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal")


class Claims:
    """The answers of a list of executors to one call, in list order. `winner` is the first that claims it, or None."""

    def __init__(self, op, target, training, winner, answers):
        self.op, self.target, self.training, self.winner, self.answers = op, target, training, winner, answers

    def __iter__(self):
        return iter(self.answers)

    def __len__(self):
        return len(self.answers)

    def __getitem__(self, key):
        if isinstance(key, str):
            for answer in self.answers:
                if answer.executor == key:
                    return answer
            raise KeyError(f"no executor '{key}' was asked; {', '.join(answer.executor for answer in self.answers) or 'none'} were")
        return self.answers[key]

    def to_dict(self):
        return {
            "op": self.op,
            "target": self.target,
            "training": self.training,
            "winner": self.winner,
            "answers": [answer_dict(answer) for answer in self.answers],
        }

    def to_json(self, indent=None):
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self):
        rows = [("executor", "answer", "code", "why")]
        for a in self.answers:
            if a.claimed:
                kernels = a.forward_kernel + (f" / {a.backward_kernel}" if a.has_backward else "")
                extra = f", workspace {a.workspace_bytes} bytes" if a.workspace_bytes else ""
                rows.append((a.executor, "claims", "", kernels + extra + ("" if a.deterministic else ", not deterministic")))
            else:
                rows.append((a.executor, "refuses", a.code, a.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{self.op} on {self.target}, {'training' if self.training else 'inference'}: {self.winner or 'nobody claims it'}"]
        lines += ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip() for row in rows]
        return "\n".join(lines)

    def __repr__(self):
        return f"<fulmen.Claims {self.op} on {self.target}: {self.winner}>"


def answer_dict(answer):
    forward = {"claimed": answer.claimed or answer.code == "backward_unsupported"}
    backward = {"claimed": answer.claimed and answer.has_backward}
    if answer.claimed:
        forward.update(kernel=answer.forward_kernel, workspace_bytes=answer.forward_workspace_bytes)
        if answer.has_backward:
            backward.update(kernel=answer.backward_kernel, workspace_bytes=answer.backward_workspace_bytes)
    return {
        "executor": answer.executor,
        "claimed": answer.claimed,
        "code": answer.code,
        "reason": answer.reason,
        "deterministic": answer.deterministic,
        "workspace_bytes": answer.workspace_bytes,
        "forward": forward,
        "backward": backward,
        "layout_wishes": list(answer.layout_wishes),
        "steps": list(answer.steps),
    }


def claims(op, *inputs, target=None, training=False, executors=None, deterministic=False, **arguments):
    """Asks every executor for one call.

    Tensors are specs ("bf16[2,32,4096,128]", with "!" at the end where a gradient is wanted) or tensors. For "sdpa" the
    arguments are those of fulmen.sdpa and fulmen.attention: q=, k=, v=, attn_mask= (or mask=), is_causal=, dropout_p=,
    scale=, enable_gqa=, window=, ...; for any other op of the catalogue its operands, by position or name, and its
    attributes by name. With training=True and no gradient marked, every float operand wants one.
    """
    from fulmen._executors import resolve

    if not isinstance(op, str):
        raise TypeError(f"claims: op is {describe(op)}; the name of an op is needed")
    training, deterministic = read_flag("claims", "training", training), read_flag("claims", "deterministic", deterministic)
    if target is not None and not isinstance(target, (str, _core.Target)):
        raise TypeError(f"claims: target is of type {type(target).__name__}; a name, the path of a description or one of fulmen.targets() is needed")
    key = _key(op, inputs, target, training, executors, deterministic, arguments)
    known = _known.get(key) if key is not None else None
    if known is not None:
        name, winner, answers = known
        return Claims(op, name, training, winner, list(answers))
    operands, attributes = _sdpa_call(inputs, arguments) if op == "sdpa" else _plain_call(op, inputs, arguments)
    kinds, device = {}, None
    for name, given in operands.items():
        if given is None:
            continue
        if isinstance(given, (list, tuple)) and op != "sdpa":
            kinds[name] = [_type_of(g, name) for g in given]
        else:
            kinds[name] = _type_of(given, name)
        if device is None and not isinstance(given, (str, list, tuple, _core.TensorType)) and kinds[name].device != "meta":
            device = kinds[name].device
    if target is None:
        target = "cpu" if device is None else device
    where = target if isinstance(target, _core.Target) else _core.find_target(str(target))
    flat = [t for kind in kinds.values() for t in (kind if isinstance(kind, list) else [kind])]
    mark_all = training and not any(t.requires_grad for t in flat)
    recorder = _core.Recorder(op)
    place = "cuda:0" if where.kind == "cuda" else "cpu"

    def record(name, kind):
        is_float = kind.dtype in ("f16", "bf16", "f32", "f64")
        grad = training and is_float and (kind.requires_grad or (mark_all and not (op == "sdpa" and name in ("mask", "sink", "alibi_slopes"))))
        return recorder.input(name, kind.dtype, kind.shape, kind.strides, place, grad)

    ids = []
    for name in operands:
        kind = kinds.get(name)
        if kind is None:
            ids.append(None)
        elif isinstance(kind, list):
            ids += [record(f"{name}{i}", t) for i, t in enumerate(kind)]
        else:
            ids.append(record(name, kind))
    recorder.output(recorder.emit(op, ids, attributes))
    winner, answers = _core.claim_last(recorder.finish(), training, deterministic, resolve(executors), where)
    if key is not None:
        while len(_known) >= _known_limit:
            _known.pop(next(iter(_known)), None)
        _known[key] = where.name, winner, tuple(answers)
    return Claims(op, where.name, training, winner, answers)


_known = {}  # answers of the default list to calls described by specs, the oldest dropped first
_known_limit = 512
_plain = (str, bool, int, float, type(None))


@functools.cache
def _lasting_targets():
    """Targets whose answers stay: this CPU and the descriptions that Fulmen brings. A file or a GPU may change."""
    return frozenset(["cpu", *(t.name for t in _core.known_targets() if t.described)])


def _key(op, inputs, target, training, executors, deterministic, arguments):
    """None where the answer isn't kept. A revoked claim is another answer, so their number is part of the key."""
    if executors is not None or (target is not None and (type(target) is not str or target not in _lasting_targets())):
        return None
    values = (op, training, deterministic, *inputs, *arguments.values())
    for value in values:
        if type(value) not in _plain:
            return None
    return target, _core.revocation_count(), len(inputs), tuple(arguments), values, tuple(map(type, values))


def _type_of(given, name):
    if isinstance(given, str):
        return _core.parse_tensor_spec(given)
    if isinstance(given, _core.TensorType):
        return given
    wants_grad = bool(getattr(given, "requires_grad", False))
    if getattr(getattr(given, "device", None), "type", None) == "meta":  # a torch tensor without memory is as good as a spec
        dtype = _meta_dtypes.get(str(given.dtype))
        if dtype is None:
            raise TypeError(f"claims: {name} has dtype {given.dtype}; fulmen takes {', '.join(_meta_dtypes.values())}")
        dims, strides = ",".join(map(str, given.shape)), ",".join(map(str, given.stride()))
        return _core.parse_tensor_spec(f"{dtype}[{dims}]{{stride={strides}}}{'!' if wants_grad else ''}" if dims else f"{dtype}[]")
    if not _core.is_tensor(given):
        raise TypeError(f"claims: {name} is of type {type(given).__name__}; a spec such as 'bf16[2,32,4096,128]' or a tensor is needed")
    return _core.type_of(given, wants_grad, name)


_meta_dtypes = {
    "torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float64": "f64", "torch.bool": "bool",
    "torch.uint8": "u8", "torch.int8": "i8", "torch.int16": "i16", "torch.int32": "i32", "torch.int64": "i64",
}


def _sdpa_call(inputs, arguments):
    arguments = dict(arguments)
    if "mask" in arguments:
        if "attn_mask" in arguments:
            raise TypeError("claims: mask and attn_mask are both given; they are the same argument")
        arguments["attn_mask"] = arguments.pop("mask")
    if len(inputs) > len(_sdpa_by_position):
        raise TypeError(f"claims: sdpa takes {', '.join(_sdpa_by_position)} by position, {len(inputs)} arguments are given")
    for name, value in zip(_sdpa_by_position, inputs):
        if name in arguments:
            raise TypeError(f"claims: {name} is given twice, by position and by name")
        arguments[name] = value
    given = [arguments.pop(name, None) for name in _sdpa_operands]
    for name, value in zip(_sdpa_operands[:3], given):
        if value is None:
            raise TypeError(f"claims: sdpa needs {name}=, a tensor or a spec")
    names = ("query", "key", "value", "mask", "sink", "alibi_slopes", "query_offsets", "key_offsets", "key_lengths")
    operands = dict(zip(names, given))
    dropout_p = read_probability("claims", "dropout_p", arguments.pop("dropout_p", 0.0))
    attributes = {"is_causal": read_flag("claims", "is_causal", arguments.pop("is_causal", False)), "dropout_p": dropout_p}
    if dropout_p > 0:
        operands["seed"] = "i64[2]"
    scale = arguments.pop("scale", None)
    if scale is not None:
        attributes["scale"] = read_number("claims", "scale", scale)
    if read_flag("claims", "enable_gqa", arguments.pop("enable_gqa", False)):
        attributes["enable_gqa"] = True
    window = arguments.pop("window", None)
    if window is not None:
        attributes["window_left"], attributes["window_right"] = read_window("claims", window)
    if read_corner("claims", arguments.pop("causal_corner", "upper_left")):
        attributes["lower_right"] = True
    softcap = read_number("claims", "softcap", arguments.pop("softcap", 0.0))
    if softcap:
        attributes["softcap"] = softcap
    if read_flag("claims", "return_lse", arguments.pop("return_lse", False)):
        attributes["return_lse"] = True
    if arguments:
        raise TypeError(f"claims: sdpa has no argument '{next(iter(arguments))}'")
    return operands, attributes


def _plain_call(op, inputs, arguments):
    entry = next((e for e in _core.ops() if e["name"] == op), None)
    if entry is None:
        raise UnsupportedError(f"claims: op '{op}' is not in the catalogue")
    operands, attributes, inputs = {}, dict(arguments), list(inputs)
    count = len(inputs)
    by_position = [name for name, _ in entry["operands"]][:count]
    for name, need in entry["operands"]:
        if name in attributes:
            if name in by_position:
                raise TypeError(f"claims: {op}: {name} is given twice, by position and by name")
            operands[name] = attributes.pop(name)
        elif need == "variadic":
            operands[name], inputs = inputs, []
        else:
            operands[name] = inputs.pop(0) if inputs else None
    if inputs:
        raise TypeError(f"claims: {op} takes {len(entry['operands'])} operands, {count} are given")
    return operands, attributes
