"""Figures by their content: the traces hold the numbers of the history, the texts are safe."""

import json

import numpy as np
import pytest

from sparsight.dynamics.history import History, collect
from sparsight.dynamics.records import Event, Record
from sparsight.report.figures import CHARTS, SECTIONS, available, cost, learning, look, paths, titled, weights
from sparsight.report.html import figure_json
from tests.report.stores import ACTION, FINDING, layers, records

EVIL = '<img src=x onerror="alert(1)">%{y}'


@pytest.fixture(scope="module")
def history() -> History:
    found = [r for step in range(10, 1001, 10) for r in records(step, 1000)]
    return collect(found, {"layers": layers(2, 2, 8)}, (FINDING, ACTION))


def chart(name: str):
    return next(c for c in CHARTS if c.id == name)


@pytest.mark.parametrize("c", CHARTS, ids=lambda c: c.id)
def test_every_chart_is_drawn_where_a_run_has_it_and_left_out_where_it_has_nothing(c, history):
    assert c.section in SECTIONS
    assert c.title
    assert c.note.endswith(".")
    assert c.figure(History({})) is None
    if c.id == "depth":  # no block of this run is skipped
        return
    figure = c.figure(history)
    assert figure.data
    assert c.id in {a.id for a in available(history.names(), any_event=True)}
    figure_json(titled(figure, c))


@pytest.mark.parametrize("c", CHARTS, ids=lambda c: c.id)
def test_charts_over_steps_share_their_axis_and_carry_the_markers(c, history):
    figure = c.figure(history)
    if figure is None or not c.over_steps:
        return
    assert list(figure.layout.xaxis.range) == pytest.approx([0, 1005])
    marked = {shape.x0 for shape in figure.layout.shapes if shape.yref == "paper"}
    assert marked >= {FINDING.step, ACTION.step}


def test_the_loss_is_the_series(history):
    figure = learning.loss(history)
    series = history.get("log/loss")
    assert figure.data[0].x.tolist() == series.steps.tolist()
    np.testing.assert_allclose(figure.data[0].y, series.values, rtol=1e-6)
    assert [a.text.split("</span> ")[1] for a in figure.layout.annotations] == ["loss"]


def test_losses_and_quality_go_apart():
    logged = ("loss", "valid_loss", "perplexity", "accuracy", "bleu")
    history = collect([Record(1, f"log/{name}", "", 0.5) for name in logged])
    assert [t.name for t in learning.loss(history).data] == ["loss", "valid_loss", "perplexity"]
    assert [t.name for t in learning.quality(history).data] == ["accuracy", "bleu"]


def test_a_loss_that_spans_decades_is_on_a_log_axis():
    history = collect([Record(s, "log/loss", "", 10.0 ** (-s / 10)) for s in range(1, 31)])
    assert learning.loss(history).layout.yaxis.type == "log"


def test_the_load_is_over_the_even_share_and_the_slider_goes_back(history):
    figure = paths.load(history)
    tokens = history.get(paths.TOKENS, "blocks.0.mlp").values
    expected = tokens * 8 / tokens.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(figure.data[0].z[0], expected[-1], rtol=1e-5)
    assert figure.data[0].z.shape == (2, 8)
    (slider,) = figure.layout.sliders
    assert slider.active == len(slider.steps) - 1 == 24
    assert (slider.steps[0].label, slider.steps[-1].label) == ("10", "1,000")
    first = np.array(slider.steps[0].args[0]["z"][0])
    np.testing.assert_allclose(first[0], expected[0], atol=1e-3)


def test_an_expert_that_gets_no_token_is_zero_and_a_layer_without_tokens_is_unknown():
    even = collect(
        [
            Record(1, paths.TOKENS, "a", np.array([0, 4, 4, 0], np.float32)),
            Record(1, paths.TOKENS, "b", np.zeros(2, np.float32)),
        ]
    )
    z = paths.load(even).data[0].z
    assert z[0].tolist() == [0, 2, 2, 0]
    assert np.isnan(z[1]).all()


def test_one_layer_over_time_is_the_layer_that_was_asked_for(history):
    figure = paths.load_layer(history, "blocks.1.mlp")
    expected = paths.relative_load(history.get(paths.TOKENS, "blocks.1.mlp"))
    np.testing.assert_allclose(figure.data[0].z, expected.T, rtol=1e-5)
    assert paths.load_layer(history, "no such layer").data[0].z.tolist() == (
        paths.load_layer(history, "blocks.0.mlp").data[0].z.tolist()
    )


def test_token_and_load_entropy_have_their_layers_behind_them(history):
    figure = paths.entropy(history)
    solid = {t.name: t for t in figure.data if t.opacity is None}
    assert list(solid) == ["token entropy", "load entropy"]
    np.testing.assert_allclose(solid["load entropy"].y, history.get("moe/load_entropy").values, rtol=1e-5)
    behind = [t.name for t in figure.data if t.opacity is not None]
    assert "load entropy: blocks.0.mlp" in behind


