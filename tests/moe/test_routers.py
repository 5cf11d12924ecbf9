"""What each router promises."""

import pytest
import torch

import sparsight as sp
from sparsight.moe import gates, routers, selections


def test_topk_sigmoid_normalises_without_a_floor():
    z = torch.full((1, 4), -200.0, dtype=torch.float64) + torch.arange(4)
    w = sp.GatingOnly(normalise=True)(z, 2, score=gates.sigmoid).weight
    assert w.sum().item() == pytest.approx(1)
    assert torch.isfinite(w).all()


def test_bias_moves_the_selection_and_not_the_weight():
    z = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 10.0])
    routing = sp.GatingOnly()(z, 1, bias=bias)
    assert routing.expert.tolist() == [2]
    assert routing.weight.item() == pytest.approx(z.softmax(1)[0, 2].item())


def test_expert_choice_loads_are_even_and_unserved_tokens_are_reported():
    torch.manual_seed(0)
    z = torch.randn(32, 4) * 3
    routing = selections.ByExperts()(z, 1, bias=None, training=True)
    assert routing.load().tolist() == [8, 8, 8, 8]
    served = len(set(routing.token.tolist()))
    assert routing.unserved() == 32 - served > 0


def test_gshard_keeps_the_second_in_proportion_and_renormalises():
    torch.manual_seed(0)
    z = torch.tensor([[2.0, 1.0, -9.0]]).repeat(20_000, 1)
    gates_ = z[0, :2].softmax(0)
    routing = selections.RandomSecond()(z, 2, bias=None, training=True)
    seconds = int((routing.expert == 1).sum())
    assert seconds / 20_000 == pytest.approx(2 * gates_[1].item(), abs=0.02)
    total = torch.zeros(20_000).index_add(0, routing.token, routing.weight)
    torch.testing.assert_close(total, torch.ones(20_000))
    assert routing.load().tolist() == [20_000, 0, 0]  # first choices


def test_sinkhorn_is_more_even_than_argmax_in_training_only():
    torch.manual_seed(0)
    z = torch.randn(256, 8) + torch.arange(8) / 2
    even = selections.BySinkhorn()(z, 1, bias=None, training=True).load()
    greedy = selections.BySinkhorn()(z, 1, bias=None, training=False).load()
    assert even.max() < 0.6 * greedy.max()
    assert greedy.tolist() == torch.bincount(z.argmax(1), minlength=8).tolist()


def test_hash_depends_on_the_id_alone_and_spreads():
    moe = sp.MoE(8, 8, experts=8, router=routers.hashed())
    ids = torch.arange(4096)
    moe(torch.randn(4096, 8), ids=ids)
    first = moe.routing.expert
    moe(torch.randn(4096, 8), ids=ids)
    assert torch.equal(moe.routing.expert, first)
    assert moe.routing.load().min() > 400
    assert set(moe.routing.weight.tolist()) == {1.0}


def test_relu_reaches_its_target_sparsity():
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=8, k=2, router=routers.relu(first=1e-4))
    optimizer = torch.optim.Adam(moe.parameters(), lr=1e-2)
    sp.follow_steps(moe, optimizer)
    x = torch.randn(128, 8)
    x[:, 0] = 2.0  # without a direction that all tokens share, half of all linear logits stay positive
    for _ in range(150):
        loss = (moe(x) - x).square().mean() + sp.balance_loss(moe)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = moe.routing.token.numel() / 128
    assert 1.3 < mean < 2.7


def test_jitter_is_on_the_input_of_the_router_in_training_only():
    torch.manual_seed(0)
    moe = sp.MoE(8, 8, experts=4, router=routers.softmax(jitter=0.3))
    x = torch.randn(16, 8)
    moe(x)
    assert not torch.allclose(moe.routing.logit, moe.router(x))
    moe.eval()(x)
    assert torch.equal(moe.routing.logit, moe.router(x))


def test_masked_softmax_rules_differ_as_paper_and_code_do():
    z = torch.tensor([[1.0, 0.85, 0.81, -0.5]])
    original = z.clone()
    paper, code = sp.Mask(0.1, "paper").drops(z), sp.Mask(0.1, "code").drops(z)
    assert paper.tolist() == [[False, False, True, True]]  # 0.19 > 0.1·1.81
    assert code.tolist() == [[False, False, False, True]]  # 0.19/1 ≤ 0.2
    assert torch.equal(z, original)


def test_singletons_are_recorded():
    z = torch.tensor([[5.0, 0.0], [1.0, 1.0]])
    assert int(sp.SparseMixer()(z, 1).alone) == 1


def test_cosine_logits_ignore_the_length_of_the_input():
    moe = sp.MoE(8, 8, experts=4, router=routers.cosine())
    x = torch.randn(5, 8)
    torch.testing.assert_close(moe.router(x), moe.router(100 * x))


def test_sampling_without_replacement_never_repeats_an_expert():
    torch.manual_seed(0)
    z = torch.randn(500, 4)
    for estimator in (sp.SparseMixer(), sp.SparseMixer2(), sp.heun3):
        chosen = estimator(z, 4).expert.view(4, -1)
        assert (chosen.sort(0).values == torch.arange(4)[:, None]).all()
