"""The MoE blocks of transformers: what is recorded against what the experts were really given, and against a
count by hand from the router's input."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import sparsight as sp
from tests.dynamics.common import entropy, recorded, softmax

EXPERTS = 8
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "pad_token_id": 0, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
}  # fmt: skip
LATENT = {
    "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
    "first_k_dense_replace": 0, "num_key_value_heads": 4,
}  # fmt: skip
MORE: dict[str, dict[str, object]] = {
    "deepseek_v3": LATENT,
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "glm4_moe": {"n_routed_experts": EXPERTS, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 0,
              "expert_layer_period": 1, "expert_layer_offset": 0, "mamba_d_state": 4},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
                   "shared_expert_intermediate_size": 16},
    "gpt_oss": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8},
    "minimax_m2": {"head_dim": 8},
    "deepseek_v4": {},
}  # fmt: skip
FAMILIES = [
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "phimoe", "deepseek_v3", "deepseek_v2", "gpt_oss",
    "granitemoe", "jamba", "qwen3_next", "glm4_moe", "minimax_m2",
]  # fmt: skip


def model_of(family: str, **more: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **MORE.get(family, {}), **more})
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    for name, param in model.named_parameters():
        if any(part in name for part in ("gate.weight", "router.weight", "router.layer.weight")):
            nn.init.normal_(param)  # a router that tells its tokens apart
    return model


def text(batch: int = 3, length: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask: the first sequence has four tokens of padding, on the left."""
    ids = torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids.masked_fill(mask == 0, 0), mask


class Spy:
    """Listens at a block: what its router was given, and which experts were then told to run."""

    def __init__(self, block: nn.Module) -> None:
        router = block.gate if hasattr(block, "gate") else block.router
        self.router = router
        router.register_forward_pre_hook(self._asked)
        block.experts.register_forward_pre_hook(self._told, with_kwargs=True)

    def _asked(self, module, args):
        self.given = args[0].detach().reshape(-1, args[0].shape[-1]).clone()

    def _told(self, module, args, kwargs):
        index = [a for a in (*args, *kwargs.values()) if not a.is_floating_point()]
        self.index = index[0].clone() if index else None


def step(model, optimizer, ids, mask):
    optimizer.zero_grad()
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    norms = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return norms


