"""Measure what README.md and the pages beside this file say.

    python tests/benchmark/benchmark.py lesson_cartpole    # one table
    python tests/benchmark/benchmark.py lesson learning    # all tables whose names begin so
    python tests/benchmark/benchmark.py recipes            # the numbers in the heads of recipes

--help lists the sections. Each replaces its table in the page that has its mark, and the line that
says when and where it was measured, so a table is of one machine. What stands around it is written
by hand: read it again after a section has run. On two cores, the two tables of `lesson` take about
an hour together, those of `learning` two, those of `tasks` two, and the others half of one or less.
"""

import argparse
import json
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
STORED = Path(__file__).with_name("recipes.json")  # what the commands in heads of recipes printed
FRESH = "--seed 271000"  # nothing of the scripts in the top folder was chosen on these seeds
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # the seconds of a command include compiling
DEVICES = set()  # on which the commands ran


class Result(NamedTuple):
    """What a command printed and saved."""

    seconds: float  # from the start of the command to its end
    lines: list  # that were printed
    saved: dict  # arrays, by name


def text_of(script):
    """Return the text of a script."""
    return ((RECIPES if script in NETWORKS else ROOT) / script).read_text()


def run(script, flags="", text=None, save=True):
    """Run a copy of a script, or another text under its name."""
    print("+", time.strftime("%H:%M:%S"), script, flags, "(changed)" if text else "", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, saved = Path(folder) / script, Path(folder) / "saved.npz"
        path.write_text(text or text_of(script))
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
    text = text_of(script)
    for recipe in recipes:
        patch = RECIPES / f"{recipe}.patch"
        name = re.search(r"^--- a/(\S+)", patch.read_text(), re.M)[1]  # perhaps of another script
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / name
            copy.write_text(text)
            if subprocess.run(["git", "apply", patch], cwd=folder).returncode != 0:
                sys.exit(f"{recipe}.patch no longer applies to {script}")
            text = copy.read_text()
    return text


def replaced(script, old, new):
    """Return the text of a script in which `new` takes the place of `old`."""
    text = text_of(script)
    if text.count(old) != 1:
        sys.exit(f"{script} should have this text once, but has it {text.count(old)} times:\n{old}")
    return text.replace(old, new)


def table(head, rows):
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def mean(values, digits=1):
    """Format a mean, and half of its 95 % interval."""
    half = 1.96 * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def greedy_means(result):
    """Mean greedy return of each run (R,)."""
    return result.saved["learned.greedy_return"].mean(axis=1)


def policy_of(script):
    """Return best_action(learned, obs) of a script of tests/recipes."""
    import jax.numpy as jnp

    sys.path.insert(0, str(RECIPES))
    module = import_module(Path(script).stem)
    if script == PPO:
        return lambda learned, obs: module.best_action(learned["params"]["actor"], obs)
    return lambda learned, obs: jnp.argmax(module.q_values(**learned, obs=obs))


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
    first = np.median(np.concatenate([first_at(result, 475) for result in results]))
    return [
        f"{np.sum(greedy >= 475):,} of {len(greedy):,}",
        f"{greedy.min():.0f}",
        mean(greedy),
        "never" if np.isinf(first) else f"{first / 1e3:.0f}k",
        mean(np.nanmean(returns[-3:], axis=0), 0),
    ]


# The sections. Each returns its part of the page.

# Each step adds one idea. All updates learn from 16 transitions.
STEPS = {
    "Q-learning": (PARALLEL, ""),
    "+ replay buffer": (REPLAY, "--batch-size 16 --tau 1"),
    "+ target network": (REPLAY, "--batch-size 16"),
    "+ decaying epsilon": (DECAY, "--batch-size 16"),
}
MOUNTAIN_CAR = "--env-id MountainCar-v0 --num-centers 1000 --total-timesteps 5e5"
# What is searched on MountainCar-v0 for each step: 45 settings.
WIDTHS = ["--sigma 0.1 0.15 0.2"]
GRID_SEARCH = "--learning-rate 0.003 0.01 0.03 --{epsilon} 0.05 0.15 0.25 0.35 0.5"
# And 27 with tiles in the place of the script's features. A number of tiles cannot be swept.
TILES = "--env-id MountainCar-v0 --num-tilings 8 --total-timesteps 5e5"
TILES_WIDTHS = ["--num-tiles 4", "--num-tiles 8", "--num-tiles 16"]
TILES_SEARCH = "--learning-rate 0.01 0.03 0.1 --epsilon 0 0.05 0.15"
# And 45 with plain gradient steps in the place of Adam's. Its rates are of another size.
SGD_SEARCH = "--learning-rate 0.1 0.3 1 --epsilon 0.05 0.15 0.25 0.35 0.5"
LESSON_HEAD = [
    "passed",
    "greedy return",
    "worst run",
    "training return",
    "first at -150",
    "command",
]


def lesson_mountaincar():
    """What a buffer, a target network and other changes are worth, and the figure of it."""
    rows, drawn = [], {}

    def add(name, script, chosen, text):
        drawn[name] = run(script, f"{chosen} --num-seeds 100 {FRESH}", text)
        rows.append([name, *lesson_cells(drawn[name], -125, -150), f"`{script} {chosen}`"])

    for step, (script, flags) in STEPS.items():
        grid = GRID_SEARCH.format(epsilon="end-e" if script == DECAY else "epsilon")
        chosen = search(script, f"{MOUNTAIN_CAR} {flags}".strip(), WIDTHS, grid)
        add(step, script, chosen, patched(script, "greedy_returns"))
    for step in ["Q-learning", "+ replay buffer", "+ target network"]:
        script, flags = STEPS[step]
        flags, text = f"{MOUNTAIN_CAR} {flags}".strip(), with_sgd(text_of(script))
        chosen = search(script, flags, WIDTHS, SGD_SEARCH, text)
        add(f"{step} with SGD", script, chosen, with_sgd(patched(script, "greedy_returns")))
    draw_lesson({name: drawn[name] for name in [*STEPS, "Q-learning with SGD"]})
    tiles = patched(PARALLEL, "tile_coding")
    chosen = search(PARALLEL, TILES, TILES_WIDTHS, TILES_SEARCH, tiles)
    add("Q-learning with tiles as features", PARALLEL, chosen, tiles)
    return table(["MountainCar-v0", *LESSON_HEAD], rows)


def with_sgd(text):
    """Return the text of a script with plain gradient steps in the place of Adam's."""
    before, _, after = text.partition("optax.adam(")
    if not after:
        sys.exit("no optax.adam( to replace")
    return before + "optax.sgd(" + after


def search(script, flags, widths, grid, text=None):
    """Return the flags of the best setting. All have 3 seeds, and the best four 10 more.

    The best has the highest mean greedy return; of equal ones, the highest training return.
    """
    scores = {}
    for width in widths:
        result = run(script, f"{flags} {width} {grid} --num-seeds 3 --seed 60000", text)
        swept = re.findall(r"--(\S+)", f"{width} {grid}")
        for setting, of_seeds in setting_scores(result, swept, width).items():
            scores[f"{flags} {setting}"] = of_seeds
    best = sorted(scores, key=lambda setting: -overall(scores[setting]))[:4]
    for setting in best:
        more = run(script, f"{setting} --num-seeds 10 --seed 70000", text)
        scores[setting] = np.append(scores[setting], run_scores(more))
        print(f"  {np.mean(scores[setting]):.2f} {setting}", flush=True)
    return max(best, key=lambda setting: overall(scores[setting]))


def overall(scores):
    """Mean of scores. If one is nan, since a run diverged, it is the lowest number."""
    return np.nan_to_num(np.mean(scores), nan=-np.inf)


def setting_scores(result, swept, width):
    """Scores (seeds,) of each setting, by the flags that make it."""
    scores = {}
    for setting in dict.fromkeys(result.saved["runs.setting"]):
        rows = result.saved["runs.setting"] == setting
        flags = []
        for name in swept:
            values = result.saved.get(f"runs.{name.replace('-', '_')}")
            flags.append(width if values is None else f"--{name} {values[rows][0]:g}")
        scores[" ".join(flags)] = run_scores(result)[rows]
    return scores


def run_scores(result):
    """Greedy return (R,), with a little of the training return of all lines to order equal ones."""
    return greedy_means(result) + np.nanmean(result.saved["curves.returns"], axis=0) / 1000


def lesson_cells(result, bound, early):
    """Format the first columns of LESSON_HEAD."""
    greedy, returns = greedy_means(result), result.saved["curves.returns"]
    first = np.median(first_at(result, early))
    return [
        f"{np.sum(greedy >= bound)} of {len(greedy)}",
        mean(greedy),
        f"{greedy.min():.0f}",
        mean(np.nanmean(returns[-3:], axis=0), 0),
        "never" if np.isinf(first) else f"{first / 1e3:.0f}k",
    ]


def first_at(result, bound):
    """Environment steps (R,) until the returns of training reach a bound; infinite if never."""
    reached = result.saved["curves.returns"] >= bound
    return np.where(reached, result.saved["curves.timesteps"], np.inf).min(axis=0)


def lesson_cartpole():
    """The same steps on CartPole-v1, where only the rate is searched, on 100 seeds.

    Ten seeds would not show that one run of ten fails.
    """
    rates, larger = "0.001 0.003 0.01 0.03 0.1 0.3", "0.01 0.03 0.1 0.3 0.6 1"
    cases = [(step, *script_and_flags, rates, None) for step, script_and_flags in STEPS.items()]
    cases.append(("Q-learning with SGD", PARALLEL, "", larger, with_sgd(text_of(PARALLEL))))
    rows = []
    for step, script, flags, rates, text in cases:
        flags_of_search = f"{flags} --learning-rate {rates} --num-seeds 100 --seed 60000"
        scores = setting_scores(run(script, flags_of_search, text), ["learning-rate"], "")
        chosen = f"{flags} {max(scores, key=lambda rate: overall(scores[rate]))}".strip()
        result = run(script, f"{chosen} --num-seeds 100 {FRESH}", text)
        *cells, _ = lesson_cells(result, 475, 475)
        rows.append([step, *cells, f"`{script} {chosen}`"])
    head = [name for name in LESSON_HEAD if name != "first at -150"]
    return table(["CartPole-v1", *head], rows)


def draw_lesson(drawn):
    """Draw rows on MountainCar-v0: the median greedy return, and the middle 80 % of the runs.

    The thin line is the median of the step before, or that of Q-learning (with Adam) beside SGD.
    """
    figure = Figure(figsize=(11.5, 3), layout="constrained", dpi=170)
    panels = figure.subplots(1, len(drawn), sharex=True, sharey=True)
    medians = {}
    for axes, (name, result) in zip(panels, drawn.items(), strict=True):
        x = result.saved["curves.timesteps"][:, 0] / 1e3
        y = result.saved["curves.greedy_return"]
        low, median, high = np.quantile(y, [0.1, 0.5, 0.9], axis=1)
        axes.axhline(-125, color="black", linestyle=":", linewidth=1)
        axes.fill_between(x, low, high, color="C0", alpha=0.25, linewidth=0)
        if medians:
            other = "Q-learning" if "SGD" in name else list(medians)[-1]
            axes.plot(x, medians[other], color="black", linewidth=1)
            label = f"black:\n{other.strip('+ ')}"
            axes.text(0.97, 0.05, label, transform=axes.transAxes, horizontalalignment="right")
        axes.plot(x, median, color="C0", linewidth=2.5)
        axes.set_title(name)
        axes.spines[["top", "right"]].set_visible(False)
        medians[name] = median
    panels[0].set(ylabel="greedy return")
    panels[0].text(20, -122, "-125")
    figure.supxlabel("thousand environment steps", fontsize="medium")
    figure.savefig(PICTURES / "lesson.png")


def learning_scripts():
    """The scripts on thousands of fresh seeds."""
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


def learning_networks():
    """PPO, PQN and DQN on 400 fresh seeds, also with random actions."""
    rows = []
    for script in NETWORKS:
        # Settings of these three were chosen, or tried, on seeds from 271000 to 771000.
        seeds = range(871_000, 871_400, 100)
        results = [run(script, f"--num-seeds 100 --seed {seed}") for seed in seeds]
        *cells, first, training = cartpole_cells(*results)
        play = make_player(policy_of(script), "CartPole-v1", 100)
        parts = [play(params_of(script, result.saved), 0.05) for result in results]
        returns = np.concatenate(parts)  # (R,)
        cells += [f"{np.sum(returns >= 475)} of {len(returns)}", first, training]
        rows.append([f"`{script}`", *cells])
    *head, first, training = CARTPOLE_HEAD
    return table(["command", *head, "passed with 5 % random actions", first, training], rows)


def params_of(script, saved):
    """Return what all runs have learned, as policy_of(script) takes it."""
    if script == PPO:
        names = ["w0", "b0", "w1", "b1"]
        return {"params": {"actor": {x: saved[f"learned.params.actor.{x}"] for x in names}}}
    params = [{x: saved[f"learned.params.{i}.{x}"] for x in ("w", "b")} for i in range(3)]
    return {"bounds": saved["learned.bounds"], "params": params}


def ablations():
    """Each learner with one change."""
    schedule = "optax.linear_schedule(run.learning_rate, 0.0, run.num_updates)"
    changes = {
        PARALLEL: (PARALLEL, ""),
        "gradient through the target": (PARALLEL, "", patched(PARALLEL, "full_gradient")),
        "constant learning rate": (PARALLEL, "", replaced(PARALLEL, schedule, "run.learning_rate")),
        REPLAY: (REPLAY, ""),
        "no averaged target: --tau 1": (REPLAY, "--tau 1"),
        "a small buffer: --buffer-size 1000": (REPLAY, "--buffer-size 1000"),
        "little exploration: --epsilon 0.05": (REPLAY, "--epsilon 0.05"),
        DECAY: (DECAY, ""),
        "little exploration: --end-e 0.01": (DECAY, "--end-e 0.01"),
    }
    rows = []
    for what, (script, flags, *text) in changes.items():
        result = run(script, f"{flags} --num-seeds 40 {FRESH}", *text)
        rows.append([what, *cartpole_cells(result)])
    return table(["change", *CARTPOLE_HEAD], rows)


def time_limits():
    """What it costs to take a time limit for an end, in runs with the same seeds."""
    ended = 'terminated=info["returned_episode"]'  # terminated or truncated
    no_value = "jnp.where(terminated, 0.0, values(next_obs))"
    changed = {
        script: replaced(script, "terminated=terminated", ended)
        for script in (PARALLEL, REPLAY, PQN, DQN)
    }
    changed[PPO] = replaced(PPO, no_value, no_value.replace("terminated", "terminated | truncated"))

    def row(script, flags, score, digits):
        results = [run(script, flags), run(script, flags, changed[script])]
        counts, zero = map(score, results)  # (R,) each
        cells = [mean(counts, digits), mean(zero, digits), mean(counts - zero, digits)]
        return [f"`{script}`", f"{len(zero)}", *cells]

    def first_half(result):
        return np.nanmean(result.saved["curves.returns"][:10], axis=0)

    head = ["runs", "the value counts", "it is set to 0", "difference"]
    flags = "--num-seeds 100 --seed 771000"
    rows = [row(script, flags, first_half, 0) for script in (PARALLEL, PQN, PPO)]
    cartpole = table(["CartPole-v1, first half of training", *head], rows)
    flags = "--env-id MountainCar-v0 --total-timesteps 5e5 --num-seeds 20 --seed 871000"
    tuned = "--num-centers 1000 --sigma 0.15 --learning-rate 0.01 --epsilon 0.05"
    cases = [(PQN, flags), (DQN, flags), (REPLAY, f"{flags} {tuned}")]
    rows = [row(script, flags, greedy_means, 1) for script, flags in cases]
    return f"{cartpole}\n{table(['MountainCar-v0, greedy return', *head], rows)}"


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
    (REPLAY, f"{MOUNTAIN_CAR} --sigma 0.15 --learning-rate 0.01", -125),
    (DECAY, f"{MOUNTAIN_CAR} --sigma 0.15 --learning-rate 0.01", -125),
    (REINFORCE, CONTINUOUS, 75),
    (REINFORCE, "--env-id Pendulum-v1 --num-envs 128 --num-iterations 500", -260),
]
BOUNDS = {"Acrobot-v1": -100, "Pendulum-v1": -200}  # for PPO, PQN and DQN


