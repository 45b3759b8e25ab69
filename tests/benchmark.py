"""Measure what README.md says and write tests/RESULTS.md.

    python tests/benchmark.py            # about ten minutes on two quiet cores

Each figure comes from a script run as a user runs it, in a process of its own.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import gymnax
import jax
import numpy as np

ROOT = Path(__file__).parent.parent
FOLDER = Path(tempfile.mkdtemp())
LEARNERS = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py", "reinforce_parallel.py"]
TWENTY = ["--num-seeds", "20"]

ELSEWHERE = {  # flags of reinforce_parallel.py
    "Pendulum-v1": "--num-envs 128 --num-iterations 300 --gamma 0.95 --learning-rate 0.02",
    "Swimmer-misc": "--num-envs 64 --num-iterations 100",
}

# What a line is worth: script, the line, what takes its place (both unique parts of one line).
ABLATIONS = [
    (
        "parallel_td.py",
        "target = jax.lax.stop_gradient(batch.reward + args.gamma",
        "target = (batch.reward + args.gamma",
    ),
    (
        "parallel_td.py",
        'info["final_observation"], terminated)',
        'info["final_observation"], terminated | truncated)',
    ),
    (
        "parallel_td.py",
        "optax.linear_schedule(learning_rate, 0.0, args.learning_updates)",
        "learning_rate",
    ),
    (
        "replay_td.py",
        'default=0.005, help="step of the running',
        'default=1.0, help="step of the running',
    ),
    (
        "replay_td.py",
        'default=1_000, help="transitions before',
        'default=1, help="transitions before',
    ),
    ("reinforce_parallel.py", 'default="padding"', 'default="truncation"'),
    (
        "reinforce_parallel.py",
        "    others = (returns.sum(axis=1, keepdims=True) - returns) / (returns.shape[1] - 1)",
        "    others = (batch.mask * returns).sum(axis=1, keepdims=True)"
        " / jnp.maximum(batch.mask.sum(axis=1, keepdims=True), 1)",
    ),
]

# The TD scripts on the other tasks: script and flags.
TASKS = [
    (
        "replay_td.py",
        "--env-id MountainCar-v0 --sigma 0.15 --gamma 1 --learning-rate 0.02 --tau 0.01",
    ),
    ("epsilon_decay_td.py", "--env-id MountainCar-v0 --sigma 0.15 --gamma 1 --learning-rate 0.02"),
    ("parallel_td.py", "--env-id MountainCar-v0 --sigma 0.4 --learning-rate 0.003"),
    ("replay_td.py", "--env-id Acrobot-v1 --num-centers 1000 --learning-rate 0.05 --tau 0.01"),
    (
        "epsilon_decay_td.py",
        "--env-id Acrobot-v1 --num-centers 1000 --learning-rate 0.05 --sigma 0.6",
    ),
    ("parallel_td.py", "--env-id Acrobot-v1 --num-centers 1000 --learning-rate 0.1"),
]


def run(script, *flags, save=True, env=None):
    """Run a script to its end: seconds from command to end, printed lines, what it saved."""
    path = FOLDER / "saved.npz"
    command = [sys.executable, str(script), *flags]
    print("+", " ".join(command), flush=True)
    if save:
        command += ["--save", str(path)]
    env = {**os.environ, **(env or {})}
    began = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    seconds = time.perf_counter() - began
    saved = dict(np.load(path)) if save else {}
    return seconds, process.stdout.splitlines(), saved


def speed_of(lines):
    """Million steps per second in the last progress line."""
    found = re.findall(r"([\d.,]+) (M )?steps/s", "\n".join(lines))
    digits, million = found[-1]
    return float(digits.replace(",", "")) * (1 if million else 1e-6)


def milestones(timesteps, returns):
    """Steps of one run to its first line at 475, and to the line from which all are (or inf)."""
    solved = returns >= 475
    first = timesteps[solved][0] if solved.any() else np.inf
    below = np.flatnonzero(~solved)
    after = below[-1] + 1 if len(below) else 0
    return first, timesteps[after] if after < len(timesteps) else np.inf


def learned(saved):
    """Runs passed (greedy mean of at least 475), worst run, median steps to both milestones."""
    greedy = saved["greedy_return"].mean(axis=1)
    passed = f"{np.sum(greedy >= 475)} of {len(greedy)}"
    timesteps = np.broadcast_to(saved["timesteps"].T, saved["returns"].T.shape)
    steps = [milestones(t, r) for t, r in zip(timesteps, saved["returns"].T, strict=True)]
    medians = np.median(steps, axis=0)
    shown = ["never" if np.isinf(median) else f"{median / 1e3:.0f}k" for median in medians]
    return passed, f"{greedy.min():.0f}", *shown


def picture(curves):
    """Draw the four learners' curves: each run thin, the median in bold, a line at 475."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    _, panels = plt.subplots(1, 4, figsize=(14, 3.6), sharey=True, layout="constrained")
    for axes, (script, saved) in zip(panels, curves.items(), strict=True):
        timesteps = np.broadcast_to(saved["timesteps"].T, saved["returns"].T.shape).T
        axes.plot(timesteps, saved["returns"], "C0", linewidth=0.4)
        median = np.nanmedian(saved["returns"], axis=1)
        axes.plot(np.median(timesteps, axis=1), median, "C0", linewidth=2.5)
        axes.axhline(475, color="gray", linestyle=":")
        axes.set_title(script, fontsize=14)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("environment steps", fontsize=12)
    panels[0].set_ylabel("return of training episodes", fontsize=12)
    plt.savefig(ROOT / ".pictures" / "curve.png", dpi=80)


