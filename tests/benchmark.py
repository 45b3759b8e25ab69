"""Measure everything README.md states, print it, and write it into README.md between the two markers; draw the pictures there.

python tests/benchmark.py        # about twenty minutes on two cores, which should have nothing else to do
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / ".pictures"
MARKERS = "<!-- written by tests/benchmark.py -->", "<!-- end -->"
MANY = "--num-seeds 20 --num-devices 2"
TD_LONG = "--no-early-stop --eval-episodes 0 --total-timesteps 1e6"
LEARNERS = {  # script: what it shows, and the flags with which steps/s are taken
    "parallel_td.py": ("semi-gradient Q-learning, 16 environments in lockstep", TD_LONG),
    "replay_td.py": ("+ a replay buffer, averaged weights in the target", TD_LONG),
    "epsilon_decay_td.py": ("+ exploration that decays", TD_LONG),
    "reinforce_parallel.py": (
        "policy gradient, 16 episodes at once, padded and masked",
        "--no-early-stop --eval-episodes 0 --num-iterations 300 --log-interval 50",
    ),
}
VARIANTS = [  # what the defaults are worth: script, flags
    ("parallel_td.py", "--residual-gradient"),
    ("replay_td.py", "--tau 1 --learning-rate 1e-3"),
    ("replay_td.py", "--tau 1 --learning-rate 1e-2"),
    ("epsilon_decay_td.py", "--epsilon-decay 1 --start-e 0.1"),
    ("reinforce_parallel.py", "--baseline none"),
    ("reinforce_parallel.py", "--baseline time-independent"),
    ("reinforce_parallel.py", "--sync truncation"),
]
TASKS = {  # gymnax environment: flags of reinforce_parallel.py
    "Pendulum-v1": "--num-envs 128 --num-iterations 300 --gamma 0.95 --learning-rate 5e-3",
    "Swimmer-misc": "--num-envs 64 --num-iterations 60",
}
AGENTS = {
    1: "3e7 1",
    30: "2e6 1",
    1024: "2e5 2",
    16384: "1e4 2",
    262144: "2e3 2",
}  # of the grid world: steps each, devices
CARS = {
    1: "1e8 1",
    16: "1e9 1",
    256: "1e9 1",
    4096: "4e9 2",
    65536: "4e9 2",
}  # environments: steps of all, devices
CARS_FEW = "--total-timesteps 1e7 --log-interval 1e7"
GRID_LONG = "--total-timesteps 1e7 --log-interval 5e6"
SYNC = {  # label in the picture: flags, numbers of iterations that take about the same numbers of steps
    "padding": ("", (1, 10, 15, 20, 25, 30, 35, 40)),
    "truncation": ("--sync truncation", (1, 600)),
    "truncation, --baseline time-independent": (
        "--sync truncation --baseline time-independent",
        (1, 50, 100, 200),
    ),
}


def run(script, flags, **options):
    """Run a script to its end with --json; returns its report."""
    command = [sys.executable, str(ROOT / script), *map(str, flags.split()), "--json"]
    print("+", script, flags, file=sys.stderr, flush=True)
    return json.loads(
        subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, **options
        ).stdout
    )


def thrice(script, flags, *names):
    """The medians of three runs, by their names in the report."""
    reports = [run(script, flags) for _ in range(3)]
    return [median(report[name] for report in reports) for name in names]


def interquartile_mean(values):
    """Mean of the middle half of values (..., R): without the lowest and the highest quarter (Agarwal et al. 2021)."""
    ordered, cut = np.sort(values, axis=-1), np.shape(values)[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def bootstrap_interval(values, resamples=10_000):
    """The 95 % percentile interval of the interquartile mean of values (R,), resampling runs."""
    rng = np.random.default_rng(0)
    return np.percentile(
        interquartile_mean(rng.choice(values, (resamples, len(values)))), [2.5, 97.5]
    )


def greedy(report):
    """Interquartile mean of the runs' greedy returns with its interval, as text."""
    values = np.array([row["eval_mean"] for row in report["runs"]])
    low, high = bootstrap_interval(values)
    return f"{interquartile_mean(values):.1f} [{low:.1f}, {high:.1f}]"


def solved(report):
    """How many runs were solved, and the median and range of the steps it took them, as two texts."""
    steps = [row["solved_at"] for row in report["runs"] if row["solved_at"]]
    spread = (
        f"{median(steps) / 1e3:.0f} k ({min(steps) / 1e3:.0f} - {max(steps) / 1e3:.0f} k)"
        if steps
        else "-"
    )
    return f"{len(steps)} of {len(report['runs'])}", spread