def tasks_scripts():
    """The commands for other tasks, on 100 fresh seeds."""
    return tasks(TASKS, FRESH)


def tasks_networks():
    """The commands for other tasks in the docstrings of PPO, PQN and DQN, on 100 fresh seeds."""
    commands = []
    for script in NETWORKS:
        text = text_of(script).replace("\\\n        ", "")  # a command may take two lines
        for flags, task in re.findall(rf"python {script} (--env-id (\S+).*)", text):
            commands.append((script, flags, BOUNDS[task]))
    return tasks(commands, "--seed 871000")  # see learning_networks


def tasks(commands, fresh):
    """Run (script, flags, bound)."""
    rows = []
    for script, flags, bound in commands:
        seed = "--seed 352000" if flags == CONTINUOUS else fresh
        greedy = greedy_means(run(script, f"{flags} --num-seeds 100 {seed}"))
        reached = f"{np.sum(greedy >= bound)} of {len(greedy)} ({bound})"
        rows.append([f"`{script} {flags}`", mean(greedy), f"{greedy.min():.1f}", reached])
    return table(["command", "mean", "worst run", "reach the bound"], rows)


def seconds():
    """Whole commands, with the scripts in turn: medians of five, and of three with 20 seeds."""
    all_scripts, many_runs = [*SCRIPTS, *NETWORKS], [*CARTPOLE, *NETWORKS]
    one = np.median([[seconds_of(x) for x in all_scripts] for _ in range(5)], axis=0)
    twenty = [[seconds_of(x, "--num-seeds 20") for x in many_runs] for _ in range(3)]
    many = np.median(twenty, axis=0)
    rows = [
        [f"`{script}`", f"{whole:.1f}", f"{compiling:.1f}", ""]
        for script, (whole, compiling) in zip(all_scripts, one, strict=True)
    ]
    for script, (whole, _) in zip(many_runs, many, strict=True):
        rows[all_scripts.index(script)][-1] = f"{whole:.1f}"
    return table(["script", "one run", "of these, compiling", "twenty runs"], rows)


