"""`attn_implementation="fulmen"` for Hugging Face models; importing this registers it.

Grouped heads are not copied, dropout is only what the model passes (it passes none outside training), masks are those
that transformers makes for its "sdpa" (padding, sliding window, packed sequences). Logit soft-cap, attention sinks and a
learned position bias go into the kernel.
"""

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fulmen._attention import attention, sdpa

name = "fulmen"


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None, softcap=None,
    s_aux=None, **kwargs,
):
    """transformers' interface: query (batch, heads, length, dim) to (batch, length, heads, dim), and no weights."""
    query_len, key_len = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(query_len > 1 and attention_mask is None and causal)
    if causal and key_len > query_len:  # an empty static cache: the keys behind the queries hold nothing
        key, value = key[:, :, :query_len], value[:, :, :query_len]
        if position_bias is not None:
            position_bias = position_bias[..., :query_len]
    if position_bias is not None:
        attention_mask = _with_bias(position_bias, attention_mask)
    if attention_mask is not None and attention_mask.dtype != torch.bool and attention_mask.dtype != query.dtype:
        attention_mask = attention_mask.to(query.dtype)
    if softcap is None and s_aux is None and not (causal and attention_mask is not None):
        out = sdpa(query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=grouped)
    else:
        # A mask beside the causal rule: the rule is a window with no key to the right.
        window = (None, 0) if causal and attention_mask is not None else None
        out = attention(
            query, key, value, attention_mask, is_causal=causal and window is None, dropout_p=dropout, scale=scaling,
            enable_gqa=grouped, window=window, softcap=softcap or 0.0, sink=None if s_aux is None else s_aux.float(),
        )
    return out.transpose(1, 2).contiguous(), None


def _with_bias(bias, mask):
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.full((), float("-inf"), dtype=bias.dtype, device=bias.device))
    return bias + mask


AttentionInterface.register(name, attention_forward)
AttentionMaskInterface.register(name, sdpa_mask)
