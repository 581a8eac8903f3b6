"""Training steps of a GPT (forward and backward, no optimizer) beside PyTorch eager and Inductor."""

import contextlib
import time

import torch
from torch import nn
from torch.nn import functional as F

from fulmen._bench.measure import alternate, row

# name, width, layers, heads, batch, length, vocabulary
_models = [
    ("GPT d128 L4 h4 b16 s64 v128", 128, 4, 4, 16, 64, 128),
    ("GPT d384 L6 h6 b4 s256 v256", 384, 6, 6, 4, 256, 256),
    ("GPT-2 shape d768 L4 h12 b1 s1024 v50257", 768, 4, 12, 1, 1024, 50257),
]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, heads, length, vocabulary):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def rows(device, peers, only, repeats, dtypes):
    for name, width, layers, heads, batch, length, vocabulary in _models:
        for dtype in dtypes or (("fp32",) if vocabulary > 1000 else ("fp32", "bf16")):
            label = f"{name} {dtype}"
            if only and only not in label:
                continue
            torch.manual_seed(0)
            model = GPT(width, layers, heads, length, vocabulary).to(device)
            tokens = torch.randint(vocabulary, (batch, length), device=device)
            targets = torch.randint(vocabulary, (batch, length), device=device)

            def step(forward):
                def run():
                    for p in model.parameters():
                        p.grad = None
                    cast = torch.autocast(device, dtype=torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()
                    with cast:
                        loss = forward(tokens, targets)
                    loss.backward()

                return run

            ways, first = {}, {}
            for way in ("fulmen", *peers):
                torch._dynamo.reset()
                forward = model if way == "torch" else torch.compile(model, backend=way)
                ways[way] = step(forward)
                start = time.perf_counter()
                ways[way]()
                first[way] = time.perf_counter() - start
            times = alternate(ways, device, repeats, seconds=6.0)
            ours = times.pop("fulmen")[0]
            yield row(label, ours, {peer: t[0] for peer, t in times.items()}, first_step_s=first)