def seconds_of(script, flags=""):
    """Return the seconds of a whole command, and those of compiling."""
    result = run(script, flags, save=False)
    [compiling] = re.findall(r"compiled in ([\d.]+) s", result.lines[0])
    return result.seconds, float(compiling)


def recipes(names):
    """Run the commands in the heads of recipes, and print what differs from the last time.

    What they print is stored. A number in a head that one of the stored lines has, after rounding,
    and none of the new lines, is to be changed in the head.
    """
    stored = json.loads(STORED.read_text())
    for path in sorted(RECIPES.glob("*.patch")):
        if names and path.stem not in names:
            continue
        head = path.read_text().partition("\n--- ")[0]
        before, after = stored.get(path.stem, {}), {}
        for command, script, flags, also in re.findall(
            r"^    (python (\w+\.py)([^#\n]*)(.*))$", head, re.M
        ):
            others = [other.stem for other in RECIPES.glob("*.patch") if other.stem in also]
            recipes = [] if "unchanged" in also else [*others, path.stem]
            text = patched(script, *recipes)
            if "SGD" in also:
                text = with_sgd(text)
            lines = run(script, flags, text, save=False).lines
            # Progress without the speed, and the report. A table of the grid world has no colon.
            lines = [re.sub(r"  [\d,]+ steps/s in total", "", line) for line in lines]
            lines = [line for line in lines if line.startswith("step ") or ": " in line]
            after[command] = lines[1:]  # without the seconds of compiling
            was, now = set(before.get(command, ["all runs: not stored"])), set(after[command])
            for line in sorted(was ^ now):
                if ": " in line:
                    print(f"{path.stem} {'was' if line in was else 'is'}: {line}", flush=True)
        for number in sorted(quoted(head, before) - quoted(head, after)):
            print(f"{path.stem}: {number} in the head was printed before, and is not any more")
        stored[path.stem] = after
        STORED.write_text(json.dumps(stored, indent=1) + "\n")


