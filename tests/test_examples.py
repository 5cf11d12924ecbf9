"""Every script in examples/ is run, small, and has to print what it is there to show."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    def run(name: str, **arguments: object) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**arguments)
        return capsys.readouterr().out

    return run


def test_two_lines(printed):
    out = printed("01_two_lines", steps=150, width=64)
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", out)[1])
    assert accuracy > 50  # ten classes: chance is 10
    assert "of the sparse layers, step 150, 2 updates" in out


def test_choose_layers(printed):
    out = printed("02_choose_layers", width=8, density=0.25)
    rows = dict(re.findall(r"^(\S.*?)\s+density \S+   (.*)$", out, re.MULTILINE))
    assert len(rows) == 7
    assert "5:" not in rows["head kept dense"]
    assert "5:" not in rows["only the convolutions"]
    assert rows["uniform, all of them"] == "0: 54/216  2: 288/1152  5: 40/160"
    assert rows["uniform, first layer dense"] == "0: 216/216  2: 288/1152  5: 40/160"
    assert rows["by name"] == "0: 216/216  2: 288/1152  5: 80/160"
    assert "ValueError: keep_dense pattern 'head' matches no layer" in out


def test_compare_methods(printed):
    out = printed("03_compare_methods", steps=40, width=32)
    table = {row[0]: row for line in out.splitlines() if len(row := line.split()) == 5}
    weights = {name: int(row[2].replace(",", "")) for name, row in table.items()}
    cost = {name: float(row[3]) for name, row in table.items()}
    assert len(table) == 11
    assert cost["dense"] == 1
    # SRigL rounds down to a constant fan-in; the others meet the budget to the weight.
    assert weights["SRigL"] <= weights["static"]
    assert {weights[name] for name in table if name not in ("dense", "SRigL")} == {weights["static"]}
    assert cost["static"] == cost["SET"] == cost["MEST"] < cost["RigL"] < cost["GMP"] < 1
    assert all(cost["static"] < cost[name] < 1 for name in ("SNFS", "Top-KAST", "GraNet", "AC/DC"))


def test_resume(printed):
    out = printed("04_resume", steps=60)
    assert "stopped at Sparsifier(rigl, 2 layers, density=0.1, step=30)" in out
    assert "resumed to Sparsifier(rigl, 2 layers, density=0.1, step=60)" in out
    assert "same weights: True, same topologies: True" in out


def test_your_own_method(printed):
    out = printed("05_your_own_method", steps=200)
    found = re.findall(r"^(\w+)\s+weights on useful inputs (\d+)% -> (\d+)%", out, re.MULTILINE)
    share = {name: (int(first), int(last)) for name, first, last in found}
    assert share["static"][0] == share["static"][1]
    for name in ("rigl", "taylor"):
        assert share[name][1] > share[name][0] + 5


def test_prune_and_lottery(printed):
    out = printed("06_prune_and_lottery", steps=20, width=32)
    rows = re.findall(
        r"^ *(.*?)\s+test accuracy\s+([\d.]+)%\s+weights\s+([\d,]+)\s+steps\s+(\d+)$", out, re.M
    )
    weights = {name: int(count.replace(",", "")) for name, _, count, _ in rows}
    steps = {name: int(count) for name, _, _, count in rows}
    assert len(rows) == 5
    assert all(0 < count <= 237 for name, count in weights.items() if name != "dense")
    assert steps["pruned in 3 rounds, fine-tuned"] == steps["RigL, never dense"] == 4 * steps["dense"]
    # Rewound to step 2: dense to the end, then 1/2, 1/4, 1/8 and 1/10 of the weights.
    assert steps["lottery ticket, rewound"] == 2 + 5 * 18


def test_convnet_and_attention(printed):
    out = printed("07_convnet_and_attention", steps=12, width=16)
    assert re.findall(r"^(\S+) +\S+×", out, re.MULTILINE) == [
        "down",
        "attention.in_proj_weight",
        "attention.out_proj",
        "head",
    ]
    assert "include=None: ['mix']" in out
    assert "include=['embed', 'mix']: ['embed', 'mix']" in out
    assert "still tied: True" in out


def test_mixture_of_experts(printed):
    out = printed("10_mixture_of_experts", steps=5)
    assert "SparseMixer: error" in out


def test_watch(printed):
    out = printed("11_watch", steps=60)
    experts = [float(number) for number in re.findall(r"effective experts  ([\d.]+) of 8", out)]
    assert experts[0] > 6
    assert experts[1] < 3
    assert "numbers of the whole model" in out


def test_every_example_is_tested_and_runs_as_a_script():
    tested = re.findall(r'printed\("(\w+)"', Path(__file__).read_text())
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert tested == [script.stem for script in scripts]
    for script in scripts:
        assert script.read_text().endswith('\n\nif __name__ == "__main__":\n    main()\n')
    quick = EXAMPLES / "02_choose_layers.py"
    done = subprocess.run([sys.executable, "-W", "error", quick], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "density" in done.stdout
