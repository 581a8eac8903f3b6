"""Models of transformers with random weights and tiny sizes, through torch.compile(backend="fulmen") beside eager.

    python tools/sweep_models.py [NAME ...] [--markdown] [--only fp32|bf16|dropout|eval]

For each model: coverage of its training graph, graphs, what stayed with PyTorch, the relative distance of the loss and the
largest distance of a gradient (relative to the gradient's largest element) from eager's, in f32; under bf16 autocast the
distance of our loss and eager's from an f32 run; whether dropout is reproducible by seed; inference. With --markdown the
table of docs/models.md. tests/python/test_models.py imports the models that run in each test run.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
import warnings

import torch
import transformers as t

VOCABULARY, BATCH, LENGTH = 96, 2, 12
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
ENDS = dict(bos_token_id=0, eos_token_id=1, pad_token_id=0)


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (BATCH, length))


def _language(config, model=None, mask: bool = False):
    """A causal or masked language model with labels."""
    ids = tokens()
    inputs = {"input_ids": ids, "labels": ids}
    if mask:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 9:] = 0
    return (model or t.AutoModelForCausalLM.from_config)(config), inputs


def _image(config, model, size: int = 32, **more):
    return model(config), {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.tensor([1, 2]), **more}


def gpt2(p):
    return _language(t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, **ENDS))


def gpt_neo(p):
    config = t.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4,
        max_position_embeddings=32, attention_dropout=p, embed_dropout=p, resid_dropout=p, **ENDS,
    )
    return _language(config)


def gpt_neox(p):
    return _language(t.GPTNeoXConfig(**SMALL, max_position_embeddings=32, hidden_dropout=p, attention_dropout=p, **ENDS))


def gptj(p):
    return _language(t.GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32, attn_pdrop=p, resid_pdrop=p, embd_pdrop=p, **ENDS))


def opt(p):
    return _language(t.OPTConfig(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=32, dropout=p, **ENDS), mask=True)


def bloom(p):
    return _language(t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=p, attention_dropout=p, **ENDS), mask=True)


def llama(p):
    return _language(t.LlamaConfig(**SMALL, num_key_value_heads=2, attention_dropout=p, **ENDS), mask=True)


def mistral(p):
    return _language(t.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4, attention_dropout=p, **ENDS))


def qwen2(p):
    return _language(t.Qwen2Config(**SMALL, num_key_value_heads=2, attention_dropout=p, **ENDS))


def qwen3(p):
    return _language(t.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, attention_dropout=p, **ENDS))


def qwen3_moe(p):
    return _language(t.Qwen3MoeConfig(**SMALL, num_key_value_heads=2, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, **ENDS))


def phi(p):
    return _language(t.PhiConfig(**SMALL, attention_dropout=p, resid_pdrop=p, embd_pdrop=p, **ENDS))


def phi3(p):
    return _language(t.Phi3Config(**SMALL, num_key_value_heads=2, attention_dropout=p, resid_pdrop=p, embd_pdrop=p, **ENDS))


def gemma(p):
    return _language(t.GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8, attention_dropout=p, **ENDS))


def gemma2(p):
    return _language(t.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4, attn_logit_softcapping=5.0, attention_dropout=p, **ENDS))


def gemma3(p):
    config = t.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=4, attention_dropout=p, **ENDS)
    return _language(config, t.Gemma3ForCausalLM)


def falcon(p):
    return _language(t.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=p, attention_dropout=p, **ENDS))


def falcon_alibi(p):
    return _language(t.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, multi_query=False, hidden_dropout=p, attention_dropout=p, **ENDS))


def stablelm(p):
    return _language(t.StableLmConfig(**SMALL, num_key_value_heads=2, attention_dropout=p, hidden_dropout=p, **ENDS))


def olmo(p):
    return _language(t.OlmoConfig(**SMALL, num_key_value_heads=2, attention_dropout=p, **ENDS))


def olmo2(p):
    return _language(t.Olmo2Config(**SMALL, num_key_value_heads=2, attention_dropout=p, **ENDS))


def cohere(p):
    return _language(t.CohereConfig(**SMALL, num_key_value_heads=2, attention_dropout=p, **ENDS))


def granite(p):
    return _language(t.GraniteConfig(**SMALL, num_key_value_heads=2, attention_dropout=p, **ENDS))


def mixtral(p):
    return _language(t.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, attention_dropout=p, **ENDS))


def mpt(p):
    config = t.MptConfig(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=32)
    return _language(config)


def mamba(p):
    return _language(t.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2, **ENDS))


def bert(p):
    return _language(t.BertConfig(**SMALL, hidden_dropout_prob=p, attention_probs_dropout_prob=p, **ENDS), t.BertForMaskedLM, mask=True)


def roberta(p):
    return _language(t.RobertaConfig(**SMALL, max_position_embeddings=32, hidden_dropout_prob=p, attention_probs_dropout_prob=p, **ENDS), t.RobertaForMaskedLM, mask=True)


def distilbert(p):
    return _language(t.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=48, dropout=p, attention_dropout=p), t.DistilBertForMaskedLM, mask=True)


def electra(p):
    config = t.ElectraConfig(**SMALL, embedding_size=16, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    return _language(config, t.ElectraForMaskedLM, mask=True)


def albert(p):
    config = t.AlbertConfig(**SMALL, embedding_size=16, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    return _language(config, t.AlbertForMaskedLM, mask=True)


def deberta_v2(p):
    config = t.DebertaV2Config(
        **SMALL, relative_attention=True, position_buckets=8, max_position_embeddings=32, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", share_att_key=True, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
    )
    return _language(config, t.DebertaV2ForMaskedLM, mask=True)


def mpnet(p):
    config = t.MPNetConfig(**SMALL, max_position_embeddings=32, hidden_dropout_prob=p, attention_probs_dropout_prob=p, **ENDS)
    return _language(config, t.MPNetForMaskedLM, mask=True)


def modernbert(p):
    config = t.ModernBertConfig(
        **SMALL, max_position_embeddings=32, local_attention=4, attention_dropout=p, embedding_dropout=p, mlp_dropout=p,
        cls_token_id=0, sep_token_id=1, **ENDS,
    )
    return _language(config, t.ModernBertForMaskedLM, mask=True)


def bert_classifier(p):
    config = t.BertConfig(**SMALL, hidden_dropout_prob=p, attention_probs_dropout_prob=p, num_labels=3, **ENDS)
    return t.BertForSequenceClassification(config), {"input_ids": tokens(), "labels": torch.tensor([0, 2])}


def bert_answers(p):
    config = t.BertConfig(**SMALL, hidden_dropout_prob=p, attention_probs_dropout_prob=p, **ENDS)
    inputs = {"input_ids": tokens(), "start_positions": torch.tensor([0, 2]), "end_positions": torch.tensor([3, 4])}
    return t.BertForQuestionAnswering(config), inputs


def t5(p):
    config = t.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0, dropout_rate=p)
    return _language(config, t.T5ForConditionalGeneration, mask=True)


def bart(p):
    config = t.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, dropout=p, attention_dropout=p, decoder_start_token_id=0, **ENDS,
    )
    return _language(config, t.BartForConditionalGeneration, mask=True)


def whisper(p):
    config = t.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16, max_target_positions=32, dropout=p,
        attention_dropout=p, decoder_start_token_id=0, **ENDS,
    )
    return t.WhisperForConditionalGeneration(config), {"input_features": torch.randn(BATCH, 8, 32), "labels": tokens()}


VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=5)


def vit(p):
    return _image(t.ViTConfig(**VISION, hidden_dropout_prob=p, attention_probs_dropout_prob=p), t.ViTForImageClassification)


def deit(p):
    return _image(t.DeiTConfig(**VISION, hidden_dropout_prob=p, attention_probs_dropout_prob=p), t.DeiTForImageClassification)


def beit(p):
    return _image(t.BeitConfig(**VISION, use_relative_position_bias=True, hidden_dropout_prob=p, attention_probs_dropout_prob=p), t.BeitForImageClassification)


def dinov2(p):
    config = t.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=5, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    return _image(config, t.Dinov2ForImageClassification)


def swin(p):
    config = t.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5, drop_path_rate=p,
        hidden_dropout_prob=p, attention_probs_dropout_prob=p,
    )
    return _image(config, t.SwinForImageClassification)


def clip(p):
    config = t.CLIPConfig(
        text_config=dict(SMALL, max_position_embeddings=32, attention_dropout=p, eos_token_id=VOCABULARY - 1),
        vision_config={k: v for k, v in VISION.items() if k != "num_labels"} | {"attention_dropout": p}, projection_dim=16,
    )
    return t.CLIPModel(config), {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


def siglip(p):
    config = t.SiglipConfig(
        text_config=dict(SMALL, max_position_embeddings=LENGTH), vision_config={k: v for k, v in VISION.items() if k != "num_labels"},
    )
    return t.SiglipModel(config), {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}


def resnet(p):
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5)
    return _image(config, t.ResNetForImageClassification)


def convnext(p):
    return _image(t.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, drop_path_rate=p, num_labels=5), t.ConvNextForImageClassification)


def mobilenet_v2(p):
    return _image(t.MobileNetV2Config(depth_multiplier=0.35, image_size=32, num_labels=5, classifier_dropout_prob=p), t.MobileNetV2ForImageClassification)


def efficientnet(p):
    config = t.EfficientNetConfig(image_size=64, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=64, dropout_rate=p, drop_connect_rate=p, num_labels=5)
    return _image(config, t.EfficientNetForImageClassification, 64)


def regnet(p):
    return _image(t.RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4, num_labels=5), t.RegNetForImageClassification)


def segformer(p):
    config = t.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5, hidden_dropout_prob=p,
        attention_probs_dropout_prob=p, drop_path_rate=p, classifier_dropout_prob=p,
    )
    return t.SegformerForSemanticSegmentation(config), {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH, 32, 32))}


def wav2vec2(p):
    config = t.Wav2Vec2Config(
        **SMALL, conv_dim=[8, 8], conv_stride=[5, 2], conv_kernel=[10, 3], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=p, attention_dropout=p, activation_dropout=p, feat_proj_dropout=p, final_dropout=p, layerdrop=0.0,
        mask_time_prob=0.0, ctc_loss_reduction="mean", pad_token_id=0,
    )
    return t.Wav2Vec2ForCTC(config), {"input_values": torch.randn(BATCH, 400), "labels": tokens(4)}


def hubert(p):
    config = t.HubertConfig(
        **SMALL, conv_dim=[8, 8], conv_stride=[5, 2], conv_kernel=[10, 3], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=p, attention_dropout=p, activation_dropout=p, feat_proj_dropout=p, final_dropout=p, layerdrop=0.0,
        mask_time_prob=0.0, num_labels=5,
    )
    return t.HubertForSequenceClassification(config), {"input_values": torch.randn(BATCH, 400), "labels": torch.tensor([1, 2])}


MODELS = {
    f.__name__: f
    for f in (
        gpt2, gpt_neo, gpt_neox, gptj, opt, bloom, llama, mistral, qwen2, qwen3, qwen3_moe, phi, phi3, gemma, gemma2, gemma3, falcon,
        falcon_alibi, stablelm, olmo, olmo2, cohere, granite, mixtral, mpt, mamba, bert, bert_classifier, bert_answers, roberta,
        distilbert, electra, albert, deberta_v2, mpnet, modernbert, t5, bart, whisper, vit, deit, beit, dinov2, swin, clip, siglip,
        resnet, convnext, mobilenet_v2, efficientnet, regnet, segformer, wav2vec2, hubert,
    )
}


def prepare(name: str, dropout: float = 0.0):
    """(model in training mode, inputs), the same at each call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name](dropout)
    with torch.no_grad():  # weights large enough that attention and gates are far from uniform
        for parameter in model.parameters():
            if parameter.dim() > 1 and float(parameter.std()) < 0.03:
                parameter.mul_(5)
    return model.train(), inputs


