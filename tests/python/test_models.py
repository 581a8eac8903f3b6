"""Models of transformers with random weights, in training mode: every call runs in Fulmen, losses equal eager's."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fulmen import torch_backend  # noqa: E402

BATCH, LENGTH, VOCABULARY = 2, 16, 128


def tokens():
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def gpt2(drop):
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop,
    )
    ids = tokens()
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama(drop):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, attention_dropout=drop,
    )
    ids = tokens()
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def bert(drop):
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        hidden_dropout_prob=drop, attention_probs_dropout_prob=drop,
    )
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids, "attention_mask": mask}


def t5(drop):
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0, dropout_rate=drop,
    )
    ids = tokens()
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def vit(drop):
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        num_labels=10, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop,
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([1, 2])}


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit}


def prepare(name, drop):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name](drop)
    model.train()
    return model, inputs


def steps(model, call, inputs, count):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = call(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_losses_equal_eagers(name):
    model, inputs = prepare(name, 0.0)
    eager = copy.deepcopy(model)
    with torch_backend.listen() as reports:
        ours = steps(model, torch.compile(model, backend=torch_backend.fulmen_backend), inputs, 5)
    assert [(f.call, f.reason) for r in reports for f in r.fallbacks] == []
    theirs = steps(eager, eager, inputs, 5)
    assert ours == pytest.approx(theirs, rel=1e-5), (ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_trains_with_dropout(name):
    model, inputs = prepare(name, 0.1)
    with torch_backend.listen() as reports:
        losses = steps(model, torch.compile(model, backend=torch_backend.fulmen_backend), inputs, 12)
    assert [(f.call, f.reason) for r in reports for f in r.fallbacks] == []
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_bf16_autocast_is_as_close_as_eagers(name):
    model, inputs = prepare(name, 0.0)
    plain, eager = copy.deepcopy(model), copy.deepcopy(model)
    exact = steps(plain, plain, inputs, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = steps(model, torch.compile(model, backend=torch_backend.fulmen_backend), inputs, 3)
        theirs = steps(eager, eager, inputs, 3)
    distance = lambda losses: max(abs(a - b) for a, b in zip(losses, exact))  # noqa: E731
    assert distance(ours) <= 2 * distance(theirs) + 2e-3 * exact[0], (ours, theirs, exact)
