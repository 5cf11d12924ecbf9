"""Upcycling keeps the dense model's output; mixture of depths sends a share of the tokens through."""

import pytest
import torch
import transformers
from torch import nn

import sparsight as sp

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def hf(name):
    torch.manual_seed(0)
    common = {"vocab_size": 40, "attn_implementation": "eager"}
    if name == "llama":
        config = transformers.LlamaConfig(**TINY, num_key_value_heads=2, **common)
        return transformers.LlamaForCausalLM(config), "model.layers.0.mlp"
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, **common)
        return transformers.GPT2LMHeadModel(config), "transformer.h.0.mlp"
    if name == "gpt_neox":
        config = transformers.GPTNeoXConfig(**TINY, **common)
        return transformers.GPTNeoXForCausalLM(config), "gpt_neox.layers.0.mlp"
    config = transformers.T5Config(
        d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8, vocab_size=40, feed_forward_proj="gated-gelu"
    )
    return transformers.T5EncoderModel(config), "encoder.block.0.layer.1.DenseReluDense"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "t5"])
def test_hugging_face_blocks_give_the_dense_output(name):
    model, first = hf(name)
    model.eval()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before = model(input_ids=ids)[0]
        names = sp.upcycle(model, experts=4, k=2)
        after = model(input_ids=ids)[0]
    assert len(names) == 2
    assert names[0] == first
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    layer = model.get_submodule(first)
    assert isinstance(layer.experts[0], (sp.GLU, sp.MLP))


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_transformer_layers_give_the_dense_output(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 7, 16)
    before, calm = model(x), model.eval()(x)
    assert sp.upcycle(model, experts=3, k=3) == ["layers.0", "layers.1"]
    torch.testing.assert_close(model(x), calm)
    model.train()
    torch.testing.assert_close(model(x), before)
    model(x).sum().backward()
    assert model.layers[0].linear1.experts[0].up.weight.grad.any()


def test_full_softmax_gates_need_no_normalising():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    x = torch.randn(4, 8)
    before = model(x)
    sp.upcycle(model, experts=4, k=4, estimator=sp.GatingOnly())
    torch.testing.assert_close(model(x), before)


def test_noise_leaves_the_first_copy_and_unknown_blocks_are_copied_whole():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 24), nn.Linear(24, 8)

        def forward(self, x):
            return self.b(torch.sin(self.a(x)))

    torch.manual_seed(0)
    model = nn.ModuleDict({"ff": Odd()})
    weight = model["ff"].a.weight.detach().clone()
    assert sp.upcycle(model, match="ff", experts=3, noise=0.1) == ["ff"]
    moe = model["ff"]
    assert torch.equal(moe.experts[0].a.weight, weight)
    off = float((moe.experts[1].a.weight.detach() - weight).std() / weight.std())
    assert off == pytest.approx(0.1, abs=0.03)
    with pytest.raises(ValueError, match=r"finds no module; did you mean"):
        sp.upcycle(model, match="fff*", experts=3)
    with pytest.raises(ValueError, match="no feed-forward block"):
        sp.upcycle(nn.Sequential(nn.Linear(2, 2)), experts=3)


def test_upcycling_a_causal_model_with_expert_choice_warns():
    model, _ = hf("llama")
    with pytest.warns(UserWarning, match="depend on later tokens"):
        sp.upcycle(model, experts=4, k=1, router=sp.routers.expert_choice())


# -- mixture of depths ---------------------------------------------------------------------------------


class Twice(nn.Module):
    """A block with its residual inside: x → x + (x + c)."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))
        self.seen = []

    def forward(self, x, positions=None):
        self.seen.append((x.shape, positions))
        return x + x + self.shift


def test_depth_sends_the_share_and_the_rest_passes_by():
    torch.manual_seed(0)
    block = Twice()
    layer = sp.MixtureOfDepths(block, 8, capacity=0.25, gathered=("positions",))
    x = torch.randn(3, 16, 8)
    positions = torch.arange(16).expand(3, 16)
    y = layer(x, positions=positions)
    logit = layer.router(x).squeeze(-1)
    for i in range(3):
        chosen = logit[i].topk(4).indices.sort().values
        rest = [t for t in range(16) if t not in chosen.tolist()]
        assert torch.equal(y[i, rest], x[i, rest])
        expected = x[i, chosen] + logit[i, chosen, None] * (x[i, chosen] + 1)
        torch.testing.assert_close(y[i, chosen], expected)
        assert torch.equal(block.seen[-1][1][i], chosen)
    assert block.seen[-1][0] == (3, 4, 8)
    y.sum().backward()
    assert layer.router.weight.grad.any()


def test_depth_in_a_causal_model_learns_to_decide_token_by_token():
    torch.manual_seed(0)
    layer = sp.MixtureOfDepths(Twice(), 8, capacity=0.25, causal=True, gate="sigmoid", predict=1.0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    sp.follow_steps(layer, optimizer)
    x = torch.randn(8, 32, 8)
    x[..., 0] = 1.0
    for _ in range(150):
        layer(x)
        loss = sp.balance_loss(layer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0.15 < (layer.router(x) > 0).float().mean() < 0.35
    layer.eval()
    with torch.no_grad():
        whole = layer(x)
        prefix = layer(x[:, :20])
    torch.testing.assert_close(prefix, whole[:, :20])


def test_depth_never_chooses_padding_and_refuses_nonsense():
    torch.manual_seed(0)
    layer = sp.MixtureOfDepths(Twice(), 8, capacity=0.5)
    x = torch.randn(2, 8, 8)
    mask = torch.tensor([[True] * 3 + [False] * 5, [True] * 8])
    y = layer(x, mask=mask)
    assert torch.equal(y[0, 3:], x[0, 3:])
    assert layer.routing.tokens == 11
    with pytest.raises(ValueError, match="share of the tokens"):
        sp.MixtureOfDepths(Twice(), 8, capacity=0.0)
    with pytest.raises(ValueError, match="pass dim"):
        sp.MixtureOfDepths(Twice())
    with pytest.raises(ValueError, match="batch, sequence"):
        layer(x[0])
