"""Every dynamic method on the same data, at the same density, in the same loop.

One seed and a small network: the table shows how the methods differ in kind, not which one is best.
"""

import sparsight as sp
from sparsight.recipes.digits import load_digits, run


def main(*, steps: int = 200, width: int = 64, density: float = 0.1) -> None:
    every = max(steps // 20, 1)
    methods: dict[str, sp.Method | None] = {
        "dense": None,
        "static": sp.static(),
        "SET": sp.set_(every=every, end=int(0.75 * steps)),
        "MEST": sp.mest(steps=steps, every=every),
        "RigL": sp.rigl(steps=steps, every=every),
        "SRigL": sp.srigl(steps=steps, every=every),
        "SNFS": sp.snfs(steps=steps, every=every),
        "Top-KAST": sp.top_kast(backward=min(2 * density, 1.0), every=5),
        "GMP": sp.gmp(steps=steps, every=every),
        "GraNet": sp.granet(steps=steps, every=every),
        "AC/DC": sp.acdc(steps=steps, phase=max(steps // 8, 1)),
    }
    data = load_digits()
    print(f"{'':<10}{'test accuracy':>14}{'weights':>10}{'training FLOPs / dense':>24}{'seconds':>9}")
    for name, method in methods.items():
        end = run(data, method, density=density, steps=steps, width=width)
        print(f"{name:<10}{end.accuracy:>14.1%}{end.weights:>10,}{end.flops_ratio:>24.3f}{end.seconds:>9.1f}")
    print("\nFLOPs are those a sparse kernel would need. Masked storage computes densely: see the seconds.")


if __name__ == "__main__":
    main()
