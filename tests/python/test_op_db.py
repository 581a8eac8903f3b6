"""PyTorch's own samples (op_db) as an oracle: every sample of the calls we map, forward and backward, f32 and bf16.

Each sample becomes a graph of one call, which is recorded, compiled and compared with the eager call. A sample that
Fulmen refuses must say why. Figures are printed: run with -s, or as a script for the table.
"""

import collections
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")

from fulmen import UnsupportedError, _core, torch_backend  # noqa: E402
from fulmen.torch_backend.bridge import Runner  # noqa: E402
from fulmen.torch_backend.calls import find  # noqa: E402

NAMES = """
abs add addcdiv addcmul addmm all amax amin any arange argmax argmin argsort atan2 baddbmm bernoulli bfloat16 bitwise_and
bitwise_not bitwise_or bitwise_xor bmm bool broadcast_tensors broadcast_to cat ceil chunk clamp clamp_max clamp_min clone
contiguous cos cumprod cumsum div dot double einsum eq erf exp expand expand_as expm1 eye flatten flip float floor
floor_divide fmod full full_like gather ge gt half hstack index_add index_put index_select int isfinite isinf isnan le lerp
linalg.norm linalg.vector_norm log log1p log2 log_softmax logical_and logical_not logical_or logical_xor logsumexp long lt
masked_fill matmul maximum mean meshgrid minimum mm movedim mul mv narrow ne neg new_empty new_full new_ones new_zeros
nn.functional.batch_norm nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d nn.functional.conv2d
nn.functional.cross_entropy nn.functional.elu nn.functional.embedding nn.functional.gelu nn.functional.glu
nn.functional.group_norm nn.functional.hardtanh nn.functional.huber_loss nn.functional.kl_div nn.functional.l1_loss
nn.functional.layer_norm nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid nn.functional.mse_loss
nn.functional.nll_loss nn.functional.one_hot nn.functional.pad nn.functional.relu nn.functional.relu6
nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.silu nn.functional.smooth_l1_loss
nn.functional.softmin nn.functional.softplus nn.functional.tanhshrink norm ones ones_like outer permute pow prod reciprocal
remainder repeat repeat_interleave reshape reshape_as roll round rsqrt rsub scatter scatter_add select sigmoid sign sin
softmax sort split sqrt square squeeze stack std sub sum t take_along_dim tan tanh tensor_split tile topk transpose tril
triu true_divide trunc unbind unflatten unsqueeze var view view_as vstack where zeros zeros_like
""".split()

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# op_db's own callable is a lambda there; the call that it stands for
CALLED = {"einsum": torch.einsum, "where": torch.where, "nn.functional.embedding": torch.nn.functional.embedding}
# op_db's lambda takes the sample's input in another place
ARGUMENTS = {"einsum": lambda sample: (sample.args[0], *sample.input), "where": lambda sample: (sample.args[0], sample.input, sample.args[1])}
ARGUMENTS["nn.functional.embedding"] = lambda sample: (sample.args[0], sample.input, *sample.args[1:])
RANDOM = ("bernoulli",)
UNDEFINED = ("new_empty",)  # contents are not defined
# bf16 samples have equal elements, whose order is not defined: values are compared, positions and gradients are not
TIES = ("sort", "topk", "argsort")
SAMPLES_AT_MOST = 40


def op_infos():
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if info.name in NAMES]


def graph_of(name, target, sample):
    """A graph with the sample's tensors as placeholders and one call."""
    graph = torch.fx.Graph()
    tensors = []

    def place(value):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return graph.placeholder(f"x{len(tensors)}")
        return value

    arguments = ARGUMENTS[name](sample) if name in ARGUMENTS else (sample.input, *sample.args)
    args, kwargs = torch.utils._pytree.tree_map(place, (arguments, sample.kwargs))
    if isinstance(target, str):
        node = graph.call_method(target, tuple(args), kwargs)
    else:
        node = graph.call_function(target, tuple(args), kwargs)
    graph.output((node,))
    return torch.fx.GraphModule(torch.nn.Module(), graph), tensors


