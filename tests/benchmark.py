"""Measure what README.md says and write tests/RESULTS.md.

    python tests/benchmark.py            # about ten minutes on two cores

Each script runs as a user would run it, in a process of its own.
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
from functools import partial
from pathlib import Path

import gymnax
import jax
import numpy as np

ROOT = Path(__file__).parent.parent
FOLDER = Path(tempfile.mkdtemp())
LEARNERS = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py", "reinforce_parallel.py"]
TWENTY = ["--num-seeds", "20"]

# Flags of reinforce_parallel.py where its defaults do not learn or take too long.
ENV_FLAGS = {
    "Pendulum-v1": "--num-envs 128 --num-iterations 300 --gamma 0.95 --learning-rate 0.02",
    "MountainCarContinuous-v0": "--num-envs 64",
    "Asterix-MinAtar": "--num-envs 8 --num-iterations 50 --eval-episodes 20",
    "Freeway-MinAtar": "--num-envs 4 --num-iterations 25 --eval-episodes 20",
    "Seaquest-MinAtar": "--num-envs 2 --num-iterations 10 --eval-episodes 10",
    "SpaceInvaders-MinAtar": "--eval-episodes 20",
    "DeepSea-bsuite": "--num-envs 64",
    "UmbrellaChain-bsuite": "--num-envs 64",
    "DiscountingChain-bsuite": "--num-envs 128",
    "PointRobot-misc": "--num-envs 128 --num-iterations 200",
    "Pong-misc": "--num-iterations 30 --hidden-size 16 --eval-episodes 20",
}

# Ablations by a flag.
FLAG_ABLATIONS = [
    "parallel_td.py --epsilon 0.1",
    "replay_td.py --tau 1",
    "reinforce_parallel.py --sync truncation",
]

# Ablations by a line: script, a text that occurs once in it, and what replaces this text.
LINE_ABLATIONS = [
    ("parallel_td.py", "jax.lax.stop_gradient(batch.reward", "(batch.reward"),
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
        "reinforce_parallel.py",
        "others = (returns.sum(axis=1, keepdims=True) - returns) / (returns.shape[1] - 1)",
        "others = (batch.mask * returns).sum(axis=1, keepdims=True)"
        " / jnp.maximum(batch.mask.sum(axis=1, keepdims=True), 1)",
    ),
]

# The TD scripts on other tasks: script, environment and flags.
TASKS = [
    "replay_td.py --env-id MountainCar-v0 --sigma 0.15 --gamma 1 --learning-rate 0.02"
    " --epsilon 0.1 --num-centers 1000",
    "epsilon_decay_td.py --env-id MountainCar-v0 --sigma 0.15 --gamma 1 --learning-rate 0.02"
    " --end-e 0.1 --num-centers 1000",
    "parallel_td.py --env-id MountainCar-v0 --sigma 0.4 --learning-rate 0.003",
    "replay_td.py --env-id Acrobot-v1 --num-centers 1000 --learning-rate 0.05",
    "epsilon_decay_td.py --env-id Acrobot-v1 --num-centers 1000 --learning-rate 0.05 --sigma 0.6",
    "parallel_td.py --env-id Acrobot-v1 --num-centers 1000 --learning-rate 0.1",
]


def run(script, *flags, save=True):
    """Run a script. Returns seconds from command to end, printed lines and saved arrays."""
    path = FOLDER / "saved.npz"
    command = [sys.executable, str(script), *flags]
    print("+", " ".join(command), flush=True)
    if save:
        command += ["--save", str(path)]
    began = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    saved = dict(np.load(path)) if save else {}
    return seconds, process.stdout.splitlines(), saved


def speed_of(lines):
    """Speed in the last progress line, in million steps per second."""
    found = re.findall(r"([\d.,]+) (M )?steps/s", "\n".join(lines))
    digits, million = found[-1]
    return float(digits.replace(",", "")) * (1 if million else 1e-6)


def milestones(timesteps, returns):
    """Steps to the first line at 475 and to the line from which all are at 475; inf if never."""
    solved = returns >= 475
    first = timesteps[solved][0] if solved.any() else np.inf
    below = np.flatnonzero(~solved)
    after = below[-1] + 1 if len(below) else 0
    return first, timesteps[after] if after < len(timesteps) else np.inf


def learned(saved):
    """Number of runs that passed, greedy mean of the worst run, median steps to both milestones."""
    greedy = saved["greedy_return"].mean(axis=1)
    passed = f"{np.sum(greedy >= 475)} of {len(greedy)}"
    timesteps = np.broadcast_to(saved["timesteps"].T, saved["returns"].T.shape)
    steps = [milestones(t, r) for t, r in zip(timesteps, saved["returns"].T, strict=True)]
    medians = np.median(steps, axis=0)
    shown = ["never" if np.isinf(median) else f"{median / 1e3:.0f}k" for median in medians]
    return passed, f"{greedy.min():.0f}", *shown


def picture(curves):
    """Draw the curves of the four learners: each run thin, the median bold, 475 dotted."""
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
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def learning():
    """Measure twenty runs of each learner together, and one run of each script, twice."""
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
    for script in ["gridworld_qlearning.py", "mountaincar_env.py"]:
        waiting = np.mean([run(ROOT / script, save=False)[0] for _ in range(2)])
        rows.append([f"`{script}`", *[""] * 7, f"{waiting:.1f}"])
    picture(curves)
    head = ["script", "passed", "worst run", "first at 475", "at 475 from"]
    head += ["M steps/s, one run", "M steps/s, twenty runs"]
    return table([*head, "compiling, s", "command to end, s"], rows)


def scaling():
    """Measure the speed of 1 to 16,384 agents, then of 1 to 65,536 cars."""
    rows = []
    for agents, steps in [(1, 3e7), (30, 2e6), (1024, 2e5), (16384, 2e4)]:
        flags = ["--num-seeds", str(agents), "--total-timesteps", f"{steps:g}"]
        flags += ["--log-interval", f"{min(1e6, steps / 2):g}"]
        speed = speed_of(run(ROOT / "gridworld_qlearning.py", *flags, save=False)[1])
        rows.append([f"{agents:,}", f"`gridworld_qlearning.py {' '.join(flags)}`", f"{speed:.0f}"])
    for envs, steps in [(1, 1e8), (16, 4e8), (256, 5e8), (4096, 1e9), (65536, 1e9)]:
        flags = ["--num-envs", str(envs), "--total-timesteps", f"{steps:g}"]
        speed = speed_of(run(ROOT / "mountaincar_env.py", *flags, save=False)[1])
        rows.append([f"{envs:,}", f"`mountaincar_env.py {' '.join(flags)}`", f"{speed:.0f}"])
    return table(["agents or cars", "command", "M steps/s"], rows)


def unlearned_returns(env_id):
    """Mean returns of 100 episodes with random actions, and of 100 with action 0 at each step."""
    env, env_params = gymnax.make(env_id)
    space = env.action_space(env_params)

    def step(scale, carry, key):
        env_state, alive, total = carry
        key_action, key_step = jax.random.split(key)
        action = scale * space.sample(key_action)
        _, env_state, reward, terminated, truncated, _ = env.step(key_step, env_state, action)
        return (env_state, alive & ~(terminated | truncated), total + alive * reward), None

    def episode(scale, key):
        key_reset, key_steps = jax.random.split(key)
        _, env_state = env.reset(key_reset)
        keys = jax.random.split(key_steps, int(env_params.max_steps_in_episode))
        return jax.lax.scan(partial(step, scale), (env_state, True, 0.0), keys)[0][2]

    episodes = jax.jit(jax.vmap(episode, in_axes=(None, 0)))
    keys = jax.random.split(jax.random.key(0), 100)
    return [float(episodes(scale, keys).mean()) for scale in (1, 0)]  # 0: every action is action 0


def every_environment():
    """Measure three runs of REINFORCE on each environment of gymnax; count where it learns."""
    rows, mean_above, worst_above = [], 0, 0
    for env_id in [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]:
        flags = ENV_FLAGS.get(env_id, "")
        command = ["--env-id", env_id, "--num-seeds", "3", *flags.split()]
        seconds, _, saved = run(ROOT / "reinforce_parallel.py", *command)
        greedy = saved["greedy_return"].mean(axis=1)
        random, idle = unlearned_returns(env_id)
        unlearned = max(random, idle) + 0.005  # equal returns differ by rounding
        mean_above += greedy.mean() > unlearned
        worst_above += greedy.min() > unlearned
        result = f"{greedy.mean():.2f} ({greedy.min():.2f} to {greedy.max():.2f})"
        flags = f"`{flags}`" if flags else "defaults"
        rows.append([env_id, flags, f"{random:.2f}", f"{idle:.2f}", result, f"{seconds:.0f}"])
    head = ["environment", "flags", "random play", "always action 0", "greedy (worst to best run)"]
    return f"""{table([*head, "command to end, s"], rows)}
