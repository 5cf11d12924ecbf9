"""The page and the example run as they stand."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_block_of_the_page_runs_in_order(capsys):
    text = (ROOT / "docs" / "moe.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) > 8
    for block in blocks:
        exec(compile(block, "docs/moe.md", "exec"), names)
    assert "tokens unserved" in capsys.readouterr().out


def test_the_example_runs(capsys):
    example = runpy.run_path(str(ROOT / "examples" / "10_mixture_of_experts.py"))
    example["main"](steps=5)
    assert "SparseMixer: error" in capsys.readouterr().out