def table(head, rows):
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def scripts():
    """The first table: what each script shows, reaches and costs."""
    rows = []
    for script, (what, long) in LEARNERS.items():
        many = run(script, MANY)
        compile_time, run_time, memory = thrice(
            script, "", "seconds_to_compile", "seconds_to_run", "peak_memory_mb"
        )
        (one,), twenty = (
            thrice(script, long, "steps_per_second"),
            run(script, f"{long} {MANY}")["steps_per_second"],
        )
        rows.append(
            [
                f"`{script}`",
                what,
                *solved(many),
                greedy(many),
                f"{run_time:.2f} + {compile_time:.1f}",
                f"{one / 1e6:.2f}",
                f"{twenty / 1e6:.2f}",
                f"{memory:.0f}",
            ]
        )
    script, many = "gridworld_qlearning.py", run("gridworld_qlearning.py", MANY)
    shortest = sum(row["path_length"] == many["shortest_path"] for row in many["runs"])
    error = max(
        abs(row["start_value"] - 0.9 ** (many["shortest_path"] - 1)) for row in many["runs"]
    )
    compile_time, run_time, memory = thrice(
        script, "", "seconds_to_compile", "seconds_to_run", "peak_memory_mb"
    )
    (one,), twenty = (
        thrice(script, f"{flags} {GRID_LONG}", "steps_per_second") for flags in ("", MANY)
    )
    rows.append(
        [
            f"`{script}`",
            "tabular Q-learning on a grid, one agent or thousands",
            f"{shortest} of 20",
            "a shortest path",
            f"value of the start exact to {error:.0e}",
            f"{run_time:.2f} + {compile_time:.1f}",
            f"{one / 1e6:.0f}",
            f"{twenty[0] / 1e6:.0f}",
            f"{memory:.0f}",
        ]
    )
    script = "mountaincar_env.py"
    compile_time, run_time, memory, speed = thrice(
        script,
        "--num-devices 2",
        "seconds_to_compile",
        "seconds_to_run",
        "peak_memory_mb",
        "steps_per_second",
    )
    rows.append(
        [
            f"`{script}`",
            "an environment, rolled out on cores, devices and machines",
            "",
            "",
            "",
            f"{run_time:.2f} + {compile_time:.1f}",
            f"{speed / 1e6:.0f}",
            "",
            f"{memory:.0f}",
        ]
    )
    head = [
        "script",
        "what it shows",
        "solved",
        "steps to 475: median (all)",
        "greedy return: IQM [95 %]",
        "seconds: run + compile",
        "M steps/s",
        "of 20 runs",
        "peak MB",
    ]
    return [
        *table(head, rows),
        "",
        f"Columns 3 to 5: `python NAME {MANY} --json`; steps are counted at progress lines, 10,000 steps (5 iterations) apart; the greedy",
        "return is the interquartile mean over the 20 runs with its 95 % bootstrap interval. Seconds from compiled to solved, seconds to",
        "compile, and memory: `python NAME --json`, one run (`mountaincar_env.py`: `--num-devices 2`, a billion steps). Steps/s:",
        f"`python NAME {TD_LONG}` (REINFORCE: `{LEARNERS['reinforce_parallel.py'][1]}`;",
        f"grid: `{GRID_LONG}`), and the same with `{MANY}`. All are medians of three where it is about time.",
    ]


