"""Draw padding against truncation in REINFORCE: greedy return after so many iterations, over the environment steps they took.

    python tests/plot_sync.py OUT.png        # about five minutes

Each point is a run of its own from the same seeds: the training return would flatter neither fairly, since truncation cuts it.
"""
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

SCRIPT = Path(__file__).parent.parent / "reinforce_parallel.py"
CURVES = {  # label: flags, numbers of iterations that take about the same numbers of steps
    "padding": ([], [1, 10, 15, 20, 25, 30, 35, 40]),
    "truncation": (["--sync", "truncation"], [1, 600]),
    "truncation, --baseline time-independent": (["--sync", "truncation", "--baseline", "time-independent"], [1, 50, 100, 200]),
}


def main(out):
    """One curve for each way to stop: the mean over ten runs, and the band of all."""
    axes = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    for label, (flags, counts) in CURVES.items():
        steps, means, lows, highs = [], [], [], []
        for count in map(str, counts):
            command = [sys.executable, SCRIPT, "--num-seeds", "10", "--num-devices", "2", "--no-early-stop", "--json", *flags,
                       "--num-iterations", count, "--log-interval", count]
            report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            returns = [row["eval_mean"] for row in report["runs"]]
            steps.append(report["timesteps"] / len(returns))
            means.append(sum(returns) / len(returns))
            lows.append(min(returns))
            highs.append(max(returns))
        axes.plot(steps, means, marker=".", label=label)
        axes.fill_between(steps, lows, highs, alpha=0.15)
    axes.set(title="REINFORCE on CartPole-v1, 10 runs", xlabel="environment steps per run", ylabel="mean greedy return, 100 episodes")
    axes.legend(loc="center right")
    axes.figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
