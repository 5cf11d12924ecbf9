import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparsight as sp
from sparsight.dst.distributions import apportion, total_budget

shapes = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 16), st.integers(1, 16), st.integers(1, 5), st.integers(1, 5)),
)
models = st.lists(shapes, min_size=1, max_size=8).map(lambda s: {f"l{i}": x for i, x in enumerate(s)})


@given(models, st.floats(1e-3, 1), st.sampled_from([sp.er(), sp.erk(), sp.uniform(first_dense=False)]))
def test_counts_sum_exactly_to_the_budget(sizes, density, distribution):
    budget = total_budget(sizes, density)
    if budget < len(sizes):
        with pytest.raises(ValueError, match="one a layer"):
            distribution(sizes, density)
        return
    counts = distribution(sizes, density)
    assert sum(counts.values()) == budget
    assert all(1 <= counts[name] <= math.prod(shape) for name, shape in sizes.items())


@given(models, st.floats(0.01, 0.99))
def test_erk_densities_are_proportional_below_one(sizes, density):
    """Checked backwards: every layer that is not dense has the same density ÷ (Σ dims / Π dims)."""
    budget = total_budget(sizes, density)
    if budget < 4 * len(sizes):
        return
    counts = sp.erk()(sizes, density)
    sizes_of = {n: math.prod(s) for n, s in sizes.items()}
    loose = [n for n in sizes if 3 < counts[n] < sizes_of[n]]
    scales = {n: counts[n] / sum(sizes[n]) for n in loose}
    for n in loose:
        for m in loose:
            # One weight of rounding either way.
            assert abs(scales[n] - scales[m]) <= 1 / sum(sizes[n]) + 1 / sum(sizes[m]) + 1e-9
        for m in sizes:
            if counts[m] == sizes_of[m] and sizes_of[m] > 3:
                # A dense layer deserved to be: at the common scale it would pass 1, or round to it.
                assert scales[n] * sum(sizes[m]) >= sizes_of[m] - 1 - sum(sizes[m]) / sum(sizes[n])


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0, 100), min_size=1, max_size=6),
    st.data(),
)
def test_apportion_is_exact_within_caps(shares, data):
    caps = {name: data.draw(st.integers(1, 200)) for name in shares}
    budget = data.draw(st.integers(len(shares), sum(caps.values())))
    counts = apportion(shares, budget, caps)
    assert sum(counts.values()) == budget
    assert all(1 <= counts[name] <= caps[name] for name in shares)


def test_uniform_keeps_the_first_layer_dense_and_the_others_at_the_density():
    sizes = {"first": (10, 10), "a": (20, 20), "b": (30, 10)}
    assert sp.uniform()(sizes, 0.1) == {"first": 100, "a": 40, "b": 30}
    assert sp.uniform(first_dense=False)(sizes, 0.1) == {"first": 10, "a": 40, "b": 30}
    with pytest.raises(ValueError, match="only \\['first'\\]"):
        sp.uniform()({"first": (10, 10)}, 0.1)


def test_er_leaves_the_kernel_out_and_erk_counts_it():
    sizes = {"conv": (64, 64, 3, 3), "fc": (64, 64)}
    er, erk = sp.er()(sizes, 0.1), sp.erk()(sizes, 0.1)
    assert er["conv"] / (64 * 64 * 9) == pytest.approx(er["fc"] / (64 * 64), abs=1e-3)
    ratio = (erk["conv"] / (64 * 64 * 9)) / (erk["fc"] / (64 * 64))
    assert ratio == pytest.approx((134 / (64 * 64 * 9)) / (128 / (64 * 64)), rel=1e-2)


def test_densities_by_name():
    sizes = {"enc.0": (10, 10), "enc.1": (10, 10), "head": (10, 10)}
    counts = sp.by_name({"enc.*": 0.5})(sizes, 0.2)
    assert counts == {"enc.0": 50, "enc.1": 50, "head": 20}
    with pytest.raises(ValueError, match=r"'enc.1' is named twice, by 'enc.\*' and 'enc.1'"):
        sp.by_name({"enc.*": 0.5, "enc.1": 0.1})(sizes, 0.2)
    with pytest.raises(ValueError, match="'dec' matches no layer"):
        sp.by_name({"dec": 0.5})(sizes, 0.2)
    with pytest.raises(ValueError, match=r"'head' must lie in \(0, 1\], got 1.5"):
        sp.by_name({"head": 1.5})(sizes, 0.2)


def resnet50() -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Shapes and output positions of ResNet-50's weights on 224×224 images, written from the paper."""
    shapes = {"conv1": (64, 3, 7, 7)}
    places = {"conv1": 112 * 112}
    channels = 64
    for stage, (width, blocks, side) in enumerate([(64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)]):
        for index in range(blocks):
            name = f"s{stage}b{index}"
            entering = 2 * side if index == 0 and stage > 0 else side  # the 3×3 has the stride
            shapes |= {
                f"{name}.reduce": (width, channels, 1, 1),
                f"{name}.conv": (width, width, 3, 3),
                f"{name}.expand": (4 * width, width, 1, 1),
            }
            places |= {f"{name}.reduce": entering**2, f"{name}.conv": side**2, f"{name}.expand": side**2}
            if index == 0:
                shapes[f"{name}.short"] = (4 * width, channels, 1, 1)
                places[f"{name}.short"] = side**2
            channels = 4 * width
    return shapes | {"fc": (1000, 2048)}, places | {"fc": 1}


@pytest.mark.parametrize(
    ("distribution", "density", "published", "ours"),
    [
        (sp.erk(), 0.2, 0.42, 0.4138),
        (sp.erk(), 0.1, 0.24, 0.2418),
        (sp.erk(), 0.05, 0.12, 0.1217),
        (sp.uniform(), 0.1, 0.13, 0.1260),
        (sp.er(), 0.1, None, 0.2571),
    ],
)
def test_resnet50_costs_what_the_rigl_paper_says(distribution, density, published, ours):
    """Evci et al. (2020), inference FLOPs relative to dense: two digits, and a count of more than weights.

    Ours are multiply-adds of weights alone, to four digits, so that a change of rounding shows.
    """
    shapes, places = resnet50()
    counts = distribution(shapes, density)
    dense = sum(math.prod(shapes[n]) * places[n] for n in shapes)
    sparse = sum(counts[n] * places[n] for n in shapes)
    assert sum(math.prod(s) for s in shapes.values()) == 25_502_912
    assert sparse / dense == pytest.approx(ours, abs=5e-5)
    if published is not None:
        assert sparse / dense == pytest.approx(published, abs=0.01)


def test_resnet50_er_densities():
    """ER differs from ERK only through the 3×3 and 7×7 kernels, which it does not thin out further."""
    shapes, _ = resnet50()
    er, erk = sp.er()(shapes, 0.1), sp.erk()(shapes, 0.1)
    assert sum(er.values()) == sum(erk.values()) == round(0.1 * 25_502_912)
    kernels = [n for n in shapes if n.endswith(".conv")]
    assert sum(er[n] for n in kernels) > 1.5 * sum(erk[n] for n in kernels)
