"""A GPT in plain PyTorch, as used by the demo, the benchmarks and the tests.

Nothing here knows Fulmen: `torch.compile(model, backend="fulmen")` is all it takes.
`make_model()` returns (module, inputs), the form that `fulmen explain examples/gpt.py:make_model` wants.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocabulary: int = 256
    length: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """tokens, targets: i64 (batch, length) -> mean cross entropy, a 0-dim float."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def python_source_bytes(limit: int = 2_000_000) -> torch.Tensor:
    """The first `limit` bytes of Python's own standard library sources, as a u8 tensor: text that every machine has."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    if len(data) < 10_000:
        raise RuntimeError(f"found only {len(data)} bytes of Python source; the standard library's .py files are needed")
    return torch.frombuffer(data[:limit], dtype=torch.uint8)


def batches(data: torch.Tensor, config: GPTConfig, batch: int, seed: int):
    """Endless (tokens, targets) pairs drawn from `data`, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - config.length - 1, (batch,), generator=generator)
        windows = torch.stack([data[s : s + config.length + 1] for s in starts]).long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def make_model(**overrides):
    torch.manual_seed(0)
    config = GPTConfig(**overrides)
    tokens = torch.randint(config.vocabulary, (4, config.length))
    return GPT(config), (tokens, tokens.roll(-1, 1))
