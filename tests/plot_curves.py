"""Draw the learning curves that several runs saved with --save into one picture: the mean over runs, and the band of all.

    python tests/plot_curves.py OUT.png CURVES.npz [CURVES.npz ...]
"""
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def main(out, *files):
    """One curve for each file, labelled with the file's name."""
    axes = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    for file in files:
        saved = np.load(file)
        curves = np.ma.masked_invalid(saved["curve_return"])
        axes.plot(saved["curve_timesteps"], curves.mean(axis=0), label=f"{Path(file).stem}, {len(curves)} runs")
        axes.fill_between(saved["curve_timesteps"], curves.min(axis=0), curves.max(axis=0), alpha=0.15)
    axes.axhline(475, color="gray", linestyle=":")
    axes.set(title="CartPole-v1", xlabel="environment steps per run", ylabel="mean return of the last 100 training episodes")
    axes.legend(loc="lower right")
    axes.figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
