"""Attention on a GPU beside PyTorch's own: times, overheads, the first call of a process, and a whole model.

    python benchmarks/gpu_attention.py results.json [--only table,kernels,overhead,first_call,model] [--rounds 20] [--rows NAME]

Every row runs all peers in one process, alternating, in an order drawn anew each round (a long kernel leaves the GPU
hotter for the one after it); a number is the median over rounds of CUDA events. `kernels` lists what each peer ran. A pause on the
GPU before each measured piece lets the host run ahead, so that small calls show the kernels' time and not the host's
(which `overhead` shows). Needs PyTorch with CUDA and `import fulmen`; without a GPU it says so and ends with status 3.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

# name, batch, heads, key_heads, query_len, key_len, head_dim, value_dim, options
ROWS = [
    ("Llama-2-7B b16 h32 s4096 d128 causal", 16, 32, 32, 4096, 4096, 128, 128, {"causal": True}),
    ("Llama-2-7B b2 h32 s4096 d128 causal", 2, 32, 32, 4096, 4096, 128, 128, {"causal": True}),
    ("GQA 64/8 b1 s8192 d128 causal", 1, 64, 8, 8192, 8192, 128, 128, {"causal": True}),
    ("GQA 64/8 b1 s16384 full", 1, 64, 8, 16384, 16384, 128, 128, {}),
    ("GPT-2 b8 h12 s1024 d64 causal", 8, 12, 12, 1024, 1024, 64, 64, {"causal": True}),
    ("GPT-2 dropout 0.1", 8, 12, 12, 1024, 1024, 64, 64, {"causal": True, "dropout": 0.1}),
    ("b1 h128 s4096 d192/128 causal", 1, 128, 128, 4096, 4096, 192, 128, {"causal": True, "contiguous": True}),
    ("b2 h16 s4096 d256 causal", 2, 16, 16, 4096, 4096, 256, 256, {"causal": True, "contiguous": True}),
    ("T5 learned bias b4 h16 s2048 d64", 4, 16, 16, 2048, 2048, 64, 64, {"mask": "learned", "contiguous": True}),
    ("fixed bias b2 h32 s2048 d128", 2, 32, 32, 2048, 2048, 128, 128, {"mask": "bias", "contiguous": True}),
    ("bool mask b8 h16 s2048 d64", 8, 16, 16, 2048, 2048, 64, 64, {"mask": "bool", "contiguous": True}),
    ("key padding b8 h12 s512 d64", 8, 12, 12, 512, 512, 64, 64, {"mask": "padding"}),
    ("ViT b64 h12 s197 d64", 64, 12, 12, 197, 197, 64, 64, {}),
    ("cross 128 x 4096 b8 h16 d64", 8, 16, 16, 128, 4096, 64, 64, {"contiguous": True}),
]
SECTIONS = ("table", "kernels", "overhead", "first_call", "model")


def make_call(torch, row):
    """Tensors and keyword arguments of a row; (batch, length, heads, dim) in memory unless the row is contiguous."""
    _, batch, heads, key_heads, query_len, key_len, dim, value_dim, options = row

    def tensor(h, s, d):
        if options.get("contiguous"):
            return torch.randn(batch, h, s, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
        return torch.randn(batch, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).detach().requires_grad_()

    q, k, v = tensor(heads, query_len, dim), tensor(key_heads, key_len, dim), tensor(key_heads, key_len, value_dim)
    kind, mask = options.get("mask"), None
    if kind == "bool":
        mask = torch.rand(batch, 1, query_len, key_len, device="cuda") > 0.3
    elif kind == "padding":
        lengths = torch.randint(key_len // 2, key_len + 1, (batch,), device="cuda")
        mask = (torch.arange(key_len, device="cuda") < lengths[:, None])[:, None, None, :]
    elif kind:
        mask = torch.randn(1, heads if kind == "learned" else 1, query_len, key_len, device="cuda", dtype=torch.bfloat16)
        mask.requires_grad_(kind == "learned")
    grad = torch.randn(batch, query_len, heads, value_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    settings = {"dropout_p": options.get("dropout", 0.0), "is_causal": options.get("causal", False)}
    if heads != key_heads:
        settings["enable_gqa"] = True
    inputs = [q, k, v] + ([mask] if kind == "learned" else [])
    return (q, k, v, mask), settings, inputs, grad


def peers(torch, fulmen):
    """Name -> function(q, k, v, mask, **settings)."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def torch_with(backend):
        def call(q, k, v, mask, **settings):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, mask, **settings)

        return call

    return {
        "torch flash": torch_with(SDPBackend.FLASH_ATTENTION),
        "torch cudnn": torch_with(SDPBackend.CUDNN_ATTENTION),
        "torch mem-efficient": torch_with(SDPBackend.EFFICIENT_ATTENTION),
        "torch default": lambda q, k, v, mask, **s: F.scaled_dot_product_attention(q, k, v, mask, **s),
        "fulmen": lambda q, k, v, mask, **s: fulmen.sdpa(q, k, v, mask, **s),
        "fulmen cudnn": lambda q, k, v, mask, **s: fulmen.attention(q, k, v, mask, executors=["cudnn"], **s),  # asked for by name
    }


