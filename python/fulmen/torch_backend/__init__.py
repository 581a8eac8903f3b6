"""The torch.compile backend."""
