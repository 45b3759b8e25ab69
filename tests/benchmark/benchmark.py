"""Measure what README.md and the pages beside this file say.

    python tests/benchmark/benchmark.py seconds ablations    # or other sections

The sections are `lesson`, `learning`, `ablations`, `tasks`, `seconds` and `recipes`. On two cores,
`lesson` takes about an hour, `learning` one and a half, `tasks` one, and the others half of one or
less. A section replaces its table in the page that has its mark, up to the line that says when it
was measured. What stands around it is written by hand: read it again after a section has run.
"""

import argparse
import itertools
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PICTURES, RECIPES = ROOT / ".pictures", ROOT / "tests" / "recipes"
PAGES = [Path(__file__).with_name(name) for name in ("README.md", "MORE.md")]
PARALLEL, REPLAY, DECAY = TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
GRID, REINFORCE, CAR = "gridworld_qlearning.py", "reinforce_parallel.py", "mountaincar_env.py"
PPO, PQN, DQN = NETWORKS = ["ppo.py", "pqn.py", "dqn.py"]  # in tests/recipes
CARTPOLE = [*TRIO, REINFORCE]
SCRIPTS = [GRID, *CARTPOLE, CAR]
FRESH = "--seed 271000"  # nothing was chosen on these seeds, nor on those from 400000 on
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # the seconds of a command include compiling
DEVICES = set()  # on which the commands ran


class Result(NamedTuple):
    """What a command printed and saved."""

    seconds: float  # from the start of the command to its end
    lines: list  # that were printed
    saved: dict  # arrays, by name


