"""Compares the evaluator's results for every sample of the op table with PyTorch.

Reads the file that the C++ test OpTable.WritesSamplesForTheTorchOracle writes. An op is called through every PyTorch
name in its entry, operands first, then attributes in order, which is what the entry promises; ops without such a name
have a line in BY_HAND. Used by test_torch_oracle.py; run it alone to see every difference.
"""

import json
import operator
import sys

import torch
import torch.nn.functional as F

DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}


def tensor_of(spec, wide):
    """A tensor from its JSON form; floats in float64 if `wide`."""
    if spec is None:
        return None
    dtype = DTYPES[spec["dtype"]]
    if wide and dtype.is_floating_point:
        dtype = torch.float64
    return torch.tensor(spec["data"], dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype).reshape(spec["shape"])


def attribute_of(value):
    return DTYPES[value["dtype"]] if isinstance(value, dict) else value


def slices(x, a):
    index = [slice(None)] * x.ndim
    index[a["dim"]] = slice(a["begin"], a["end"], a["step"])
    return tuple(index)


def slice_scatter(x, src, a):
    out = x.clone()
    out[slices(x, a)] = src
    return out


def index_tuple(x, indices, dims):
    index = [slice(None)] * x.ndim
    for dim, tensor in zip(dims, indices):
        index[dim] = tensor
    return tuple(index)


def pad(x, a):
    pairs = [a["pads"][2 * d:2 * d + 2] for d in range(x.ndim)]
    return F.pad(x, [p for pair in reversed(pairs) for p in pair], value=a["value"]) if x.ndim else x


def index_put(x, values, *indices, a):
    """Through a flat copy of positions, since Tensor.index_put takes no slices."""
    places = torch.arange(x.numel()).reshape(x.shape)[index_tuple(x, [i.long() for i in indices], a["dims"])]
    flat = x.reshape(-1).clone()
    flat.index_put_((places.reshape(-1),), values.expand(places.shape).reshape(-1), accumulate=a["accumulate"])
    return flat.reshape(x.shape)


def batch_norm(x, weight, bias, mean, var, a):
    mean, var = (None if t is None else t.clone() for t in (mean, var))
    training = a["training"] or mean is None
    return F.batch_norm(x, mean, var, weight, bias, training, a["momentum"], a["eps"])


def convolution_grad(which, first, second, a):
    """Gradient of a convolution without bias for its input (which=0) or weight (which=1)."""
    dims = first.ndim - 2
    x = torch.zeros(a["input_shape"], dtype=first.dtype) if which == 0 else first
    weight = second if which == 0 else torch.zeros(a["weight_shape"], dtype=first.dtype)
    grad = first if which == 0 else second
    mask = [which == 0, which == 1, False]
    return torch.ops.aten.convolution_backward(grad, x, weight, None, a["stride"], a["padding"], a["dilation"], False, [0] * dims,
                                               a["groups"], mask)[which]


def sdpa_parts(q, k, v, mask, sink, slopes, key_lengths, a):
    """Output and log-sum-exp of attention, densely, by the formula in ops/sdpa_call.h."""
    if q.ndim == 2:
        out, lse = sdpa_parts(q[None], k[None], v[None], mask, sink, slopes, key_lengths, a)
        return out[0], lse[0]
    heads, length, keys = q.shape[-3], q.shape[-2], k.shape[-2]
    group = heads // k.shape[-3] if k.shape[-3] else 1
    k, v = (t.repeat_interleave(group, dim=-3) if group > 1 else t for t in (k, v))
    scale = a["scale"] if a["scale"] is not None else 1.0 / (q.shape[-1] ** 0.5)
    s = (q @ k.transpose(-1, -2)) * scale
    if a["softcap"] > 0:
        s = a["softcap"] * torch.tanh(s / a["softcap"])
    shift = keys - length if a["lower_right"] else 0
    i = torch.arange(length)[:, None]
    j = torch.arange(keys)[None, :]
    distance = j - i - shift
    if slopes is not None:
        s = s - slopes[:, None, None] * distance.abs()
    open_ = torch.ones(s.shape, dtype=torch.bool)
    if mask is not None:
        if mask.dtype == torch.bool:
            open_ = open_ & mask
        else:
            s = s + mask
    if a["is_causal"]:
        open_ = open_ & (distance <= 0)
    if a["window_left"] >= 0:
        open_ = open_ & (distance >= -a["window_left"])
    if a["window_right"] >= 0:
        open_ = open_ & (distance <= a["window_right"])
    if key_lengths is not None:
        open_ = open_ & (torch.arange(keys)[None, None, None, :] < key_lengths[:, None, None, None])
    s = s.masked_fill(~open_, float("-inf"))
    top = s if sink is None else torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    lse = torch.logsumexp(top, dim=-1)
    p = torch.where(lse[..., None] == float("-inf"), 0.0, torch.exp(s - lse[..., None]))
    return torch.nan_to_num(p) @ v, lse.to(torch.promote_types(lse.dtype, torch.float32))