def table(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def learning():
    """Twenty runs of each learner, and one alone, three times."""
    rows, curves = [], {}
    for script in LEARNERS:
        _, many_lines, saved = run(ROOT / script, *TWENTY)
        curves[script] = saved
        alone = [run(ROOT / script) for _ in range(2)]
        one = np.mean([speed_of(lines) for _, lines, _ in alone])
        compiling = np.mean([one_saved["compile_seconds"] for _, _, one_saved in alone])
        waiting = np.mean([seconds for seconds, _, _ in alone])
        speeds = f"{one:.2f}", f"{speed_of(many_lines):.2f}"
        rows.append([f"`{script}`", *learned(saved), *speeds, f"{compiling:.1f}", f"{waiting:.1f}"])
    picture(curves)
    head = ["script", "passed", "worst run", "first at 475", "at 475 from"]
    head += ["M steps/s, one run", "twenty"]
    return table([*head, "compiling, s", "command to end, s"], rows)


def scaling():
    """More and more agents, or environments."""
    rows = []
    for agents, steps in [(1, 3e7), (30, 2e6), (1024, 2e5), (16384, 2e4)]:
        flags = ["--num-seeds", str(agents), "--total-timesteps", f"{steps:g}"]
        flags += ["--log-interval", f"{min(1e6, steps / 2):g}"]
        speed = speed_of(run(ROOT / "gridworld_qlearning.py", *flags, save=False)[1])
        rows.append(
            [f"{agents:,} agents", f"`gridworld_qlearning.py {' '.join(flags)}`", f"{speed:.0f}"]
        )
    for envs, steps in [(1, 1e8), (16, 4e8), (256, 5e8), (4096, 1e9), (65536, 1e9)]:
        flags = ["--num-envs", str(envs), "--total-timesteps", f"{steps:g}"]
        speed = speed_of(run(ROOT / "mountaincar_env.py", *flags, save=False)[1])
        rows.append([f"{envs:,} cars", f"`mountaincar_env.py {' '.join(flags)}`", f"{speed:.0f}"])
    return table(["how many", "command", "M steps/s"], rows)


def unlearned_return(env_id, idle):
    """Mean return of 100 episodes of random actions, or of doing nothing (action 0)."""
    env, env_params = gymnax.make(env_id)
    space = env.action_space(env_params)

    def step(carry, key):
        env_state, alive, total = carry
        key_action, key_step = jax.random.split(key)
        action = space.sample(key_action)
        action = 0 * action if idle else action
        _, env_state, reward, terminated, truncated, _ = env.step(key_step, env_state, action)
        return (env_state, alive & ~(terminated | truncated), total + alive * reward), None

    def episode(key):
        key_reset, key_steps = jax.random.split(key)
        _, env_state = env.reset(key_reset)
        keys = jax.random.split(key_steps, int(env_params.max_steps_in_episode))
        return jax.lax.scan(step, (env_state, True, 0.0), keys)[0][2]

    return float(jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(0), 100)).mean())


