"""A Hugging Face Llama, random weights and real `transformers` code, trained through Fulmen for a few steps.

    python examples/llama.py [--steps 20]

Prints the loss of each step beside PyTorch eager's.
`make_model()` returns (module, inputs) for `fulmen explain examples/llama.py:make_model`.
"""

from __future__ import annotations

import argparse
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, BATCH, LENGTH = 256, 4, 64


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False,
    )
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def train(model, step, inputs, count):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(count):
        optimizer.zero_grad()
        loss = step(**inputs).loss
        loss.backward()
        optimizer.step()
        yield loss.item()


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=20)
    steps = arguments.parse_args().steps
    model, inputs = make_model()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fulmen")
    print("step     fulmen      eager")
    for number, (ours, theirs) in enumerate(zip(train(model, compiled, inputs, steps), train(eager, eager, inputs, steps))):
        print(f"{number:4d} {ours:10.6f} {theirs:10.6f}")


if __name__ == "__main__":
    main()