def sdpa(q, k, v, mask, sink, slopes, query_offsets, key_offsets, key_lengths, seed, a):
    if query_offsets is not None or a["dropout_p"] > 0:
        raise NotImplementedError
    return sdpa_parts(q, k, v, mask, sink, slopes, key_lengths, a)


def gradient_of(f, x, dy):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x), x, dy.expand(x.shape))[0]


BY_HAND = {
    "slice": lambda x, a: x[slices(x, a)],
    "slice_scatter": lambda x, src, a: slice_scatter(x, src, a),
    "pad": lambda x, a: pad(x, a),
    "gather": lambda x, index, a: torch.gather(x, a["dim"], index.long()),
    "scatter": lambda x, index, src, a: x.scatter(a["dim"], index.long(), src),
    "scatter_add": lambda x, index, src, a: x.scatter_add(a["dim"], index.long(), src),
    "index_select": lambda x, index, a: x.index_select(a["dim"], index),
    "index_add": lambda x, index, src, a: x.index_add(a["dim"], index, src),
    "index": lambda x, *rest, a: x[index_tuple(x, [i.long() for i in rest], a["dims"])],
    "index_put": index_put,
    "var": lambda x, a: torch.var(x, dim=a["dims"] or None, correction=a["correction"], keepdim=a["keepdim"]),
    "std": lambda x, a: torch.std(x, dim=a["dims"] or None, correction=a["correction"], keepdim=a["keepdim"]),
    "einsum": lambda *x, a: torch.einsum(a["equation"], *x),
    "layer_norm": lambda x, w, b, a: F.layer_norm(x, x.shape[x.ndim - a["normalized_ndim"]:], w, b, a["eps"]),
    "rms_norm": lambda x, w, a: F.rms_norm(
        x, x.shape[x.ndim - a["normalized_ndim"]:], w, torch.finfo(torch.promote_types(a["declared"], torch.float32)).eps if a["eps"] is None else a["eps"]),
    "group_norm": lambda x, w, b, a: F.group_norm(x, a["groups"], w, b, a["eps"]),
    "batch_norm": batch_norm,
    "embedding": lambda w, i, a: F.embedding(i, w, padding_idx=a["padding_idx"]),
    "embedding_grad": lambda dy, i, a: torch.ops.aten.embedding_dense_backward(
        dy, i, a["rows"], -1 if a["padding_idx"] is None else a["padding_idx"], False),
    "convolution_input_grad": lambda grad, w, a: convolution_grad(0, grad, w, a),
    "convolution_weight_grad": lambda x, grad, a: convolution_grad(1, x, grad, a),
    "relu6": lambda x, a: F.relu6(x),
    "hardtanh": lambda x, a: F.hardtanh(x, a["min_val"], a["max_val"]),
    "binary_cross_entropy": lambda x, target, weight, a: F.binary_cross_entropy(x, target, weight, reduction=a["reduction"]),
    "sdpa": lambda *x, a: sdpa(*x, a=a),
    "sdpa_forward": lambda *x, a: sdpa(*x, a=a),
    "gelu_grad": lambda x, dy, a: gradient_of(lambda t: F.gelu(t, approximate=a["approximate"]), x, dy),
    "silu_grad": lambda x, dy, a: gradient_of(F.silu, x, dy),
    "softplus_grad": lambda x, dy, a: gradient_of(lambda t: F.softplus(t, a["beta"], a["threshold"]), x, dy),
    "relu_grad": lambda x, dy, a: gradient_of(F.relu, x, dy),
    "tanh_grad": lambda y, dy, a: dy * (1 - y * y),
    "sigmoid_grad": lambda y, dy, a: dy * y * (1 - y),
}

# PyTorch's names for attributes that are called something else there.
KEYWORDS = {"rounding": "rounding_mode", "dims": "dim"}


def function_of(name):
    owner, _, leaf = name.rpartition(".")
    home = {"torch": torch, "Tensor": torch.Tensor, "torch.nn.functional": F, "operator": operator, "torch._C._nn": torch._C._nn,
            "torch.special": torch.special, "torch.linalg": torch.linalg}.get(owner)
    return getattr(home, leaf, None) if home is not None else None


def forms(row, inputs, attributes):
    """The ways to write a call: attributes in order, or by keyword; absent operands left out, or None."""
    attributes = [(key, value) for key, value in attributes if key != "device"]
    by_keyword_only = any(key == "reduction" for key, _ in attributes)  # size_average and reduce stand before it
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    if row["op"] in ("cat", "stack"):
        inputs = given = [given]
    positional = [value for _, value in attributes]
    while positional and positional[-1] is None:
        positional.pop()
    keywords = {KEYWORDS.get(key, key): value for key, value in attributes if value is not None}
    single = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in keywords.items()}
    if by_keyword_only:
        extra = {} if len(inputs) < 4 else {"pos_weight": inputs[3]}
        yield list(inputs)[:3], {**keywords, **extra}
        return
    yield list(inputs) + positional, {}
    yield given, keywords
    yield given, single
    yield given + positional, {}
    yield [*given, *positional[:1]], {k: v for k, v in list(keywords.items())[1:]}
    yield [*given, *positional[:2]], {k: v for k, v in list(keywords.items())[2:]}