def elsewhere():
    """REINFORCE on continuous actions: ten runs, beside those that learn nothing."""
    rows = []
    for env_id, flags in ELSEWHERE.items():
        flags = ["--env-id", env_id, *flags.split(), "--num-seeds", "10"]
        greedy = run(ROOT / "reinforce_parallel.py", *flags)[2]["greedy_return"].mean(axis=1)
        learned_nothing = [f"{unlearned_return(env_id, idle):.0f}" for idle in (False, True)]
        result = f"{greedy.mean():.0f} ({greedy.min():.0f} to {greedy.max():.0f})"
        rows.append([f"`{' '.join(flags)}`", *learned_nothing, result])
    return table(["`reinforce_parallel.py`", "random", "idle", "greedy, mean (all) of ten"], rows)


def other_tasks():
    """Twenty runs of the TD scripts on the other tasks, beside random play."""
    rows = []
    for script, flags in TASKS:
        _, _, saved = run(ROOT / script, *flags.split(), *TWENTY)
        greedy = saved["greedy_return"].mean(axis=1)
        random = unlearned_return(flags.split()[1], idle=False)
        seconds = f"{saved['train_seconds']:.0f}"
        command = f"`{script} {flags} --num-seeds 20`"
        rows.append(
            [command, f"{random:.0f}", f"{greedy.mean():.0f}", f"{greedy.min():.0f}", seconds]
        )
    return table(["command", "random play", "greedy, mean", "worst run", "training, s"], rows)


def ablations():
    """Twenty runs of a copy in which one line is another."""
    rows = []
    for script, line, other in ABLATIONS:
        text = (ROOT / script).read_text()
        assert text.count(line) == 1, f"{script} has {text.count(line)} times {line!r}"
        copy = FOLDER / script
        copy.write_text(text.replace(line, other))
        saved = run(copy, *TWENTY)[2]
        rows.append([f"`{script}`", f"`{line.strip()}`", f"`{other.strip()}`", *learned(saved)])
    return table(
        ["script", "line", "instead", "passed", "worst run", "first at 475", "at 475 from"], rows
    )


def grid_world():
    """Twenty agents with the defaults."""
    _, lines, saved = run(ROOT / "gridworld_qlearning.py", *TWENTY)
    args = json.loads(str(saved["args"]))
    values = saved["q_table"][:, -1, -1].max(axis=-1)  # of the start, the last cell
    exact = args["gamma"] ** (sum(args["grid_size"]) - 3)
    error = np.abs(values - exact).max()
    return f"{lines[-1]}. 0.9^17 = {exact:.5f}, the largest error of 20 agents is {error:.0e}.\n"


def main():
    """Measure, then write the page."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ["jax", "optax", "gymnax"]
    )
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    machine = f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}, {versions}"
    page = f"""# Results

Written by `python tests/benchmark.py` on {date.today()}: {machine}. A shared machine: speeds of
small loops vary by a factor of up to two between minutes, what is learned does not vary.

## Learning

Greedy mean of at least 475 over 100 fresh episodes, of 20 runs (`--num-seeds 20`, seeds 0 to 19,
defaults). "First at 475": environment steps to the first progress line with a training return of at
least 475. "At 475 from": steps to the line from which all lines are. Both are medians over all 20
runs. Speed and waiting of one run are means of two.

{learning()}
`python gridworld_qlearning.py --num-seeds 20`: {grid_world()}
## Scaling

{scaling()}
## The TD scripts on other tasks

Twenty runs each, 500,000 steps a run, 100 greedy episodes. -110 counts as solved on MountainCar-v0.
parallel_td.py, which has no replay buffer, mostly fails there.

{other_tasks()}
## REINFORCE on continuous actions

Random actions, doing nothing (action 0), and what is learned.

{elsewhere()}
## What each ingredient is worth

Twenty runs of a copy in which one line is replaced (the defaults pass as above).

{ablations()}
"""
    (ROOT / "tests" / "RESULTS.md").write_text(page)


if __name__ == "__main__":
    main()