The greedy mean is above both random play and always action 0 in {mean_above} of {len(rows)}
environments. In {worst_above} of these, even the worst run is above both; elsewhere, the
difference may be chance.
"""


def other_tasks():
    """Measure twenty runs of each command in TASKS, and random play."""
    rows = []
    for command in TASKS:
        command += " --total-timesteps 500000 --num-seeds 20"
        script, *flags = command.split()
        _, _, saved = run(ROOT / script, *flags)
        greedy = saved["greedy_return"].mean(axis=1)
        random, _ = unlearned_returns(env_id=flags[1])
        numbers = f"{random:.0f}", f"{greedy.mean():.0f}", f"{greedy.min():.0f}"
        rows.append([f"`{command}`", *numbers, f"{saved['train_seconds']:.0f}"])
    return table(["command", "random play", "greedy, mean", "worst run", "training, s"], rows)


def ablations():
    """Measure twenty runs with each flag, then twenty runs of a copy with each other line."""
    rows = []
    for command in FLAG_ABLATIONS:
        script, *flags = command.split()
        saved = run(ROOT / script, *flags, *TWENTY)[2]
        rows.append([f"`{script}`", f"`{' '.join(flags)}`", *learned(saved)])
    for script, line, other in LINE_ABLATIONS:
        text = (ROOT / script).read_text()
        assert text.count(line) == 1, f"{line!r} occurs {text.count(line)} times in {script}"
        copy = FOLDER / script
        copy.write_text(text.replace(line, other))
        saved = run(copy, *TWENTY)[2]
        rows.append([f"`{script}`", f"`{line}` becomes `{other}`", *learned(saved)])
    head = ["script", "change", "passed", "worst run", "first at 475", "at 475 from"]
    return table(head, rows)


def grid_world():
    """Compare what twenty agents learn with the exact value of the start."""
    _, lines, saved = run(ROOT / "gridworld_qlearning.py", *TWENTY)
    args = json.loads(str(saved["args"]))
    values = saved["q_table"][:, -1, -1].max(axis=-1)  # the start is the last cell
    exponent = sum(args["grid_size"]) - 3  # the shortest path has one step more
    exact = args["gamma"] ** exponent
    error = np.abs(values - exact).max()
    return f"""`{lines[-1]}`.