def call_by_name(row, name, inputs, attributes):
    function = function_of(name)
    if function is None:
        raise LookupError(f"{name} does not exist")
    if name.startswith(("operator.", "Tensor.__")) or name.endswith("true_divide"):
        if any(value is not None for _, value in attributes):
            raise NotImplementedError  # the operator has the plain form only
        attributes = []
    failure = None
    for arguments, keywords in forms(row, inputs, attributes):
        try:
            return function(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - another form may fit
            failure = failure or error
    raise failure


# Calls that PyTorch refuses on values or forms alone, and Fulmen defines.
KNOWN = {
    ("convert", "to_bf16"): "the evaluator does not round",
    ("convert", "to_f16"): "the evaluator does not round",
    ("one_hot", "matrix"): "PyTorch takes i64 only",
    ("cross_entropy", "sum"): "PyTorch takes i64 targets only",
    ("relu6", "i64"): "PyTorch keeps integers, Fulmen gives f32",
    ("relu6", "u8"): "PyTorch keeps integers, Fulmen gives f32",
    ("hardtanh", "i64"): "PyTorch keeps integers, Fulmen gives f32",
    ("hardtanh", "u8"): "PyTorch keeps integers, Fulmen gives f32",
    ("gelu", "i64"): "PyTorch takes floats only",
    ("gelu", "u8"): "PyTorch takes floats only",
    ("prod", "all"): "PyTorch takes one dim",
    ("prod", "outer_two"): "PyTorch takes one dim",
    ("prod", "scalar"): "PyTorch takes one dim",
    ("any", "all_dims"): "PyTorch reduces nothing for an empty list here",
    ("all", "all_dims"): "PyTorch reduces nothing for an empty list here",
    ("logsumexp", "all"): "PyTorch refuses an empty list",
    ("arange", "empty"): "PyTorch refuses an end before the start",
    ("div", "floor_by_zero"): "PyTorch raises ZeroDivisionError; compiled code gives 0",
    ("div", "trunc_by_zero"): "PyTorch raises ZeroDivisionError; compiled code gives 0",
}


# Results that PyTorch leaves open: positions of equal elements.
OPEN = {("sort", "ties"): {1}, ("topk", "ties"): {1}, ("topk", "integers"): {1}, ("sort", "integers"): {1}, ("sort", "bools"): {1}}


def tolerance_of(dtype):
    """For results that PyTorch computed in float64, or in float32 because all inputs were integers."""
    return {torch.float32: dict(rtol=2e-6, atol=1e-6)}.get(dtype, dict(rtol=1e-9, atol=1e-11))


def results(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def differences(row):
    """Sentences on where PyTorch and the evaluator differ; None if PyTorch has no such op."""
    attributes = [(key, attribute_of(value)) for key, value in row["attributes"]]
    expected = [tensor_of(output, wide=True) for output in row["outputs"]]
    found = []
    calls = []
    if row["op"] in BY_HAND:
        declared = DTYPES[row["inputs"][0]["dtype"]]
        calls.append(("by hand", lambda inputs: BY_HAND[row["op"]](*inputs, a=dict(attributes, declared=declared))))
    else:
        for name in row["torch"]:
            calls.append((name, lambda inputs, name=name: call_by_name(row, name, inputs, attributes)))
    if not calls:
        return None
    failures = []
    worked = False
    for name, call in calls:
        for wide in (True, False):
            inputs = [tensor_of(spec, wide) for spec in row["inputs"]]
            try:
                got = results(call(inputs))
            except NotImplementedError:
                continue
            except Exception as error:  # noqa: BLE001 - a finding if no other name works
                if wide:
                    failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
                continue
            worked = True
            for i, (g, e) in enumerate(zip(got, expected)):
                if i in OPEN.get((row["op"], row["sample"]), ()):
                    continue
                if not wide:
                    promised = DTYPES[row["outputs"][i]["dtype"]]
                    if g.dtype != promised:
                        found.append(f"{name}: result {i} is {g.dtype}, Fulmen says {promised}")
                elif list(g.shape) != list(e.shape):
                    found.append(f"{name}: result {i} has shape {list(g.shape)}, Fulmen says {list(e.shape)}")
                elif not torch.allclose(g.to(torch.float64), e.to(torch.float64), **tolerance_of(g.dtype), equal_nan=True):
                    error = (g.to(torch.float64) - e.to(torch.float64)).abs().max().item() if g.numel() else 0
                    found.append(f"{name}: result {i} differs by {error:.3g}")
    return found if worked else found + failures


def main(path):
    compared = faulty = 0
    without = set()
    for line in open(path):
        row = json.loads(line)
        found = None if (row["op"], row["sample"]) in KNOWN else differences(row)
        if found is None:
            without.add(row["op"])
            continue
        compared += 1
        if found:
            faulty += 1
            print(f"{row['op']}_{row['sample']} {[(k, v) for k, v in row['attributes'] if k != 'device']}")
            for sentence in found:
                print("   ", sentence)
    print(f"{compared} samples compared, {faulty} differ; no PyTorch form for: {' '.join(sorted(without))}")


if __name__ == "__main__":
    main(sys.argv[1])