def loss_and_gradients(model, call, inputs):
    model.zero_grad()
    loss = call(**inputs).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(ours: dict, eager: dict) -> tuple[float, str]:
    """The largest distance of a gradient relative to the largest element of all, and whose it is."""
    assert ours.keys() == eager.keys(), sorted(set(ours) ^ set(eager))
    top = max(float(g.abs().max()) for g in eager.values() if g.numel())
    worst = (0.0, "")
    for key, gradient in eager.items():
        if not torch.equal(gradient.isfinite(), ours[key].isfinite()):
            return float("inf"), key
        if gradient.numel():
            scale = max(float(gradient.abs().max()), 1e-3 * top)
            worst = max(worst, (float((ours[key] - gradient).abs().max()) / scale, key))
    return worst


class Compiled:
    """A model through the backend, with the reports of its graphs."""

    def __init__(self, model):
        from fulmen import torch_backend

        self.listening = torch_backend.listen()
        self.reports = self.listening.__enter__()
        self.call = torch.compile(model, backend=torch_backend.fulmen_backend)

    def close(self):
        self.listening.__exit__(None, None, None)

    def coverage(self) -> float:
        calls = sum(r.recorded.node_count for r in self.reports)
        return 1.0 - sum(len(r.fallbacks) for r in self.reports) / calls if calls else 0.0

    def fallbacks(self) -> list[tuple]:
        return sorted({(f.call, f.reason) for r in self.reports for f in r.fallbacks})