def measure(torch, pieces, rounds):
    """Medians in milliseconds of functions, alternating. A piece that raises is left out with its message."""
    times, refused = {name: [] for name in pieces}, {}
    pause = 4_000_000  # cycles, about 2 ms
    order = random.Random(0)
    for number in range(-3, rounds):
        for name, piece in order.sample(list(pieces.items()), len(pieces)):
            if name in refused:
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            try:
                torch.cuda._sleep(pause)
                begin.record()
                piece()
                end.record()
                torch.cuda.synchronize()
            except (RuntimeError, NotImplementedError, ValueError) as error:
                refused[name] = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
                torch.cuda.synchronize()
                continue
            if number >= 0:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items() if t}, refused


def table(torch, fulmen, rounds, wanted):
    result = []
    for row in ROWS:
        if wanted and wanted not in row[0]:
            continue
        operands, settings, inputs, grad = make_call(torch, row)
        functions = peers(torch, fulmen)

        def forward(function):
            def piece():
                with torch.no_grad():
                    function(*operands, **settings)

            return piece

        def both(function):
            def piece():
                torch.autograd.grad(function(*operands, **settings), inputs, grad)

            return piece

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            forwards, _ = measure(torch, {n: forward(f) for n, f in functions.items()}, rounds)
            alternating, refused = measure(torch, {n: both(f) for n, f in functions.items()}, rounds)
        left = sorted({str(w.message)[:300] for w in said if "PyTorch runs this call" in str(w.message)})
        entry = {"name": row[0], "forward_ms": forwards, "both_ms": alternating, "refused": refused, "left_to_torch": left}
        result.append(entry)
        shown = "  ".join(f"{name} {alternating[name]:.3f}" for name in alternating)
        print(f"{row[0]:40s} fwd+bwd ms: {shown}{'  LEFT TO PYTORCH: ' + left[0] if left else ''}", flush=True)
        del operands, inputs, grad
        torch.cuda.empty_cache()
    return result