def tensors_in(value):
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def exact_gradients(module, inputs, cotangents):
    """Gradients in float64, for samples whose gradient is what is left of a cancellation."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
    results = [t for t in tensors_in(module(*wide)) if t.requires_grad]
    torch.autograd.backward(results, [c.double() for c in cotangents])
    return [t.grad for t in wide]


def at_least_as_close(ours, eager, exact, dtype) -> bool:
    """Whether our error is within twice eager's, and a rounding of the dtype."""
    if exact is None or ours.shape != exact.shape:
        return False
    error = float((ours.double() - exact).abs().max())
    return error <= 2 * float((eager.double() - exact).abs().max()) + 8 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max()))


def close(ours, eager, dtype, what):
    assert ours.shape == eager.shape, f"{what}: shape {tuple(ours.shape)}, eager {tuple(eager.shape)}"
    assert ours.dtype == eager.dtype, f"{what}: dtype {ours.dtype}, eager {eager.dtype}"
    if not ours.numel():
        return
    tolerance = 2e-4 if dtype == torch.float32 else 4e-2
    finite = eager[eager.isfinite()] if eager.is_floating_point() else eager
    scale = float(finite.double().abs().max()) if finite.numel() else 1.0
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True, msg=lambda m: f"{what}: {m}")


def run_sample(info, sample, dtype):
    """None if the sample agrees, a reason if Fulmen refuses it."""
    target = CALLED.get(info.name, info.op)
    if find("call_function", target) is None:  # op_db has a lambda
        last = info.name.split(".")[-1]
        target = getattr(torch.nn.functional, last) if info.name.startswith("nn.functional.") else last
    module, tensors = graph_of(info.name, target, sample)
    eager_inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    eager = tensors_in(module(*eager_inputs))
    modes = torch_backend.Modes(None, True)
    recorded = torch_backend.record(module, tensors, modes)
    if recorded.fallbacks:
        return recorded.fallbacks[0].reason
    try:
        compiled = _core.compile(recorded.trace, training=recorded.needs_grad)
    except UnsupportedError as error:
        return str(error)
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    ours = tensors_in(Runner(recorded, compiled)(*inputs))
    assert len(ours) == len(eager)
    if info.name in RANDOM or info.name in UNDEFINED or sample.kwargs.get("dropout_p"):
        return None
    pairs = []
    for i, (a, b) in enumerate(zip(ours, eager)):
        assert a.requires_grad == b.requires_grad, f"result {i}: requires_grad {a.requires_grad}, eager {b.requires_grad}"
        if info.name in TIES and dtype == torch.bfloat16:
            close(a.detach() * (a.is_floating_point()), b.detach() * (b.is_floating_point()), dtype, f"result {i}")
            continue
        close(a.detach(), b.detach(), dtype, f"result {i}")
        if a.requires_grad:
            pairs.append((a, b, torch.randn_like(b)))
    if pairs:
        torch.autograd.backward([a for a, _, _ in pairs], [g for _, _, g in pairs])
        torch.autograd.backward([b for _, b, _ in pairs], [g for _, _, g in pairs])
        for i, (a, b) in enumerate(zip(inputs, eager_inputs)):
            if b.grad is not None or a.grad is not None:
                ours_grad, eager_grad = (torch.zeros_like(b) if g is None else g for g in (a.grad, b.grad))
                try:
                    close(ours_grad, eager_grad, dtype, f"gradient {i}")
                except AssertionError:
                    exact = exact_gradients(module, tensors, [g for _, _, g in pairs])[i]
                    if not at_least_as_close(ours_grad, eager_grad, exact, dtype):
                        raise
    return None