def test_density_and_itop_have_a_line_a_layer_and_the_whole_model(history):
    for name, figure in (("density", weights.density(history)), ("itop_rate", weights.itop(history))):
        assert [t.name for t in figure.data] == ["blocks.0.attn", "blocks.1.attn", "whole model"]
        np.testing.assert_allclose(
            figure.data[1].y, history.get(f"sparse/{name}", "blocks.1.attn").values, rtol=1e-5
        )


def test_survival_is_the_latest_reading_by_age(history):
    figure = weights.survival(history)
    expected = history.get("sparse/survival", "blocks.1.attn").values[-1]
    np.testing.assert_allclose(figure.data[1].y, expected, rtol=1e-6)
    assert figure.data[1].x.tolist() == [1, 2, 3, 4, 5]


def test_update_histograms_are_shares(history):
    figure = weights.updates(history)
    assert figure.data[0].type == "bar"
    np.testing.assert_allclose(figure.data[0].y, np.array([1, 0, 0, 1, 2, 3, 5, 8, 20, 60]) / 100)
    experts = paths.expert_updates(history)
    assert sum(experts.data[1].y[1:-1]) == pytest.approx(1)


def test_the_topology_has_the_grid_of_the_layer(history):
    figure = weights.topology(history, "blocks.1.attn")
    assert figure.data[0].z.shape == (16, 8)
    series = history.get(weights.MAP, "blocks.1.attn")
    np.testing.assert_allclose(figure.data[0].z.ravel(), series.values[-1], rtol=1e-6)
    assert figure.layout.yaxis.title.text == "outputs (128)"
    assert len(figure.layout.sliders[0].steps) == 25


@pytest.mark.parametrize("said", [None, [3, 3], ["a", "b"], "x", [0, 128], [-1, -128]])
def test_a_grid_that_the_run_does_not_tell_or_tells_wrong_is_made_up(said):
    meta = {"layers": [{"name": "a", "family": "sparse", "map": said}]}
    history = collect([Record(1, weights.MAP, "a", np.zeros(12, np.float32))], meta)
    assert weights.topology(history).data[0].z.shape == (3, 4)


def test_flops_so_far_are_the_sum_over_steps():
    ratios = [Record(s, "sparse/flops_ratio", "", v) for s, v in ((10, 1.0), (20, 0.5), (40, 0.2))]
    history = collect(ratios)
    # 10 steps at 1, 10 at 0.5, 20 at 0.2: 19 of 40 dense steps.
    assert cost.flops(history).data[1].y[-1] == pytest.approx(19 / 40)
    assert cost.spent(history.get("sparse/flops_ratio"), np.array([20, 50])).tolist() == [15.0, 21.0]


def test_many_layers_get_a_strip_and_few_get_labels():
    def drawn(count: int):
        return weights.churn(collect([Record(1, "sparse/churn", f"m.{i}.fc", i / 20) for i in range(count)]))

    assert len(drawn(5).layout.annotations) == 5
    (strip,) = drawn(12).layout.annotations
    assert strip.text.startswith("m.0 ")
    assert strip.text.endswith(" m.11")
    assert len({t.line.color for t in drawn(12).data}) == 12


def test_labels_at_the_ends_do_not_overlap():
    history = collect([Record(1, "sparse/density", f"layer{i}", 0.5 + i / 1000) for i in range(6)])
    figure = weights.density(history)
    low, high = figure.layout.yaxis.range
    height = figure.layout.height - 70
    places = sorted((a.y - low) / (high - low) * height + a.yshift for a in figure.layout.annotations)
    assert (np.diff(places) > 13.9).all()


def test_what_is_not_a_number_leaves_a_gap():
    history = collect([Record(s, "log/loss", "", float("nan") if s > 5 else 1.0) for s in range(10)])
    figure = learning.loss(history)
    assert np.isnan(figure.data[0].y[-1])
    json.dumps(figure_json(figure))


def test_all_text_from_a_store_is_escaped_in_every_chart():
    found = []
    for step in (10, 20):
        for r in records(step, 100):
            name = f"log/{EVIL}" if r.name == "log/accuracy" else r.name
            found.append(Record(step, name, f"{r.where}{EVIL}" if r.where else "", r.value))
    events = (
        Event(15, "finding", EVIL, "act", EVIL, EVIL * 3, {"onset": EVIL}),
        Event(16, "action", EVIL, EVIL, EVIL, EVIL),
    )
    history = collect(found, {"layers": EVIL}, events)
    for c in CHARTS:
        figure = c.figure(history)
        if figure is None:
            continue
        text = json.dumps(figure_json(titled(figure, c)))
        assert "<img" not in text, c.id
        # Nothing from the store stands in a template, where Plotly would read its braces.
        templates = [t.hovertemplate or "" for t in figure.data]
        assert not any("img" in t for t in templates), c.id


def test_colours_differ_and_themes_differ():
    assert len(set(look.PALETTE)) == 6
    light, dark = look.template(dark=False), look.template(dark=True)
    assert light.layout.font.color != dark.layout.font.color
    assert light.layout.paper_bgcolor == "rgba(0,0,0,0)"