The exact value is {args["gamma"]}^{exponent} = {exact:.5f}. The largest error is {error:.0e}.
"""


def main():
    """Measure everything, then write tests/RESULTS.md."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ["jax", "optax", "gymnax"]
    )
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    machine = f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}, {versions}"
    page = f"""# Results

Written by `python tests/benchmark.py` on {date.today()}: {machine}.
The machine is shared with other programs, so the speed of a short run can vary by a factor of two.
What is learned does not vary.

## Learning

Each learner makes 20 runs on CartPole-v1 (`--num-seeds 20`, seeds 0 to 19, default flags). A run
passes if its greedy policy has a mean return of at least 475 over 100 new episodes. "First at 475"
is the number of environment steps to the first progress line with a training return of at least
475. "At 475 from" is the number of steps to the line from which all lines have such a return. Both
are medians over all 20 runs. The speed and the seconds of one run are means of two. The other two
scripts learn something else, or nothing: only their seconds are in this table.

{learning()}
The last line of `python gridworld_qlearning.py --num-seeds 20`: {grid_world()}
## Scaling

{scaling()}
## The TD scripts on other tasks

Each command makes 20 runs of 500,000 steps, then plays 100 greedy episodes per run. A mean return
of -110 solves MountainCar-v0. parallel_td.py mostly fails there; it has no replay buffer.

{other_tasks()}
## REINFORCE on every environment of gymnax

This is `reinforce_parallel.py --num-seeds 3` on all environments that gymnax registers, except
MNISTBandit-bsuite, which would download data. "Random play" and "always action 0" (often: doing
nothing) are mean returns of 100 episodes without learning. "Greedy" is the mean return of the
learned policy, undiscounted and without exploration, over three runs. Where the default flags do
not learn or take too long, the table has others.

Environments in which nothing is learned are in the table on purpose.

{every_environment()}
## What each ingredient is worth

Each row makes 20 runs with one change: another value of a flag, or another line in a copy of the
script. The columns are those of the first table, which shows the unchanged scripts.

{ablations()}
"""
    (ROOT / "tests" / "RESULTS.md").write_text(page)


if __name__ == "__main__":
    main()
