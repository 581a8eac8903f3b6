"""Fulmen's attention for code that calls torch.nn.functional.scaled_dot_product_attention.

    with fulmen.attention_for_torch():
        model(x)

or, for the rest of the process, `fulmen.install()`. What Fulmen can't run stays with PyTorch, with one warning for each
reason. Inside torch.compile the function stays PyTorch's, which Fulmen's backend knows.
"""

import contextlib
import warnings

import torch.nn.functional as F

from fulmen import _attention
from fulmen._core import DeviceError, UnsupportedError

_original = _attention._torch_sdpa
_said = set()


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """fulmen.sdpa under PyTorch's name and argument names; falls back to PyTorch and says so."""
    if _attention.is_compiling():
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    try:
        return _attention.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    except (UnsupportedError, DeviceError) as error:
        reason = str(error)
        if reason not in _said:
            _said.add(reason)
            warnings.warn(f"fulmen leaves this attention call to PyTorch: {reason}", RuntimeWarning, stacklevel=2)
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def install():
    """From now on torch.nn.functional.scaled_dot_product_attention is Fulmen's."""
    F.scaled_dot_product_attention = scaled_dot_product_attention


def uninstall():
    """Undoes install()."""
    F.scaled_dot_product_attention = _original


@contextlib.contextmanager
def attention_for_torch():
    """Fulmen's attention inside the block, what was there before after it."""
    before = F.scaled_dot_product_attention
    install()
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