def scales():
    """The tables of the grid world's agents and of the mountain car's environments."""
    lines = []
    for script, what, unit, flag, sizes in (
        (
            "gridworld_qlearning.py",
            "agents",
            "--total-timesteps {0} --log-interval {1:g}",
            "--num-seeds",
            AGENTS,
        ),
        ("mountaincar_env.py", "environments", "--total-timesteps {0}", "--num-envs", CARS),
    ):
        rows = []
        for size, (steps, devices) in ((size, text.split()) for size, text in sizes.items()):
            flags = f"{flag} {size} {unit.format(steps, float(steps) / 2)} --num-devices {devices}"
            report = run(script, flags)
            rows.append(
                [
                    f"{size:,}",
                    devices,
                    f"{report['steps_per_second'] / 1e6:.0f}",
                    f"{report['peak_memory_mb']:.0f}",
                    f"`{flags}`",
                ]
            )
        lines += [*table([what, "cores", "M steps/s", "peak MB", f"`python {script}`"], rows), ""]
    rocking = run(
        "mountaincar_env.py", f"--policy rocking {CARS_FEW} --plot {PICTURES / 'mountaincar.png'}"
    )["runs"][0]
    agents = run(
        "gridworld_qlearning.py", f"--num-seeds 30 --plot {PICTURES / 'gridworld_qlearning.png'}"
    )
    value = np.mean([row["start_value"] for row in agents["runs"]])
    return [
        *lines,
        "![Values, greedy actions and learning curve of 30 agents](.pictures/gridworld_qlearning.png)",
        "",
        f"`python gridworld_qlearning.py --num-seeds 30 --plot x.png`: the start is worth {value:.5f}; exactly 0.9^17 = {0.9**17:.5f}.",
        "",
        "![Ten episodes of the rocking policy: velocity against position](.pictures/mountaincar.png)",
        "",
        f"`python mountaincar_env.py --policy rocking {CARS_FEW} --plot x.png`: who pushes the way the car moves reaches the",
        f"goal in {rocking['goal_share']:.0%} of {rocking['episodes']:,} episodes, return {rocking['return_mean']:.1f}.",
    ]


def tasks():
    """REINFORCE on environments with continuous actions, and what random actions get there."""
    rows = []
    for env_id, flags in TASKS.items():
        flags, gif = (
            f"--env-id {env_id} {flags}",
            f"--gif {PICTURES / 'pendulum.gif'}" if env_id == "Pendulum-v1" else "",
        )
        report = run("reinforce_parallel.py", f"{flags} --num-seeds 10 --num-devices 2 {gif}")
        before = run(
            "reinforce_parallel.py",
            f"--env-id {env_id} --num-iterations 1 --num-envs 100 --eval-episodes 0 --num-seeds 10",
        )
        random = np.mean([row["training_return"] for row in before["runs"]])
        returns = [row["eval_mean"] for row in report["runs"]]
        rows.append(
            [
                f"`{flags}`",
                f"{random:.0f}",
                f"{np.mean(returns):.0f} [{min(returns):.0f}, {max(returns):.0f}]",
            ]
        )
    return [
        "![A pendulum swings up](.pictures/pendulum.gif)",
        "",
        *table(["`python reinforce_parallel.py`", "random actions", "greedy return"], rows),
        "",
        "Mean [all] of ten runs (`--num-seeds 10`). Random actions: the training return of `--num-iterations 1 --num-envs 100`, before any",
        "update. The film: the first line with `--gif pendulum.gif`.",
    ]


def variants():
    """What becomes of the defaults' results without one of their ingredients."""
    rows = []
    for script, flags in VARIANTS:
        report = run(script, f"{flags} {MANY}")
        passed = sum(row["eval_mean"] >= 475 for row in report["runs"])
        rows.append([f"`{script} {flags}`", *solved(report), greedy(report), f"{passed} of 20"])
    return [
        *table(
            [
                "variant",
                "solved",
                "steps to 475: median (all)",
                "greedy return: IQM [95 %]",
                "of at least 475",
            ],
            rows,
        ),
        "",
        f"Each with `{MANY} --json`: 1,000,000 steps, of `reinforce_parallel.py` 100 iterations.",
    ]