def quoted(head, printed):
    """Return the numbers of a head that are among the printed ones, {command: lines}."""
    number = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
    words = re.findall(number, "\n".join(line for lines in printed.values() for line in lines))
    values = [float(word.replace(",", "")) for word in words]
    prose = re.sub(r"^    python .*", "", head, flags=re.M)
    found = set()
    for word in re.findall(number, prose):
        digits = len(word.partition(".")[2])
        if any(f"{value:,.{digits}f}" == word for value in values):
            found.add(word)
    return found


def write(name, text):
    """Put the table of a section below its mark, and say when and where it was measured."""
    git = ["git", "-C", ROOT]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    paths = ":(glob)*.py", "tests/recipes"
    if subprocess.check_output([*git, "status", "--porcelain", "--", *paths]):
        commit += " with changes"
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    cores = f"{len(os.sched_getaffinity(0))} x {model}"
    devices = " and ".join(sorted(x for x in DEVICES if not x.endswith("cpu"))) or cores
    machine = f"{devices}, Python {platform.python_version()}, jax {version('jax')}"
    stamp = f"Measured on {date.today()}, commit {commit}: {machine}.\n"
    mark = f"<!-- {name} -->\n"
    [page] = [page for page in PAGES if mark in page.read_text()]
    before, rest = page.read_text().split(mark)
    _, after = re.split(r"^(?:Measured on|Not measured yet) .*\n", rest, maxsplit=1, flags=re.M)
    page.write_text(f"{before}{mark}{text}\n{stamp}{after}")


SECTIONS = {
    f.__name__: f
    for f in (
        lesson_mountaincar,
        lesson_cartpole,
        learning_scripts,
        learning_networks,
        ablations,
        time_limits,
        tasks_scripts,
        tasks_networks,
        seconds,
    )
}


def main():
    """Run the sections that are asked for."""
    parser = argparse.ArgumentParser(epilog=f"sections: {', '.join(SECTIONS)}, recipes")
    parser.add_argument("sections", nargs="+", metavar="SECTION", help="name, or its beginning")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="of `recipes`; default: all")
    args = parser.parse_args()
    for asked in args.sections:
        if asked == "recipes":
            recipes(args.recipes)
        for name in SECTIONS:
            if name.startswith(asked):
                DEVICES.clear()
                write(name, SECTIONS[name]())


if __name__ == "__main__":
    main()
