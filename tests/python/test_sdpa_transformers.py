"""attn_implementation="fulmen": small random models give eager attention's losses and gradients, with padding."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import fulmen.transformers  # noqa: E402, F401

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def config_of(name):
    t = transformers
    if name == "gpt2":
        return t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    if name == "llama":
        return t.LlamaConfig(**SMALL, num_key_value_heads=2)
    if name == "gemma2":
        return t.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4, attn_logit_softcapping=5.0)
    if name == "qwen3":
        return t.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)
    if name == "bert":
        return t.BertConfig(**SMALL, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    if name == "t5":
        return t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
    raise ValueError(name)


CLASSES = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
           "gemma2": "Gemma2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def model_of(name, implementation):
    torch.manual_seed(0)
    config = config_of(name)
    return getattr(transformers, CLASSES[name])._from_config(config, attn_implementation=implementation).train()


def loss_and_gradients(model, padded):
    torch.manual_seed(1)
    tokens = torch.randint(1, 64, (2, 12))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, 8:] = 0
    loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_losses_and_gradients_are_those_of_eager(name, padded):
    ours, eager = model_of(name, "fulmen"), model_of(name, "eager")
    before = fulmen.cache_info()["sdpa"]
    loss, gradients = loss_and_gradients(ours, padded)
    after = fulmen.cache_info()["sdpa"]
    assert after["hits"] + after["builds"] > before["hits"] + before["builds"], "fulmen's attention was not called"
    right, expected = loss_and_gradients(eager, padded)
    assert abs(loss - right) <= 1e-5 * abs(right)
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert (gradients[key] - gradient).abs().max().item() <= 1e-4 * scale + 1e-7, key


def test_dropout_only_in_training():
    config = config_of("gpt2")
    config.attn_pdrop = 0.5
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="fulmen")
    tokens = torch.randint(1, 64, (1, 8))
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


def test_generation_is_that_of_eager():
    tokens = torch.randint(1, 64, (1, 5), generator=torch.Generator().manual_seed(2))
    results = []
    for implementation in ("fulmen", "eager"):
        model = model_of("llama", implementation).eval()
        results.append(model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0))
    assert torch.equal(*results)


def sharp(name, implementation):
    """A model whose attention is far from uniform, for inference."""
    model = model_of(name, implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.eval()


TOKENS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(1))
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
RIGHT = LEFT.flip(1)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def in_chunks(model):
    first = model(TOKENS[:, :4], use_cache=True)
    second = model(TOKENS[:, 4:8], past_key_values=first.past_key_values, use_cache=True)
    third = model(TOKENS[:, 8:], past_key_values=second.past_key_values, use_cache=True)
    return torch.cat([first.logits, second.logits, third.logits], 1)


INFERENCE = {
    "right_padding": lambda model: model(TOKENS, attention_mask=RIGHT).logits[RIGHT.bool()],
    "left_padding": lambda model: model(TOKENS, attention_mask=LEFT).logits[LEFT.bool()],
    "packed": lambda model: model(TOKENS, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)).logits,
    "in_chunks": in_chunks,
    "generate": lambda model: model.generate(TOKENS, attention_mask=LEFT, **GREEDY),
    "static_cache": lambda model: model.generate(TOKENS, attention_mask=LEFT, cache_implementation="static", disable_compile=True, **GREEDY),
    "beams": lambda model: model.generate(TOKENS, attention_mask=LEFT, num_beams=3, **GREEDY),
}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_inference_is_that_of_eager(name):
    ours, eager = sharp(name, "fulmen"), sharp(name, "eager")
    with torch.no_grad():
        for case, run in INFERENCE.items():
            a, b = run(ours), run(eager)
            assert torch.equal(a, b) if not a.is_floating_point() else torch.allclose(a, b, rtol=1e-4, atol=1e-4), case


def test_grouped_heads_are_not_copied(monkeypatch):
    seen = []

    def watched(query, key, value, *arguments, **options):
        seen.append((query.shape[1], key.shape[1], options["enable_gqa"]))
        return fulmen.sdpa(query, key, value, *arguments, **options)

    monkeypatch.setattr(fulmen.transformers, "sdpa", watched)
    model_of("llama", "fulmen")(TOKENS)
    assert seen == [(4, 2, True)] * 2