def counts(index: torch.Tensor) -> list[float]:
    return np.bincount(index.reshape(-1).numpy(), minlength=EXPERTS).astype(float).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_of_the_tokens_the_experts_were_given_and_norms_are_autograds(family: str, tmp_path: Path):
    model = model_of(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids, mask = text()
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        route = watch.routes[0]
        assert (route.experts, route.k, route.about["estimator"]) == (EXPERTS, 2, "hugging face")
        assert len(watch.routes) == 2
        spy = Spy(model.get_submodule(route.name))
        grads = step(model, optimizer, ids, mask)
        history = recorded(watch)
    real = mask.reshape(-1).bool()
    index = spy.index.reshape(real.numel(), -1)[real]
    assert history.get("moe/tokens_per_expert", route.name).last.tolist() == counts(index)
    assert sum(counts(index)) == 2 * 26
    fused = [g for name, g in grads.items() if name.startswith(f"{route.name}.experts.")]
    by_hand = [sum(float(g[e].double().square().sum()) for g in fused) ** 0.5 for e in range(EXPERTS)]
    assert np.allclose(history.get("moe/grad_norm", route.name).last, by_hand, rtol=1e-4)
    router = [
        g for name, g in grads.items() if name.startswith((f"{route.name}.gate.", f"{route.name}.router."))
    ]
    norm = sum(float(g.double().square().sum()) for g in router) ** 0.5
    assert np.isclose(history.get("moe/router_grad_norm", route.name).last, norm, rtol=1e-4)
    assert len(history.get("moe/output_similarity", route.name)) == 1


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


SIGMOID = ("deepseek_v3", "glm4_moe", "minimax_m2")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "phimoe"])
def test_what_the_router_thinks_is_what_its_matrix_says_by_hand(family: str, tmp_path: Path):
    model = model_of(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids, mask = text()
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        route = watch.routes[-1]
        spy = Spy(model.get_submodule(route.name))
        matrix = spy.router.weight.detach().numpy().astype(np.float64)
        bias = getattr(spy.router, "bias", None)
        offset = 0 if bias is None else bias.detach().numpy().astype(np.float64)
        step(model, optimizer, ids, mask)
        history = recorded(watch)
    logits = spy.given[mask.reshape(-1).bool()].numpy().astype(np.float64) @ matrix.T + offset
    scores = sigmoid(logits) if family in SIGMOID else softmax(logits)
    p = scores / scores.sum(-1, keepdims=True)
    read = {name: history.get(f"moe/{name}", route.name).last for name in (
        "router_entropy", "gate_top1_prob", "routing_mi", "z_loss")}  # fmt: skip
    assert np.isclose(read["router_entropy"], entropy(p).mean() / np.log(EXPERTS), rtol=1e-4)
    assert np.isclose(read["gate_top1_prob"], p.max(-1).mean(), rtol=1e-4)
    assert np.isclose(read["routing_mi"], entropy(p.mean(0)) - entropy(p).mean(), atol=1e-5)
    assert np.isclose(read["z_loss"], (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-3)


def test_deepseeks_bias_moves_the_counts_and_not_the_probabilities(tmp_path: Path):
    model = model_of("deepseek_v3", n_group=1)
    for block in (layer.mlp for layer in model.model.layers):
        block.gate.e_score_correction_bias[5] = 10.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids, mask = text()
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        step(model, optimizer, ids, mask)
        history = recorded(watch)
    load = history.get("moe/tokens_per_expert", watch.routes[0].name).last
    assert load[5] == 26  # every token, though the logits want others
    assert load.sum() == 52
    assert history.get("moe/gate_top1_prob", watch.routes[0].name).last < 0.5


def switch(**more: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_sparse_encoder_layers=1,
        num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=4, num_experts=EXPERTS,
        decoder_start_token_id=0, pad_token_id=0, **more,
    )  # fmt: skip
    model = transformers.SwitchTransformersForConditionalGeneration(config).train()
    for name, param in model.named_parameters():
        if "classifier" in name:
            nn.init.normal_(param)
    return model


def test_switch_counts_encoder_and_decoder_apart_each_without_its_own_padding(tmp_path: Path):
    model = switch(expert_capacity=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids, mask = text()
    out_ids, out_mask = ids.flip(0), mask.flip(0).clone()
    out_mask[1, 7:] = 0
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        places = [route.name for route in watch.routes]
        assert [name.split(".")[0] for name in places] == ["encoder", "decoder"]
        spies = {name: Spy(model.get_submodule(name)) for name in places}
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=out_ids, decoder_attention_mask=out_mask).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        history = recorded(watch)
    for name in places:
        shown = (mask if name.startswith("encoder") else out_mask).reshape(-1).bool()
        logits = spies[name].given @ model_before(watch, name, spies)
        wanted = logits.argmax(-1)[shown]
        assert history.get("moe/tokens_per_expert", name).last.tolist() == counts(wanted)
        served = spies[name].index.reshape(-1, EXPERTS)[shown]
        assert history.get("moe/drop_rate", name).last == pytest.approx(1 - served.sum() / len(wanted))
        assert history.get("moe/drop_rate", name).last > 0
        norms = [
            sum(float(g.square().sum()) for key, g in grads.items() if f"{name}.experts.expert_{e}." in key)
            ** 0.5
            for e in range(EXPERTS)
        ]
        assert np.allclose(history.get("moe/grad_norm", name).last, norms, rtol=1e-4)


def model_before(watch: sp.Watch, name: str, spies: dict[str, Spy]) -> torch.Tensor:
    """The router's matrix as the forward pass saw it: one step of SGD back."""
    weight = spies[name].router.classifier.weight
    return (weight + 0.01 * weight.grad).detach().T


def test_a_decoder_without_a_mask_of_its_own_is_not_given_the_encoders(tmp_path: Path):
    model = switch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids, mask = text()
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        optimizer.step()
        history = recorded(watch)
    total = {r.name: history.get("moe/tokens_per_expert", r.name).last.sum() for r in watch.routes}
    assert [total[name] for name in total if name.startswith("encoder")] == [26]
    assert [total[name] for name in total if name.startswith("decoder")] == [30]


def test_other_shapes_of_router(tmp_path: Path):
    """DBRX returns logits alone, Llama 4 scores with zeros, JetMoE its tokens sorted by expert:
    each against the k largest of its matrix, by hand."""
    dbrx = transformers.DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": EXPERTS, "moe_top_k": 2, "hidden_size": 32},
    )  # fmt: skip
    torch.manual_seed(0)
    models = {
        "dbrx": transformers.DbrxForCausalLM(dbrx).train(),
        "llama4": model_of("llama4_text", head_dim=8),
        "jetmoe": model_of("jetmoe", kv_channels=8, num_key_value_heads=2),
    }
    ids, mask = text()
    for family, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with sp.watch(model, optimizer, tmp_path / family, every=1) as watch:
            route = next(r for r in watch.routes if "attn" not in r.name and "attention" not in r.name)
            given: list[torch.Tensor] = []
            handle = route.module.register_forward_pre_hook(lambda m, a, given=given: given.append(a[0]))
            grads = step(model, optimizer, ids, mask)
            handle.remove()
            history = recorded(watch)
        matrix = next(p for p in route.module.parameters() if p.shape[0] == EXPERTS)
        top = (given[0].reshape(-1, 32) @ matrix.T).topk(2).indices[mask.reshape(-1).bool()]
        assert history.get("moe/tokens_per_expert", route.name).last.tolist() == counts(top), family
        owned = [g for name, g in grads.items() if name.startswith(f"{route.name}.") and g.dim() > 1]
        owned = [g for g in owned if g.shape[0] % EXPERTS == 0 and g.shape != matrix.shape]
        if family == "llama4":
            owned = [g for g in owned if g.dim() == 3]
        norms = [
            sum(float(g.reshape(EXPERTS, -1)[e].square().sum()) for g in owned) ** 0.5 for e in range(EXPERTS)
        ]
        assert np.allclose(history.get("moe/grad_norm", route.name).last, norms, rtol=1e-4), family


def test_gradient_checkpointing_counts_once_and_the_same(tmp_path: Path):
    seen = {}
    ids, mask = text()
    for again in (False, True):
        model = model_of("mixtral")
        if again:
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with sp.watch(model, optimizer, tmp_path / str(again), every=2) as watch:
            for _ in range(2):
                step(model, optimizer, ids, mask)
            seen[again] = recorded(watch).get("moe/tokens_per_expert", watch.routes[0].name).values
    assert seen[True].sum() == 2 * 2 * 26
    assert np.array_equal(seen[True], seen[False])


def test_evaluation_is_not_counted_and_a_frozen_router_in_eval_neither(tmp_path: Path):
    model = model_of("olmoe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids, mask = text()
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        model.eval()
        model(input_ids=ids, attention_mask=mask)
        model.train()
        step(model, optimizer, ids, mask)
        assert recorded(watch).get("moe/tokens_per_expert", watch.routes[0].name).last.sum() == 52


def test_a_watched_model_can_be_copied_and_saved_and_the_copy_is_not_watched(tmp_path: Path):
    model = model_of("qwen3_moe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids, mask = text()
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        twin(input_ids=ids, attention_mask=mask)
        loaded(input_ids=ids, attention_mask=mask)
        step(model, optimizer, ids, mask)
        assert recorded(watch).get("moe/tokens_per_expert", watch.routes[0].name).last.sum() == 52


def test_training_is_bit_identical_with_and_without_a_watch(tmp_path: Path):
    ends = []
    ids, mask = text()
    for watched in (False, True):
        model = model_of("phimoe")  # samples its experts
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(5)
        if watched:
            with sp.watch(model, optimizer, tmp_path / "run", every=2):
                for _ in range(4):
                    step(model, optimizer, ids, mask)
        else:
            for _ in range(4):
                step(model, optimizer, ids, mask)
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*ends)


def test_a_router_that_is_not_understood_is_named_once(tmp_path: Path):
    model = model_of("mixtral")
    gate = model.model.layers[0].mlp.gate
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        route = watch.routes[0]
        with pytest.warns(UserWarning, match=r"layer 'model\.layers\.0\.mlp' \(MixtralTopKRouter\)"):
            route.see(gate, (), {}, {"logits": torch.zeros(2, 2)})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert route.see(gate, (), {}, "nothing") is None
