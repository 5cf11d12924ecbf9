"""The tables of `sparsight bench --only moe`, without the rest of the command line."""

import argparse
import sys

import torch

from sparsight.bench import table

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--threads", type=int, nargs="*", default=[1, torch.get_num_threads()])
parser.add_argument("--repeats", type=int, default=11)
args = parser.parse_args()
rows = table.run_moe(
    thread_counts=dict.fromkeys(args.threads),
    repeats=args.repeats,
    say=lambda what: print(what, file=sys.stderr),
)
print(table.render([], [], rows))