def run(name: str, parts) -> dict:
    row = {"name": name}
    if "fp32" in parts:
        model, inputs = prepare(name)
        eager = copy.deepcopy(model)
        compiled = Compiled(model)
        begin = time.monotonic()
        ours = loss_and_gradients(model, compiled.call, inputs)
        row["first_s"] = time.monotonic() - begin
        compiled.close()
        theirs = loss_and_gradients(eager, eager, inputs)
        row.update(
            coverage=compiled.coverage(), fallbacks=compiled.fallbacks(), graphs=len(compiled.reports),
            calls=sum(r.recorded.node_count for r in compiled.reports), loss=abs(ours[0] - theirs[0]) / abs(theirs[0]),
            gradient=distance(ours[1], theirs[1]),
        )
        for (key, a), (_, b) in zip(model.named_buffers(), eager.named_buffers()):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m: f"buffer {key}: {m}")
    if "bf16" in parts:
        model, inputs = prepare(name)
        eager, exact = copy.deepcopy(model), copy.deepcopy(model)
        right = loss_and_gradients(exact, exact, inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = loss_and_gradients(model, torch.compile(model, backend="fulmen"), inputs)
            theirs = loss_and_gradients(eager, eager, inputs)
        norm = lambda a: sum(float((a[1][k] - right[1][k]).double().square().sum()) for k in right[1]) ** 0.5  # noqa: E731
        row["bf16"] = (abs(ours[0] - right[0]) / abs(right[0]), abs(theirs[0] - right[0]) / abs(right[0]), norm(ours), norm(theirs))
        assert ours[1].keys() == theirs[1].keys()
    if "dropout" in parts:
        model, inputs = prepare(name, 0.2)
        call = torch.compile(model, backend="fulmen")
        found = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            found.append(loss_and_gradients(model, call, inputs))
        row["seeded"] = found[0][0] == found[1][0]
        row["random"] = found[0][0] != found[2][0]
        row["dropout_finite"] = all(bool(g.isfinite().all()) for g in found[0][1].values())
    if "eval" in parts:
        model, inputs = prepare(name, 0.2)
        model.eval()
        call = torch.compile(model, backend="fulmen")
        with torch.no_grad():
            ours, theirs = call(**inputs).loss.item(), model(**inputs).loss.item()
        row["eval"] = abs(ours - theirs) / abs(theirs)
    return row


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--markdown", action="store_true")
    arguments.add_argument("--only", action="append", choices=("fp32", "bf16", "dropout", "eval"))
    chosen = arguments.parse_args()
    warnings.simplefilter("ignore")
    t.logging.set_verbosity_error()
    failed = 0
    for name in chosen.names or MODELS:
        try:
            row = run(name, chosen.only or ("fp32", "bf16", "dropout", "eval"))
        except Exception:  # noqa: BLE001  one model's failure is a row, not the end
            failed += 1
            print(f"{name:14s} FAILED\n{traceback.format_exc(limit=-6)}", flush=True)
            continue
        if chosen.markdown:
            left = "; ".join(f"`{call}`: {reason}" for call, reason in row["fallbacks"]) or "nothing"
            print(f"| {name} | {row['calls']} | {row['coverage']:.3f} | {row['loss']:.0e} | {row['gradient'][0]:.0e} | {left} |", flush=True)
            continue
        print(f"{name:14s} " + " ".join(f"{k}={_text(v)}" for k, v in row.items() if k not in ("name", "fallbacks")), flush=True)
        for call, reason in row.get("fallbacks", ()):
            print(f"    {call}: {reason}", flush=True)
    return 1 if failed else 0


def _text(value) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_text, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