def run(script, flags="", text=None, save=True):
    """Run a copy of a script, or another text under its name."""
    print("+", time.strftime("%H:%M:%S"), script, flags, "(changed)" if text else "", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, saved = Path(folder) / script, Path(folder) / "saved.npz"
        path.write_text(text or (ROOT / script).read_text())
        command = [sys.executable, script, *flags.split()]
        if save:
            command += ["--save", saved.name]
        began = time.perf_counter()
        process = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - began
        if process.returncode != 0:
            sys.exit(f"{script} {flags} failed")
        DEVICES.update(re.findall(r"devices: (.+?)  compiled", process.stdout))
        return Result(seconds, process.stdout.splitlines(), dict(np.load(saved)) if save else {})


def patched(script, *recipes):
    """Return the text of a script after recipes of tests/recipes."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / script
        copy.write_text((ROOT / script).read_text())
        for recipe in recipes:
            command = ["patch", "--fuzz=0", copy, RECIPES / f"{recipe}.patch"]
            process = subprocess.run(command, capture_output=True, text=True)
            if process.returncode != 0:
                sys.exit(f"{recipe}.patch no longer applies to {script}:\n{process.stdout}")
        return copy.read_text()


def replaced(script, old, new):
    """Return the text of a script in which `new` takes the place of `old`."""
    text = (ROOT / script).read_text()
    if text.count(old) != 1:
        sys.exit(f"{script} should have this text once, but has it {text.count(old)} times:\n{old}")
    return text.replace(old, new)


def table(head, rows):
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def mean(values, digits=1):
    """Format a mean, and half of its 95 % interval."""
    half = 1.96 * np.std(values) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def greedy_means(result):
    """Mean greedy return of each run (R,)."""
    return result.saved["learned.greedy_return"].mean(axis=1)


def policy_of(script, env_id):
    """Return best_action(params, obs) of a script of tests/recipes."""
    import gymnax
    import jax.numpy as jnp

    sys.path.insert(0, str(RECIPES))
    module = import_module(Path(script).stem)
    env, env_params = gymnax.make(env_id)
    run = SimpleNamespace(env=env, env_params=env_params)
    if script == PPO:
        return lambda params, obs: module.best_action(params["actor"], obs)
    return lambda params, obs: jnp.argmax(module.q_values(run, params, obs))


def make_player(best_action, env_id, episodes):
    """Return a function of params (R, ...) and epsilon: the mean returns (R,) of episodes."""
    import gymnax
    import jax
    import jax.numpy as jnp

    env, env_params = gymnax.make(env_id)

    def episode_return(params, key, epsilon):
        def step(carry, keys):
            obs, state, alive = carry
            explore = jax.random.bernoulli(keys[0], epsilon)
            random_action = env.action_space(env_params).sample(keys[1])
            action = jnp.where(explore, random_action, best_action(params, obs))
            obs, state, reward, terminated, truncated, _ = env.step(
                keys[2], state, action, env_params
            )
            return (obs, state, alive & ~(terminated | truncated)), jnp.where(alive, reward, 0.0)

        key_reset, key_steps = jax.random.split(key)
        obs, state = env.reset(key_reset, env_params)
        keys = jax.random.split(key_steps, (env_params.max_steps_in_episode, 3))
        _, rewards = jax.lax.scan(step, (obs, state, True), keys)
        return jnp.sum(rewards)

    keys = jax.random.split(jax.random.key(600_000), episodes)  # the same starts for all programs
    many_episodes = jax.vmap(episode_return, in_axes=(None, 0, None))
    many_runs = jax.vmap(many_episodes, in_axes=(0, None, None))
    return jax.jit(lambda params, epsilon: jnp.mean(many_runs(params, keys, epsilon), axis=1))


CARTPOLE_HEAD = ["passed", "worst run", "greedy return", "first at 475", "training return"]


def cartpole_cells(*results):
    """Format the columns of CARTPOLE_HEAD, for the runs of all results."""
    greedy = np.concatenate([greedy_means(result) for result in results])  # (R,)
    returns = np.hstack([result.saved["curves.returns"] for result in results])  # (K, R)
    timesteps = np.hstack([result.saved["curves.timesteps"] for result in results])
    first = np.median(np.where(returns >= 475, timesteps, np.inf).min(axis=0))
    return [
        f"{np.sum(greedy >= 475):,} of {len(greedy):,}",
        f"{greedy.min():.0f}",
        mean(greedy),
        "never" if np.isinf(first) else f"{first / 1e3:.0f}k",
        mean(np.nanmean(returns[-3:], axis=0), 0),
    ]


# The sections. Each returns its part of the page.

MOUNTAIN_CAR = "--env-id MountainCar-v0 --num-centers 1000 --total-timesteps 5e5 --sigma 0.15"
# Each step adds one idea. All updates learn from 16 transitions.
STEPS = {
    "parallel_td.py": (PARALLEL, ""),
    "and a replay buffer": (REPLAY, "--batch-size 16 --tau 1"),
    "and averaged weights: replay_td.py": (REPLAY, "--batch-size 16"),
    "and a decaying epsilon: epsilon_decay_td.py": (DECAY, "--batch-size 16"),
}
RATES = ["0.001", "0.003", "0.01", "0.03", "0.1", "0.3"]
# Flags, the bound of a run that passes, and seeds on which the rate is chosen. On CartPole-v1, ten
# would not show that one run of ten fails.
LESSON = {"MountainCar-v0": (MOUNTAIN_CAR, -125, 10), "CartPole-v1": ("", 475, 100)}


def lesson():
    """What a replay buffer, averaged weights and a decaying epsilon are worth, one by one."""
    cases = list(itertools.product(LESSON, STEPS))
    results = list(itertools.starmap(choose_rate_and_run, cases))
    draw_lesson([result for _, result in results[: len(STEPS)]])  # of MountainCar-v0
    rows = []
    for (task, step), (rate, result) in zip(cases, results, strict=True):
        greedy, (script, flags) = greedy_means(result), STEPS[step]
        passed = f"{np.sum(greedy >= LESSON[task][1])} of 100"
        training = mean(np.nanmean(result.saved["curves.returns"][-3:], axis=0), 0)
        command = " ".join(f"`{script} {flags} --learning-rate {rate}`".split())
        cells = passed, mean(greedy), f"{greedy.min():.0f}", training, command
        rows.append([f"{task}: {step}", *cells])
    head = ["", "passed", "greedy return", "worst run", "training return", "command"]
    return table(head, rows)


def choose_rate_and_run(task, step):
    """Choose the best learning rate. Return it, and what it makes of 100 fresh seeds."""
    (flags, _, num_seeds), (script, more) = LESSON[task], STEPS[step]
    rates = f"--learning-rate {' '.join(RATES)}"
    searched = run(script, f"{flags} {more} {rates} --num-seeds {num_seeds} --seed 60000")
    rate = RATES[best_rate(searched)]
    command = f"{flags} {more} --learning-rate {rate} --num-seeds 100 {FRESH}"
    return rate, run(script, command, patched(script, "greedy_returns"))


def best_rate(result):
    """Number of the rate with the best greedy return; of equal ones, the best training return."""
    training = np.nanmean(result.saved["curves.returns"], axis=0)  # of all lines
    scores = greedy_means(result) + training / 1000
    return scores.reshape(len(RATES), -1).mean(axis=1).argmax()


def draw_lesson(results):
    """Draw each step on MountainCar-v0: the median greedy return, and the middle 80 % of the runs.

    Thin lines are the medians of the steps before it.
    """
    figure = Figure(figsize=(11, 3.1), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(STEPS), sharex=True, sharey=True)
    for i, (axes, step, result) in enumerate(zip(panels, STEPS, results, strict=True)):
        for before in panels[:i]:
            axes.plot(*before.get_lines()[-1].get_data(), color="gray", linewidth=1)
        x = result.saved["curves.timesteps"][:, 0] / 1e3
        y = result.saved["curves.greedy_return"]
        low, median, high = np.quantile(y, [0.1, 0.5, 0.9], axis=1)
        axes.fill_between(x, low, high, color="C0", alpha=0.25, linewidth=0)
        axes.plot(x, median, color="C0", linewidth=2.5)
        axes.set_title(step.replace(": ", "\n"), fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="greedy return")
    figure.supxlabel("thousand environment steps", fontsize="medium")
    figure.savefig(PICTURES / "lesson.png")


def learning():
    """All learners on fresh seeds."""
    rows = []
    for script, num_seeds, size in [
        (PARALLEL, 4000, 1000),
        (REPLAY, 4000, 400),  # at a time, since the buffers of more would not fit into 24 GB
        (DECAY, 4000, 400),
        (REINFORCE, 400, 400),
    ]:
        seeds = range(500_000, 500_000 + num_seeds, size)
        results = [run(script, f"--num-seeds {size} --seed {seed}") for seed in seeds]
        rows.append([f"`{script}`", *cartpole_cells(*results)])
    grid = run(GRID, "--num-seeds 400 --seed 500000")
    arrive = np.sum(grid.saved["learned.greedy_steps"] == 18)
    error = np.abs(grid.saved["learned.start_value"] - 0.9**17).max()
    text = f"`{GRID}`: {arrive} of 400 agents find a shortest path. The largest error of the"
    return f"{table(['command', *CARTPOLE_HEAD], rows)}\n{text} value of the start is {error:.0e}."


def ablations():
    """Each learner with one change."""
    ended = 'terminated=info["returned_episode"]'  # terminated or truncated
    schedule = "optax.linear_schedule(run.learning_rate, 0.0, run.num_updates)"
    changes = {
        PARALLEL: (PARALLEL, ""),
        "gradient through the target": (PARALLEL, "", patched(PARALLEL, "full_gradient")),
        "a time limit taken for an end": (
            PARALLEL,
            "",
            replaced(PARALLEL, "terminated=terminated", ended),
        ),
        "constant learning rate": (PARALLEL, "", replaced(PARALLEL, schedule, "run.learning_rate")),
        REPLAY: (REPLAY, ""),
        "no averaged target: --tau 1": (REPLAY, "--tau 1"),
        "a small buffer: --buffer-size 1000": (REPLAY, "--buffer-size 1000"),
        "little exploration: --epsilon 0.05": (REPLAY, "--epsilon 0.05"),
        DECAY: (DECAY, ""),
        "little exploration: --end-e 0.01": (DECAY, "--end-e 0.01"),
        "a network: dqn.patch": (DECAY, "", patched(DECAY, "dqn")),
    }
    rows = []
    for what, (script, flags, *text) in changes.items():
        result = run(script, f"{flags} --num-seeds 40 {FRESH}", *text)
        rows.append([what, *cartpole_cells(result)])
    return table(["change", *CARTPOLE_HEAD], rows)


# Other tasks, with the commands of the docstrings, and a bound that a good run reaches.
CONTINUOUS = (
    "--env-id MountainCarContinuous-v0"
    " --num-envs 64 --num-iterations 200 --learning-rate 0.005 --gamma 1"
)
ACROBOT = "--env-id Acrobot-v1 --num-centers 1000 --total-timesteps 5e5"
ACROBOT_EPISODES = "--env-id Acrobot-v1 --num-envs 256 --num-iterations 50 --learning-rate 0.03"
TASKS = [
    *((script, ACROBOT, -200) for script in TRIO),
    (REINFORCE, ACROBOT_EPISODES, -200),
    (REPLAY, f"{MOUNTAIN_CAR} --learning-rate 0.01", -125),
    (DECAY, f"{MOUNTAIN_CAR} --learning-rate 0.01", -125),
    (REINFORCE, CONTINUOUS, 75),
    (REINFORCE, "--env-id Pendulum-v1 --num-envs 128 --num-iterations 500", -260),
]


def tasks():
    """The commands for other tasks, on 100 fresh seeds."""
    rows = []
    for script, flags, bound in TASKS:
        seed = "--seed 352000" if flags == CONTINUOUS else FRESH
        greedy = greedy_means(run(script, f"{flags} --num-seeds 100 {seed}"))
        reached = f"{np.sum(greedy >= bound)} of 100 ({bound})"
        rows.append([f"`{script} {flags}`", mean(greedy), f"{greedy.min():.1f}", reached])
    return table(["command", "mean", "worst run", "reach the bound"], rows)


def seconds():
    """Whole commands, with the scripts in turn: medians of five, and of three with 20 seeds."""
    one = np.median([[seconds_of(x) for x in SCRIPTS] for _ in range(5)], axis=0)
    twenty = [[seconds_of(x, "--num-seeds 20") for x in CARTPOLE] for _ in range(3)]
    many = np.median(twenty, axis=0)
    rows = [[f"`{x}`", f"{y[0]:.1f}", f"{y[1]:.1f}", ""] for x, y in zip(SCRIPTS, one, strict=True)]
    for script, (whole, _) in zip(CARTPOLE, many, strict=True):
        rows[SCRIPTS.index(script)][-1] = f"{whole:.1f}"
    return table(["script", "one run", "of these, compiling", "twenty runs"], rows)


def seconds_of(script, flags=""):
    """Return the seconds of a whole command, and those of compiling."""
    result = run(script, flags, save=False)
    [compiling] = re.findall(r"compiled in ([\d.]+) s", result.lines[0])
    return result.seconds, float(compiling)


def recipes():
    """Run each command in a recipe's head, after the recipe, and print what it reports."""
    for path in sorted(RECIPES.glob("*.patch")):
        head = path.read_text().partition("\n--- ")[0]
        for script, flags, also in re.findall(r"^    python (\S+)([^#\n]*)(.*)$", head, re.M):
            others = re.findall(r"(\w+)\.patch", also)
            print("after", *others, path.stem)
            lines = run(script, flags, patched(script, *others, path.stem), save=False).lines
            last = max(i for i, line in enumerate(lines) if line.startswith("step "))
            print(*lines[last:], sep="\n", flush=True)


def write(name, text):
    """Put the table of a section below its mark, and say when and where it was measured."""
    git = ["git", "-C", ROOT]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    paths = ":(glob)*.py", "tests/recipes"
    if subprocess.check_output([*git, "status", "--porcelain", "--", *paths]):
        commit += " with changes"
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    devices = " and ".join(sorted(DEVICES)).replace("cpu", model)
    machine = f"{devices}, Python {platform.python_version()}, jax {version('jax')}"
    stamp = f"Measured on {date.today()}, commit {commit}: {machine}.\n"
    mark = f"<!-- {name} -->\n"
    [page] = [page for page in PAGES if mark in page.read_text()]
    before, rest = page.read_text().split(mark)
    _, after = re.split(r"^Measured on .*\n", rest, maxsplit=1, flags=re.MULTILINE)
    page.write_text(f"{before}{mark}{text}\n{stamp}{after}")


def main():
    """Run the sections that are asked for."""
    sections = {f.__name__: f for f in (lesson, learning, ablations, tasks, seconds)}
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="+", choices=[*sections, "recipes"], metavar="SECTION")
    for name in parser.parse_args().sections:
        DEVICES.clear()
        if name == "recipes":
            recipes()
        else:
            write(name, sections[name]())


if __name__ == "__main__":
    main()