def run_op(info, dtype):
    """Counts of passed, refused and failed samples, and what they said."""
    counts, said = collections.Counter(), []
    needs_grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=needs_grad)):
        if number >= SAMPLES_AT_MOST:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                refused = run_sample(info, sample, dtype)
            except Exception as error:  # noqa: BLE001  a failed sample is counted, with its text
                counts["failed"] += 1
                said.append(f"sample {number} {sample.summary()}: {type(error).__name__}: {str(error)[:300]}")
                continue
        counts["refused" if refused else "passed"] += 1
        if refused:
            assert len(refused) > 3
            said.append(f"sample {number} refused: {refused[:200]}")
    return counts, said


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("info", op_infos(), ids=lambda i: f"{i.name}{'.' + i.variant_test_name if i.variant_test_name else ''}")
def test_op_db(info, dtype_name):
    dtype = DTYPES[dtype_name]
    if dtype not in info.supported_dtypes("cpu"):
        pytest.skip(f"op_db has no {dtype_name} samples for it on the CPU")
    counts, said = run_op(info, dtype)
    print(f"op_db {info.name} {dtype_name}: {dict(counts)}")
    assert not counts["failed"], "\n".join(said)


# Calls whose gradient has corners: where operands are equal, at a bound, at 0. Samples with every float 0, or rounded to whole
# numbers from -2 to 2, stand on them.
CORNERS = """
abs acos acosh amax amin asin asinh atan2 atanh clamp clamp_max clamp_min copysign cumprod fmax fmin hypot linalg.norm
linalg.vector_norm logaddexp logsumexp max maximum mean min minimum nn.functional.adaptive_max_pool1d
nn.functional.adaptive_max_pool2d nn.functional.binary_cross_entropy nn.functional.celu nn.functional.cosine_similarity
nn.functional.elu nn.functional.hardshrink nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh
nn.functional.huber_loss nn.functional.l1_loss nn.functional.layer_norm nn.functional.leaky_relu nn.functional.max_pool2d
nn.functional.normalize nn.functional.pairwise_distance nn.functional.prelu nn.functional.relu nn.functional.relu6
nn.functional.rms_norm nn.functional.selu nn.functional.smooth_l1_loss nn.functional.softplus nn.functional.softshrink
nn.functional.softsign nn.functional.threshold norm pow prod quantile renorm sign sinc softmax sqrt square std std_mean var
var_mean where
""".split()
AT_CORNERS = {"zeros": torch.zeros_like, "whole_numbers": lambda t: t.round().clamp(-2, 2)}


def corner_infos():
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if info.name in CORNERS and "cutedsl" not in info.variant_test_name]  # large ones


@pytest.mark.parametrize("values", AT_CORNERS)
@pytest.mark.parametrize("info", corner_infos(), ids=lambda i: f"{i.name}{'.' + i.variant_test_name if i.variant_test_name else ''}")
def test_corners(info, values):
    def moved(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return AT_CORNERS[values](value.detach()).requires_grad_(value.requires_grad)
        return value

    torch.manual_seed(0)
    for number, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)):
        if number >= 6:
            break
        sample.input, sample.args, sample.kwargs = torch.utils._pytree.tree_map(moved, (sample.input, tuple(sample.args), sample.kwargs))
        if info.name == "nn.functional.binary_cross_entropy":  # takes probabilities
            sample.input = sample.input.detach().abs().clamp(max=1).requires_grad_(sample.input.requires_grad)
        try:
            run_sample(info, sample, torch.float32)
        except AssertionError as error:
            raise AssertionError(f"sample {number} {sample.summary()}: {error}") from error


def main(names):
    totals = collections.Counter()
    for info in op_infos():
        if names and info.name not in names:
            continue
        for dtype_name, dtype in DTYPES.items():
            if dtype not in info.supported_dtypes("cpu"):
                continue
            counts, said = run_op(info, dtype)
            totals.update({f"{dtype_name} {k}": v for k, v in counts.items()})
            print(f"{info.name:50s} {info.variant_test_name:24s} {dtype_name:5s} {dict(counts)}", flush=True)
            for line in said:
                print("    " + line, flush=True)
    print(dict(totals))


if __name__ == "__main__":
    main(sys.argv[1:])
