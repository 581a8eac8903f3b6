"""A vision transformer of `transformers` on scikit-learn's handwritten digits (8 x 8 pixels), trained through Fulmen.

    python examples/vit.py [--epochs 5]

Prints the loss and the accuracy on digits it was not trained on after each epoch.
`make_model()` returns (module, inputs) for `fulmen explain examples/vit.py:make_model`.
"""

from __future__ import annotations

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

BATCH = 64


def make_model():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_labels=10, hidden_dropout_prob=0.1,
    )
    inputs = {"pixel_values": torch.randn(BATCH, 1, 8, 8), "labels": torch.randint(0, 10, (BATCH,))}
    return ViTForImageClassification(config), inputs


def digits():
    """(images, labels) to train on and to test with; pixels from -1 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("this example reads scikit-learn's digits: pip install scikit-learn") from None
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (images[:1536], labels[:1536]), (images[1536:], labels[1536:])


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=5)
    epochs = arguments.parse_args().epochs
    (images, labels), (test_images, test_labels) = digits()
    model, _ = make_model()
    step = torch.compile(model, backend="fulmen")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for begin in range(0, len(labels), BATCH):
            optimizer.zero_grad()
            loss = step(pixel_values=images[begin : begin + BATCH], labels=labels[begin : begin + BATCH]).loss
            loss.backward()
            optimizer.step()
            total += loss.item() * BATCH
        model.eval()
        with torch.no_grad():
            guesses = model(pixel_values=test_images).logits.argmax(-1)
        accuracy = (guesses == test_labels).float().mean().item()
        print(f"epoch {epoch}  loss {total / len(labels):.4f}  accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
