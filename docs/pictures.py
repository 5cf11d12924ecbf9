"""Makes the pictures of the page for the README and docs/page.md from real runs.

    python docs/pictures.py            # writes docs/pictures/*.png; needs chromium and playwright

Classifiers of handwritten digits: a mixture of experts with sparse weights (two seeds), the same one whose
router is pushed towards one expert half-way and has no balancing, and a dense network to compare with.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import torch
import uvicorn
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from torch import nn

import sparsight as sp
from sparsight.recipes.digits import load_digits
from sparsight.report.compare import write_comparison
from sparsight.report.live import Library
from sparsight.report.serve import listen
from sparsight.report.server import make_app
from sparsight.report.single import write_report

HERE = Path(__file__).parent / "pictures"
STEPS = 1200
LARGEST = 150_000


def train(run: Path, *, seed: int = 0, sparse: bool = True, ill: bool = False) -> None:
    """One run, watched."""
    torch.manual_seed(seed)
    data = load_digits()
    balance = () if ill else sp.SwitchLoss()
    experts = sp.MoE(128, 128, experts=8, estimator=sp.SparseMixer(), balance=balance)
    middle: nn.Module = experts if sparse else nn.Linear(128, 128)
    model = nn.Sequential()
    for name, layer in (
        ("first", nn.Linear(64, 128)),
        ("middle", middle),
        ("hidden", nn.Linear(128, 128)),
        ("last", nn.Linear(128, 10)),
    ):
        model.add_module(name, layer)
        if name != "last":
            model.add_module(f"{name}_relu", nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if sparse:
        sp.sparsify(model, optimizer, density=0.2, method=sp.rigl(steps=STEPS, every=50))
    config = {"sparse": sparse, "balance": not ill, "seed": seed}
    with sp.watch(model, optimizer, run, every=10, config=config) as watch:
        for step in range(1, STEPS + 1):
            if ill and step == STEPS // 2:
                with torch.no_grad():  # as a bug in an initialisation would
                    next(experts.router.parameters())[0] += 0.5
            rows = torch.randint(len(data.train_x), (128,))
            loss = nn.functional.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
            optimizer.zero_grad()
            (loss + sp.balance_loss(model)).backward()
            optimizer.step()
            watch.log(loss=loss)
            if step % 50 == 0:
                model.eval()
                with torch.no_grad():
                    right = (model(data.test_x).argmax(1) == data.test_y).float().mean()
                model.train()
                watch.log(accuracy=right)


def shoot(page: Page, name: str, height: int, *, width: int = 1280) -> None:
    """One picture, in as many colours as keep it small."""
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_timeout(3000)
    file = HERE / f"{name}.png"
    page.screenshot(path=str(file))
    for colours in (256, 128, 64, 32):
        Image.open(file).convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(file, optimize=True)
        if file.stat().st_size <= LARGEST:
            break
    print(f"{file}: {file.stat().st_size // 1000} kB")


def main() -> None:
    """Train, serve, look."""
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = Path(folder)
        for name, options in (
            ("dense", {"sparse": False}),
            ("experts-1", {"seed": 1}),
            ("experts-2", {"seed": 2}),
            ("collapse", {"ill": True}),
        ):
            train(runs / name, **options)  # type: ignore[arg-type]
        write_comparison([runs / n for n in ("experts-1", "experts-2", "dense")], runs / "compare.html")
        report = write_report(runs / "experts-1")

        listening = listen("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(make_app(Library(runs)), log_level="warning", lifespan="off"))
        threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        light = browser.new_page(color_scheme="light")
        light.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/#collapse")
        light.wait_for_selector("#chart-loss .main-svg")
        light.wait_for_timeout(8000)  # until the rules have looked at all of them
        shoot(light, "page", 1650)
        dark = browser.new_page(color_scheme="dark")
        dark.goto(report.as_uri())
        dark.wait_for_selector("#chart-loss .main-svg")
        dark.evaluate(
            "[...document.querySelectorAll('h2')]"
            ".find(h => h.textContent === 'Sparse weights').scrollIntoView()"
        )
        shoot(dark, "report", 1150)
        light.goto((runs / "compare.html").as_uri())
        shoot(light, "compare", 760)
        browser.close()
        server.should_exit = True


if __name__ == "__main__":
    main()