def waits(script, flags="", **environment):
    """Seconds from the command to its first line, its first progress line and its end."""
    began, moments = time.perf_counter(), {}
    with subprocess.Popen(
        [sys.executable, str(ROOT / script), *flags.split()],
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        for line in process.stdout:
            moments.setdefault(
                line.partition(" ")[0] if moments else "first", time.perf_counter() - began
            )
    assert process.returncode == 0
    return (
        moments["first"],
        moments.get("step", moments.get("iteration")),
        time.perf_counter() - began,
    )


def startup():
    """How long a user waits, the first time and with compiled programs kept."""
    rows = []
    for script in [*LEARNERS, "gridworld_qlearning.py", "mountaincar_env.py"]:
        print("+", script, "(waits)", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            keep = dict(
                JAX_COMPILATION_CACHE_DIR=folder,
                JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                TF_CPP_MIN_LOG_LEVEL="3",
            )
            plain = [waits(script) for _ in range(3)]
            waits(script, **keep)
            kept = [waits(script, **keep) for _ in range(3)]
        help_text = median(waits(script, "--help")[2] for _ in range(3))
        rows.append(
            [
                f"`{script}`",
                f"{help_text:.2f}",
                *(f"{median(moment):.1f}" for moment in zip(*plain)),
                f"{median(moment[2] for moment in kept):.1f}",
            ]
        )
    head = [
        "seconds from the command to",
        "`--help`",
        "first line",
        "first progress line",
        "end",
        "end, compiled before",
    ]
    return [
        *table(head, rows),
        "",
        "Whole processes, default flags, medians of three. Last column: the second time, with `JAX_COMPILATION_CACHE_DIR` (see Copy).",
    ]


def draw_curves(folder):
    """Draw the learning curves of the three TD scripts: mean over 20 runs, and the band of all."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    for script in "parallel_td.py", "replay_td.py", "epsilon_decay_td.py":
        run(
            script,
            f"{MANY} --no-early-stop --total-timesteps 300000 --eval-episodes 0 --save {folder}/x.npz",
        )
        saved = np.load(f"{folder}/x.npz")
        curves = np.ma.masked_invalid(saved["curve_return"])
        axes.plot(
            saved["curve_timesteps"], curves.mean(axis=0), label=f"{script}, {len(curves)} runs"
        )
        axes.fill_between(
            saved["curve_timesteps"], curves.min(axis=0), curves.max(axis=0), alpha=0.15
        )
    axes.axhline(475, color="gray", linestyle=":")
    axes.set(
        title="CartPole-v1",
        xlabel="environment steps per run",
        ylabel="mean return of the last 100 training episodes",
    )
    axes.legend(loc="lower right")
    axes.figure.savefig(PICTURES / "td_curves.png", dpi=120)
    return [
        "Mean over 20 runs and the band of all, trained on past the point where they are solved: with "
        f"`{MANY} --no-early-stop --total-timesteps 300000`."
    ]


def draw_sync():
    """Draw padding against truncation: greedy return after so many iterations, over the environment steps they took.

    Each point is a run of its own from the same seeds: the training return would flatter neither fairly, since truncation cuts it.
    """
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    for label, (flags, counts) in SYNC.items():
        reports = [
            run(
                "reinforce_parallel.py",
                f"{flags} --num-seeds 10 --num-devices 2 --no-early-stop --num-iterations {count} "
                f"--log-interval {count}",
            )
            for count in counts
        ]
        steps = [report["timesteps"] / 10 for report in reports]
        returns = np.array(
            [[row["eval_mean"] for row in report["runs"]] for report in reports]
        )  # (K, R)
        axes.plot(steps, returns.mean(axis=1), marker=".", label=label)
        axes.fill_between(steps, returns.min(axis=1), returns.max(axis=1), alpha=0.15)
    axes.set(
        title="REINFORCE on CartPole-v1, 10 runs",
        xlabel="environment steps per run",
        ylabel="mean greedy return, 100 episodes",
    )
    axes.legend(loc="center right")
    axes.figure.savefig(PICTURES / "reinforce_sync.png", dpi=120)
    return [
        "![Padding against truncation](.pictures/reinforce_sync.png)",
        "",
        "Ten runs per point, of `reinforce_parallel.py --no-early-stop` with the flags in the legend, evaluated greedily.",
    ]


def machine():
    """Versions, processor and date."""
    versions = run("parallel_td.py", "--total-timesteps 10000 --eval-episodes 0")["versions"]
    models = [
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"Measured on {time.strftime('%Y-%m-%d')} with {', '.join(f'{name} {version}' for name, version in versions.items())}, "
        f"{platform.system()}, {len(models)} cores: {models[0]}."
    )


def rewrite(text, lines):
    """The text with the lines between its two markers."""
    before, after = text.split(MARKERS[0])[0], text.split(MARKERS[1])[1]
    return before + "\n".join([MARKERS[0], *lines, MARKERS[1]]) + after


def main():
    """Measure, draw, print, rewrite README.md."""
    readme = ROOT / "README.md"
    rewrite(readme.read_text(), [])  # an error now, not in twenty minutes
    lines = [
        *scripts(),
        "",
        machine(),
        "",
        "![Learning curves of the three TD scripts](.pictures/td_curves.png)",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        lines += [
            *draw_curves(folder),
            "",
            "### How long one waits",
            "",
            *startup(),
            "",
            "### How far it scales",
            "",
            *scales(),
            "",
        ]
    lines += [
        "### What each ingredient is worth",
        "",
        *variants(),
        "",
        *draw_sync(),
        "",
        "### REINFORCE elsewhere",
        "",
        *tasks(),
    ]
    print("\n".join(lines))
    readme.write_text(rewrite(readme.read_text(), lines))


if __name__ == "__main__":
    main()