def kernels(torch, fulmen, _rounds, wanted):
    """Every kernel that one forward and backward of a row runs, with its microseconds."""
    from torch.profiler import ProfilerActivity, profile

    result = []
    for row in ROWS:
        if wanted and wanted not in row[0]:
            continue
        operands, settings, inputs, grad = make_call(torch, row)
        entry = {"name": row[0]}
        for name, function in peers(torch, fulmen).items():
            if name not in ("torch cudnn", "fulmen"):
                continue
            try:
                for _ in range(3):
                    torch.autograd.grad(function(*operands, **settings), inputs, grad)
                torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as seen:
                    for _ in range(3):
                        torch.autograd.grad(function(*operands, **settings), inputs, grad)
                    torch.cuda.synchronize()
                ran = sorted((e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
                entry[name] = [[e.name[:160], round(e.time_range.elapsed_us(), 1)] for e in ran[-(len(ran) // 3):]]
                print(f"{row[0]}: {name}")
                for kernel, us in entry[name]:
                    print(f"    {us:10.1f}  {kernel}", flush=True)
            except (RuntimeError, NotImplementedError) as error:
                entry[name] = str(error).strip().splitlines()[0][:200]
        result.append(entry)
        del operands, inputs, grad
        torch.cuda.empty_cache()
    return result


def overhead(torch, fulmen, calls=2000):
    """Host microseconds a call, small tensors: the kernels take less than the host does."""
    result = {}
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gq, gk, gv = (t.detach().clone().requires_grad_() for t in (q, k, v))
    grad = torch.randn_like(q)
    functions = {n: f for n, f in peers(torch, fulmen).items() if n in ("torch default", "torch cudnn", "fulmen")}
    import torch.nn.functional as F

    functions["torch default"] = lambda a, b, c, mask, **s: F.scaled_dot_product_attention(a, b, c)
    pieces = {}
    for name, function in functions.items():
        pieces[name + ", forward"] = lambda f=function: f(q, k, v, None)
        pieces[name + ", forward and backward"] = lambda f=function: torch.autograd.grad(f(gq, gk, gv, None), (gq, gk, gv), grad)
    samples = {name: [] for name in pieces}
    for number in range(-1, 7):
        for name, piece in pieces.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls // 10):
                piece()
            elapsed = (time.perf_counter() - begin) / (calls // 10) * 1e6
            torch.cuda.synchronize()
            if number >= 0:
                samples[name].append(elapsed)
    for name, values in samples.items():
        result[name] = statistics.median(values)
        print(f"host overhead  {name:40s} {result[name]:8.1f} us", flush=True)
    return result


FIRST_CALL = """
import sys, time, torch
which = sys.argv[1]
q = torch.randn(2, 32, 1024, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
torch.matmul(q.detach(), q.detach().transpose(-1, -2)); torch.cuda.synchronize()
if which == "fulmen":
    import fulmen
    call = fulmen.sdpa
else:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    def call(*a, **s):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if which == "torch cudnn" else SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*a, **s)
def once():
    begin = time.perf_counter()
    call(q, q, q, is_causal=True).sum().backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3
print("first", once(), "second", once())
"""


def first_call(*_):
    """Milliseconds of the first forward and backward of a new process, with torch and CUDA already awake."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, FULMEN_CACHE_DIR=folder)
        for label, which in (("fulmen, empty plan store", "fulmen"), ("fulmen, filled plan store", "fulmen"),
                             ("fulmen, filled plan store again", "fulmen"), ("torch cudnn", "torch cudnn"), ("torch flash", "torch flash")):
            done = subprocess.run([sys.executable, "-c", FIRST_CALL, which], env=environment, capture_output=True, text=True)
            words = done.stdout.split()
            if done.returncode or len(words) < 4:
                result[label] = {"error": done.stderr[-500:]}
            else:
                result[label] = {"first_ms": float(words[-3]), "second_ms": float(words[-1])}
            print(f"first call  {label:34s} {result[label]}", flush=True)
    return result


def model(torch, fulmen, steps=20):
    """transformers' Llama, 4 layers of the 7B shape, random weights: losses with the backend beside eager's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    losses, times, info = {}, {}, {}
    before = fulmen.cache_info()["sdpa"]["builds"]
    for name in ("eager", "fulmen"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=4, num_attention_heads=32,
                             num_key_value_heads=32, vocab_size=32000, attn_implementation="sdpa", use_cache=False)
        with torch.device("cuda"):
            net = LlamaForCausalLM(config).to(torch.bfloat16).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        if name == "fulmen" and "fulmen" not in torch._dynamo.list_backends():  # a build tree has no entry point
            torch._dynamo.register_backend(fulmen.torch_backend.fulmen_backend, name="fulmen")
        run = torch.compile(net, backend="fulmen") if name == "fulmen" else net
        generator = torch.Generator("cuda").manual_seed(1)
        batches = [torch.randint(0, 32000, (2, 1024), device="cuda", generator=generator) for _ in range(4)]
        losses[name], times[name] = [], []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(steps):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                loss = run(input_ids=batches[step % 4], labels=batches[step % 4]).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
                times[name].append((time.perf_counter() - begin) * 1e3)
        info[name + " warnings"] = sorted({str(w.message)[:300] for w in said if "fulmen" in str(w.message).lower() or "Fulmen" in str(w.message)})
        del net, optimizer, run
        torch.cuda.empty_cache()
    info["programs built for attention"] = fulmen.cache_info()["sdpa"]["builds"] - before
    worst = max(abs(a - b) for a, b in zip(losses["eager"], losses["fulmen"]))
    medians = {name: statistics.median(t[3:]) for name, t in times.items()}
    print(f"Llama 4 layers, {steps} steps: losses {losses['eager'][0]:.4f} -> eager {losses['eager'][-1]:.4f}, fulmen "
          f"{losses['fulmen'][-1]:.4f}; largest difference {worst:.4f}; ms a step {medians}; {info}", flush=True)
    return {"losses": losses, "largest_difference": worst, "step_ms": medians, **info}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="JSON file to write")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", default="", help="only rows whose name has this text")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    for section in chosen:
        if section not in SECTIONS:
            parser.error(f"there is no section {section!r}; known: {', '.join(SECTIONS)}")
    import torch

    if not torch.cuda.is_available():
        print("gpu_attention: PyTorch sees no GPU")
        return 3
    import fulmen

    results = {
        "command": " ".join(["benchmarks/gpu_attention.py", *(arguments or sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "executors": {e.name: str(getattr(e, "version", "")) for e in fulmen.executors()},
    }
    sections = {
        "table": lambda: table(torch, fulmen, options.rounds, options.rows),
        "kernels": lambda: kernels(torch, fulmen, options.rounds, options.rows),
        "overhead": lambda: overhead(torch, fulmen),
        "first_call": first_call,
        "model": lambda: model(torch, fulmen),
    }
    failed = False
    for section in chosen:
        try:
            results[section] = sections[section]()
        except Exception as error:  # the other sections are still worth having
            results[section] = {"error": f"{type(error).__name__}: {error}"}
            failed = True
            print(f"{section}: {type(error).__name__}: {error}", flush=True)
        with open(options.path, "w") as file:
            json.dump(results, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
