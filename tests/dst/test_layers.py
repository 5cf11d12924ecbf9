"""Which layers become sparse: Linear, Conv, attention, tied and named weights, patterns."""

import pytest
import torch
from torch import nn

import sparsight as sp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x + self.down(self.up(x).relu()))


def names(model, **kwargs):
    return list(sp.sparsify(model, density=0.5, method=sp.static(), **kwargs).layers)


def test_linear_conv_and_attention_are_sparse_and_the_rest_is_not():
    assert names(Net()) == ["attention.in_proj_weight", "attention.out_proj", "up", "down", "head"]
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv3d(4, 4, 3), nn.BatchNorm2d(4))
    assert names(model) == ["0", "1", "2"]


def test_attention_with_separate_projections():
    model = nn.MultiheadAttention(16, 2, kdim=8, vdim=12)
    assert names(model) == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj"]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"include": ["up", "down"]}, ["up", "down"]),
        ({"include": ["attention*"]}, ["attention.in_proj_weight", "attention.out_proj"]),
        ({"include": ["*"], "keep_dense": ["head", "att*"]}, ["up", "down"]),
        ({"include": ["embed"]}, ["embed"]),
        (
            {"include": ["*", "embed"]},
            ["embed", "attention.in_proj_weight", "attention.out_proj", "up", "down", "head"],
        ),
        ({"include": ["up.weight", "up.bias"]}, ["up", "up.bias"]),
        ({"include": ["norm.weight"]}, ["norm"]),
    ],
)
def test_patterns(kwargs, expected):
    assert names(Net(), **kwargs) == expected


def test_a_weight_tied_to_an_embedding_stays_dense_unless_asked():
    model = Net()
    model.head.weight = model.embed.weight
    assert names(model) == ["attention.in_proj_weight", "attention.out_proj", "up", "down"]
    assert names(model, include=["head"]) == ["embed"]


def test_tied_weights_are_one_topology():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sp.sparsify(
        model, optimizer, density=0.25, method=sp.rigl(steps=20, every=4), distribution={"a": 0.25}
    )
    assert list(sparse.layers) == ["a"]
    for step in range(20):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        assert int((model.b.weight != 0).sum()) <= 16
        assert not model.b.weight[~sparse.topologies["a"].mask()].any()
    assert sparse.updates >= 2
    # Both uses cost: 2 places × 3 rows × 16 weights × 2.
    assert sparse.flops(torch.zeros(3, 8)).forward == 2 * 3 * 16 * 2


@pytest.mark.parametrize("method", [sp.rigl(steps=30, every=5), sp.set_(every=5)], ids=["rigl", "set"])
def test_every_kind_of_layer_trains_sparse(method):
    """Attention with its packed projection, embeddings, convolutions of every dimension."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sparse = sp.sparsify(model, optimizer, density=0.3, method=method, include=["*", "embed"])
    tokens = torch.randint(20, (8, 6))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for layer in sparse.layers.values():
            assert not layer.weight.param[~layer.topology.mask()].any()
    assert losses[-1] < losses[0] - 0.5
    assert sparse.updates >= 4


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_every_dimension(conv, groups):
    torch.manual_seed(0)
    model = conv(4, 6, 3, groups=groups)
    dims = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[conv]
    x = torch.randn(2, 4, *[5] * dims)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sparse = sp.sparsify(
        model, optimizer, density=0.25, method=sp.rigl(steps=20, every=5), distribution={"*": 0.25}
    )
    first = sparse.topologies["weight"]
    for _ in range(12):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    now = sparse.topologies["weight"]
    assert now.nnz == first.nnz == round(0.25 * model.weight.numel())
    assert not now.same_as(first)
    masked = conv(4, 6, 3, groups=groups)
    masked.load_state_dict(model.state_dict())
    with torch.no_grad():
        masked.weight *= now.mask()
    assert torch.equal(model(x), masked(x))


def test_a_channels_last_convolution_keeps_its_layout():
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparse = sp.sparsify(
        model, optimizer, density=0.2, method=sp.rigl(steps=20, every=3), distribution={"*": 0.2}
    )
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    for _ in range(12):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        assert not model.weight[~sparse.topologies["weight"].mask()].any()
    assert sparse.updates == 3
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
