"""Measure what README.md and the scripts' comments say, and write tests/RESULTS.md.

    python tests/benchmark.py                   # all sections: about two hours on two cores
    python tests/benchmark.py learning padding  # these sections; the others stay as they are

Each section says when it was measured. `--newest PYTHON` names a Python that has the newest jax,
for one row of `speed`. `peer` makes a virtual environment for rejax, which needs an older gymnax.
"""

import argparse
import inspect
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
USER_ENV = dict(os.environ)
import mountaincar_env as car  # it adds settings to os.environ, which jax reads when imported

# isort: split
import gymnax
import jax
import numpy as np
from diffs import changed_text
from gymnax.experimental import RolloutWrapper
from matplotlib.figure import Figure

FOLDER = Path(tempfile.mkdtemp())
PICTURES = ROOT / ".pictures"
RESULTS = ROOT / "tests" / "RESULTS.md"
README = (ROOT / "README.md").read_text()
PARALLEL, REPLAY, DECAY = TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
GRID, REINFORCE, CAR = "gridworld_qlearning.py", "reinforce_parallel.py", "mountaincar_env.py"
# No file of this repository had named these seeds before the runs that are reported.
FRESH = "--seed 271000"


def readme_diff(first_words):
    """The diff of README.md that follows these words."""
    return re.search(first_words + r".*?```diff\n(.*?)```", README, re.DOTALL)[1]


def run(script, flags="", python=sys.executable, diff=""):
    """Run a script, or a changed copy. Return seconds to end, printed lines and saved arrays."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    (folder / script).write_text(changed_text(script, diff))
    command = [python, script, *flags.split()]
    if script != CAR:
        command += ["--save", "saved.npz"]
    print("+", time.strftime("%H:%M"), script, flags, "(changed)" if diff else "", flush=True)
    began = time.perf_counter()
    process = subprocess.run(
        command, cwd=folder, env=USER_ENV, capture_output=True, text=True, check=True
    )
    seconds, path = time.perf_counter() - began, folder / "saved.npz"
    saved = dict(np.load(path)) if path.exists() else {}
    return seconds, process.stdout.splitlines(), saved


def speed_of(lines):
    """Speed in the last progress line, in million steps per second."""
    digits, million = re.findall(r"([\d.,]+) (M )?steps/s", "\n".join(lines))[-1]
    return float(digits.replace(",", "")) * (1 if million else 1e-6)


def table(head, rows):
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def mean(values, digits=1):
    """A mean, and half of its 95 % interval."""
    half = 1.96 * np.std(values) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def code(script, flags=""):
    """Format a command."""
    return f"`{script} {flags}`".replace(" `", "`")


def picture(name, text, columns=1, rows=1, size=(8, 3)):
    """Make a figure, its panels, and the Markdown that shows it."""
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    panels = figure.subplots(rows, columns, squeeze=False)
    return figure, panels, f"![{text}](../.pictures/{name})\n", PICTURES / name


def dots(axes, rows, bound=None):
    """Draw a row of dots for each (label, values): one dot a run, spread so that all are seen."""
    for i, (_, values) in enumerate(rows):
        spread = np.linspace(-0.3, 0.3, len(values))
        axes.plot(np.sort(values), -i + spread, ".", markersize=4, alpha=0.6)
        axes.plot([values.mean()] * 2, [-i - 0.4, -i + 0.4], color="black", linewidth=1)
    if bound is not None:
        axes.axvline(bound, color="gray", linestyle=":")
    axes.set_yticks(range(0, -len(rows), -1), [label for label, _ in rows])
    axes.grid(axis="x", alpha=0.3)


LEARNED = ["passed", "worst run", "greedy return", "first at 475", "training return at the end"]


def learned(saved):
    """The columns of LEARNED, for runs of CartPole-v1."""
    greedy, returns = saved["greedy_return"].mean(axis=1), saved["returns"]
    first = np.median(np.where(returns >= 475, saved["timesteps"], np.inf).min(axis=0))
    passed = f"{np.sum(greedy >= 475)} of {len(greedy)}", f"{greedy.min():.0f}"
    text = "never" if np.isinf(first) else f"{first / 1e3:.0f}k"
    return *passed, mean(greedy), text, mean(np.nanmean(returns[-3:], axis=0), 0)


# The functions below are the sections of RESULTS.md, in its order. Their docstrings are its titles
# and texts.


def learning():
    """Learning, and what decaying exploration is worth

    CartPole-v1, 400 fresh seeds (`--num-seeds 400 --seed 271000`; other constants: 200). A run
    passes if its greedy policy has a mean return of at least 475 over 100 new episodes; ± is half
    of a 95 % interval. "First at 475" is the median number of steps to the first progress line (one
    each 10,000 steps) with a training return of at least 475. "Training return at the end" is the
    mean of the last three lines. A training return includes random actions, so a large epsilon
    lowers it by definition, and delays the first line at 475, too.

    The picture compares five constant epsilons (0.25 is the default of `replay_td.py`) with the
    decay of `epsilon_decay_td.py`. Bars are 95 % Wilson intervals for the fraction of runs that
    fail. A constant of 0.05 fails more often; by their failures, the other constants and the decay
    cannot be told apart. What the decay brings is the end: it has the highest training return,
    because few of its last actions are random. A constant of 0.1 comes close, and is simpler.
    """
    constants = [(REPLAY, f"--epsilon {epsilon}") for epsilon in (0.05, 0.1, 0.15, 0.2)]
    rows, points = [], []
    for script, flags in [(PARALLEL, ""), *constants, (REPLAY, ""), (DECAY, ""), (REINFORCE, "")]:
        seeds = 200 if flags else 400
        saved = run(script, f"{flags} --num-seeds {seeds} {FRESH}")[2]
        rows.append([code(script, flags), *learned(saved)])
        if script in (REPLAY, DECAY):
            epsilon = flags.partition(" ")[2] or "0.25"
            points.append(("decay" if script == DECAY else epsilon, saved))
    figure, panels, text, path = picture("epsilon.png", "What epsilon trades", 2)
    for label, saved in points:
        failed = np.mean(saved["greedy_return"].mean(axis=1) < 475)
        n, z = len(saved["seed"]), 1.96
        center = (failed + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z * np.sqrt(failed * (1 - failed) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
        reached = np.where(saved["returns"] >= 475, saved["timesteps"], np.inf).min(axis=0)
        places = np.median(reached) / 1e3, np.nanmean(saved["returns"][-3:])
        for axes, x in zip(panels[0], places, strict=True):
            color = "C1" if label == "decay" else "C0"
            error = [[100 * (failed - center + half)], [100 * (center + half - failed)]]
            axes.errorbar([x], [100 * failed], error, fmt="o", color=color, capsize=3)
            axes.annotate(label, (x, 100 * failed), (6, 4), textcoords="offset points")
            axes.margins(x=0.2)
    panels[0, 0].set(xlabel="thousand steps to the first line at 475", ylabel="runs that fail, %")
    panels[0, 1].set(xlabel="training return at the end")
    figure.savefig(path)
    _, lines, saved = run(GRID, f"--num-seeds 400 {FRESH}")
    [line] = [line for line in lines if line.startswith("value of the start")]
    error = np.abs(saved["q_table"][:, -1, -1].max(axis=-1) - 0.9**17).max()
    exact = f"The exact value is 0.9^17 = {0.9**17:.5f}, the largest error {error:.0e}."
    grid = f"`{GRID}` prints: `{line}`. {exact}"
    return f"{text}\n{table(['command', *LEARNED], rows)}\n{grid}\n"


# Diffs of scripts, by what they take out or put in.
THROUGH_TARGETS = """
-    loss = partial(td_loss, run)
+    def loss(params, batch, _):
+        own = jax.vmap(partial(td_target, run, params))(batch)
+        return td_loss(run, params, batch, own)
+
"""
LIMIT_IS_AN_END = """
-        terminated=terminated,
+        terminated=terminated | truncated,
"""
CONSTANT_RATE = """
-    adam = optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))
+    adam = optax.adam(run.learning_rate)
"""
WARM_UP = """
-    state = state._replace(params=params, target_params=target_params, opt_state=opt_state)
+    after = state._replace(params=params, target_params=target_params, opt_state=opt_state)
+    state = jax.tree.map(partial(jnp.where, timesteps > 1000), after, state)
"""
DEEP = "--num-envs 4 --batch-size 128 --learning-rate 0.001 --total-timesteps 3e5"


def ablations():
    """What each ingredient is worth

    Forty fresh seeds of CartPole-v1 (`--num-seeds 40 --seed 271000`), with one change each. A dot
    is the greedy return of one run, a black line their mean, the dotted line the bound of 475.
    Where the row above is at 500 on every seed, this task cannot show what the change is worth.
    """
    replay = "`replay_td.py`"
    changes = [
        ("`parallel_td.py`", PARALLEL, "", ""),
        ("gradient through the target", PARALLEL, "", THROUGH_TARGETS),
        ("a time limit taken for an end", PARALLEL, "", LIMIT_IS_AN_END),
        ("constant learning rate", PARALLEL, "", CONSTANT_RATE),
        (replay, REPLAY, "", ""),
        ("no averaged target", REPLAY, "--tau 1", ""),
        ("a small buffer", REPLAY, "--buffer-size 1000", ""),
        ("1,000 steps before the first update", REPLAY, "", WARM_UP),
        ("Double Q-learning (README.md)", REPLAY, "", readme_diff("Double Q-learning")),
        ("a network (README.md)", REPLAY, DEEP, readme_diff("A neural network")),
    ]
    rows, values = [], []
    for what, script, flags, diff in changes:
        saved = run(script, f"--num-seeds 40 {FRESH} {flags}", diff=diff)[2]
        rows.append([what, code(script, flags), *learned(saved)])
        values.append((what.replace("`", ""), saved["greedy_return"].mean(axis=1)))
    figure, panels, text, path = picture("ablations.png", "A dot for each run", size=(8, 4.5))
    dots(panels[0, 0], values, 475)
    panels[0, 0].set(xlabel="greedy return")
    figure.savefig(path)
    grid, expected_sarsa = [], readme_diff("Expected SARSA")
    for what, diff in ("nothing", ""), ("expected SARSA (README.md)", expected_sarsa):
        saved = run(GRID, "--epsilon 0.1 0.3 --num-seeds 20", diff=diff)[2]
        for epsilon, part in (0.1, slice(20)), (0.3, slice(20, 40)):
            start = saved["q_table"][part, -1, -1].max(axis=-1)  # the start is the last cell
            steps = saved["steps_per_episode"][-1, part]
            grid.append([what, epsilon, mean(start, 5), mean(steps, 2)])
    head = ["change", "epsilon", "value of the start", "steps of a training episode"]
    return (
        f"{text}\n{table(['change', 'command', *LEARNED], rows)}\n`{GRID}`:\n\n{table(head, grid)}"
    )


CONTINUOUS = (
    "--env-id MountainCarContinuous-v0"
    " --num-envs 64 --num-iterations 200 --learning-rate 0.005 --gamma 1"
)


def padding():
    """What padding is worth

    Forty fresh seeds each, with episodes padded to the longest, and with all cut at the end of the
    shortest. A dot is the greedy return of one run, a black line the mean. In CartPole-v1, episodes
    that are cut have equal returns, so there is no gradient. In the other two tasks, an episode
    that ends early is a good one, so the rewards that are cut off are those that matter.
    """
    commands = [
        "--env-id CartPole-v1",
        CONTINUOUS,
        "--env-id FourRooms-misc",
    ]
    figure, panels, text, path = picture("padding.png", "A dot for each run", 3, size=(10, 2.2))
    rows = []
    for axes, flags in zip(panels[0], commands, strict=True):
        row, values = [code(REINFORCE, flags)], []
        for sync in "padding", "truncation":
            saved = run(REINFORCE, f"{flags} --num-seeds 40 {FRESH} --sync {sync}")[2]
            greedy = saved["greedy_return"].mean(axis=1)
            values.append((sync, greedy))
            row.append(f"{mean(greedy, 2)} ({greedy.min():.2f})")
        dots(axes, values)
        axes.set(title=flags.split()[1], xlabel="greedy return")
        rows.append(row)
    figure.savefig(path)
    return f"{text}\n{table(['command', 'padding: mean (worst)', 'truncation'], rows)}"


# Other tasks: command, and a bound that a good run reaches.
TD_SIZE = "--num-centers 1000 --total-timesteps 5e5"
ACROBOT = f"--env-id Acrobot-v1 {TD_SIZE}"
MOUNTAIN = f"--env-id MountainCar-v0 {TD_SIZE} --learning-rate 0.01 --sigma 0.15"
TASKS = [
    (PARALLEL, ACROBOT, -200),
    (REPLAY, f"{ACROBOT} --learning-rate 0.06", -200),
    (DECAY, f"{ACROBOT} --learning-rate 0.06 --end-e 0.1", -200),
    (
        REINFORCE,
        "--env-id Acrobot-v1 --num-envs 256 --num-iterations 50 --learning-rate 0.03",
        -200,
    ),
    (REPLAY, MOUNTAIN, -125),
    (DECAY, f"{MOUNTAIN} --end-e 0.1", -125),
    (REINFORCE, CONTINUOUS, 75),
    (REINFORCE, "--env-id Pendulum-v1 --num-envs 128 --num-iterations 500", -260),
]


def tasks():
    """Other tasks

    The commands of README.md on 100 fresh seeds (`--num-seeds 100 --seed 271000`): mean and worst
    greedy return, and how many runs reach a bound, which tells a run that learned the task from one
    that did not. (Random play gets -500 on Acrobot-v1, -200 on MountainCar-v0, about -33 on
    MountainCarContinuous-v0 and about -1,200 on Pendulum-v1.)

    The row of MountainCarContinuous-v0 is of other fresh seeds, 352000 to 352099. On the first
    ones, an earlier setting (100 iterations, learning rate 0.01, gamma 0.99) had a mean of 80.8,
    and 94 of 100 runs reached the bound. So it was replaced, by the search below.
    """
    rows = []
    for script, flags, bound in TASKS:
        fresh = "--seed 352000" if flags == CONTINUOUS else FRESH
        seconds, _, saved = run(script, f"{flags} --num-seeds 100 {fresh}")
        greedy = saved["greedy_return"].mean(axis=1)
        reached = f"{np.sum(greedy >= bound)} of 100"
        cells = mean(greedy), f"{greedy.min():.1f}", bound, reached, f"{seconds:.0f}"
        rows.append([code(script, flags), *cells])
    head = ["command", "mean", "worst run", "bound", "reach it", "seconds of 100 runs"]
    return table(head, rows)


# The searches: what all commands of a search share, its bound, and the values of each script.
MOUNTAIN_CAR = "--env-id MountainCar-v0 --num-centers 1000 --total-timesteps 5e5 --num-intervals 4"
CONTINUOUS_CAR = "--env-id MountainCarContinuous-v0 --num-envs 64 --num-iterations 200"
RATES, SIGMAS = [0.003, 0.01, 0.03], [0.07, 0.1, 0.15, 0.25]
EPSILONS, END_EPSILONS = [0.1, 0.25, 0.5, 0.75], [0.05, 0.1, 0.25, 0.5]
SEARCHES = {
    PARALLEL: (
        MOUNTAIN_CAR,
        -125,
        {"epsilon": EPSILONS, "learning-rate": RATES, "sigma": SIGMAS},
    ),
    REPLAY: (
        MOUNTAIN_CAR,
        -125,
        {"epsilon": EPSILONS, "learning-rate": RATES, "sigma": SIGMAS},
    ),
    DECAY: (
        MOUNTAIN_CAR,
        -125,
        {"end-e": END_EPSILONS, "learning-rate": RATES, "sigma": SIGMAS},
    ),
    REINFORCE: (
        CONTINUOUS_CAR,
        75,
        {"learning-rate": [0.003, 0.005, 0.01], "gamma": [0.99, 0.995, 1.0]},
    ),
}


def search():
    """How the settings for the two mountain cars were found

    The same search for all scripts. First, all combinations of some values, five seeds each (0 to
    4): the picture shows their means. Then a look at the tail: the four best means run on 50 other
    seeds (100 to 149). README.md has a setting with which all 50 reached the bound, if there is
    one.

    No cell of `parallel_td.py` is bright: without replay, none of 48 settings learns MountainCar-v0
    on every seed.
    """
    figure, panels, text, path = picture("search.png", "Means of five seeds", rows=4, size=(9, 9))
    rows = []
    for axes, (script, (shared, bound, swept)) in zip(panels[:, 0], SEARCHES.items(), strict=True):
        flags = " ".join(f"--{flag} {' '.join(map(str, own))}" for flag, own in swept.items())
        saved = run(script, f"{shared} {flags} --num-seeds 5")[2]
        means = saved["greedy_return"].mean(axis=1).reshape(-1, 5).mean(axis=1)
        settings = list(itertools.product(*swept.values()))
        heat_map(axes, script, swept, means, bound)
        for i in np.argsort(-means)[:4]:
            own = " ".join(f"--{flag} {x}" for flag, x in zip(swept, settings[i], strict=True))
            saved = run(script, f"{shared} {own} --num-seeds 50 --seed 100")[2]
            greedy = saved["greedy_return"].mean(axis=1)
            reached = f"{np.sum(greedy >= bound)} of 50 ({bound})"
            rows.append([code(script, own), f"{means[i]:.1f}", f"{greedy.mean():.1f}"])
            rows[-1] += [f"{greedy.min():.1f}", reached]
    figure.savefig(path)
    head = ["setting", "mean of 5 seeds", "mean of 50 others", "worst run", "reach the bound"]
    return f"{text}\n{table(head, rows)}"


def heat_map(axes, script, swept, means, bound):
    """Draw the mean of each setting: values of the first flag down, those of the others across."""
    first, *others = swept
    across = list(itertools.product(*(swept[flag] for flag in others)))
    cells = means.reshape(len(swept[first]), len(across))
    low, high = (-200, -100) if bound < 0 else (-100, 100)
    axes.imshow(cells, vmin=low, vmax=high, aspect="auto")
    for (row, column), mean in np.ndenumerate(cells):
        color = "white" if mean < (low + high) / 2 else "black"
        axes.text(column, row, f"{mean:.0f}", ha="center", va="center", color=color)
    axes.set_yticks(range(len(cells)), swept[first])
    axes.set_xticks(range(len(across)), ["\n".join(map(str, own)) for own in across], fontsize=8)
    axes.set_ylabel(f"--{first}")
    axes.set_xlabel("--" + ", --".join(others))
    axes.set_title(script)


# rejax as its authors run it on CartPole-v1: the values of configs/gymnax/cartpole.yaml in
# https://github.com/keraJLi/rejax (commit 4954fbf), but that it evaluates only once, at the end.
PEER_PACKAGES = ["rejax==0.1.3", "gymnax==0.0.9", "jax==0.10.1", "jaxlib==0.10.1", "six"]
PEER_CONFIGS = {
    "PPO": {
        "agent_kwargs": {"activation": "tanh"},
        "num_envs": 5,
        "num_steps": 100,
        "num_epochs": 5,
        "num_minibatches": 5,
        "learning_rate": 0.00075,
        "max_grad_norm": 0.5,
        "total_timesteps": 100_000,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_eps": 0.2,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
    },
    "PQN": {
        "num_envs": 16,
        "num_steps": 128,
        "num_minibatches": 16,
        "max_grad_norm": 10,
        "learning_rate": 0.0003,
        "num_epochs": 5,
        "total_timesteps": 524_288,
        "eps_start": 1,
        "eps_end": 0.05,
        "exploration_fraction": 0.5,
        "gamma": 0.99,
        "td_lambda": 0.9,
        "normalize_observations": False,
    },
    "DQN": {
        "agent": "DuelingQNetwork",
        "agent_kwargs": {"activation": "swish"},
        "num_envs": 10,
        "buffer_size": 50_000,
        "fill_buffer": 5_000,
        "batch_size": 100,
        "max_grad_norm": 10,
        "learning_rate": 0.001,
        "num_epochs": 5,
        "total_timesteps": 100_000,
        "polyak": 0.98,
        "eps_start": 1,
        "eps_end": 0.05,
        "exploration_fraction": 0.5,
        "gamma": 0.99,
        "ddqn": True,
        "normalize_observations": False,
    },
}
# A program for the other environment: algorithm, configuration, number of seeds. It prints seconds
# of training, and the mean return of each seed over 100 greedy episodes of at most 500 steps.
PEER_PROGRAM = """
import json, sys, time
import gymnax, jax, jax.numpy as jnp, rejax

config = json.loads(sys.argv[2])
config |= {"eval_freq": config["total_timesteps"], "skip_initial_evaluation": True}
agent = getattr(rejax, sys.argv[1]).create(env="CartPole-v1", **config)
keys = jax.random.split(jax.random.key(271000), int(sys.argv[3]))
train = jax.jit(jax.vmap(agent.train)).lower(keys).compile()
began = time.perf_counter()
state, _ = jax.block_until_ready(train(keys))
seconds = time.perf_counter() - began
env, env_params = gymnax.make("CartPole-v1")

def values(params, obs):
    if sys.argv[1] == "PPO":
        return agent.actor.apply(params, obs[None], method="_action_dist").logits[0]
    return agent.agent.apply(params, obs[None])[0]

def greedy_return(params, key):
    def step(carry, key):
        obs, env_state, alive, total = carry
        action = jnp.argmax(values(params, obs))
        obs, env_state, _, over, _ = env.step_env(key, env_state, action, env_params)
        return (obs, env_state, alive & ~over, total + alive), None

    start = *env.reset_env(key, env_params), True, 0
    return jax.lax.scan(step, start, jax.random.split(key, 500))[0][3]

def mean_return(params):
    keys = jax.random.split(jax.random.key(1), 100)
    return jnp.mean(jax.vmap(lambda key: greedy_return(params, key))(keys))

params = state.actor_ts.params if sys.argv[1] == "PPO" else state.q_ts.params
print(json.dumps([seconds, jax.jit(jax.vmap(mean_return))(params).tolist()]))
"""


def peer():
    """A peer, evaluated alike

    Twenty seeds of CartPole-v1 in one vmapped program (ten of DQN, which takes minutes): our
    learners with their default flags, and [rejax](https://github.com/keraJLi/rejax) with its
    authors' own configuration for this task, on the same cores in the same hour. All final policies
    play 100 greedy episodes, and a run passes with a mean return of at least 475. Both sides chose
    their defaults for this task.

    The comparison is not one of methods. rejax trains neural networks, which cost more here and
    learn tasks that radial basis functions cannot; its PPO and DQN are given half as many
    environment steps as our linear learners. It runs as its README shows, by `jax.vmap` over seeds;
    our scripts also divide the seeds among the cores. What is compared is how long a user waits for
    what.
    """
    rows = []
    for script in [*TRIO, REINFORCE]:
        seconds, _, saved = run(script, f"--num-seeds 20 {FRESH}")
        greedy, steps = saved["greedy_return"].mean(axis=1), saved["timesteps"][-1].mean()
        rows.append([code(script), f"{steps:,.0f}", greedy, saved["train_seconds"], seconds])
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "peer"], check=True)
    python = str(FOLDER / "peer" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
    for algorithm, config in PEER_CONFIGS.items():
        print("+ rejax", algorithm, flush=True)
        seeds = "10" if algorithm == "DQN" else "20"
        command = [python, "-c", PEER_PROGRAM, algorithm, json.dumps(config), seeds]
        began = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - began
        training, greedy = json.loads(process.stdout.splitlines()[-1])
        steps = f"{config['total_timesteps']:,}"
        rows.append([f"rejax {algorithm}", steps, np.array(greedy), training, seconds])
    cells = []
    for name, steps, greedy, training, seconds in rows:
        passed = f"{np.sum(greedy >= 475)} of {len(greedy)}", mean(greedy, 0), f"{greedy.min():.0f}"
        cells.append([name, steps, *passed, f"{training:.1f}", f"{seconds:.0f}"])
    head = ["program", "steps of a run", "passed", "mean", "worst run"]
    head += ["seconds of training", "command to end"]
    versions = ", ".join(PEER_PACKAGES[:3]).replace("==", " ")
    return f"{table(head, cells)}\nIts environment: {versions}.\n"


def times():
    """How long a command takes

    Seconds of `python NAME.py`, medians of five, in turn, and how many of them compiling takes
    (training and evaluation). The rest is importing (1 to 2 seconds), training, evaluating, and
    leaving Python. The last two columns are of one command each; the figure of README.md shows
    their runs, seeds 0 to 19.
    """
    seconds, compiling, speeds = {}, {}, {}
    scripts = [GRID, *TRIO, REINFORCE, CAR]
    for _ in range(5):
        for script in scripts:
            took, lines, _ = run(script)
            seconds.setdefault(script, []).append(took)
            compiling.setdefault(script, []).append(float(re.findall(r"[\d.]+", lines[1])[0]))
            speeds.setdefault(script, []).append(speed_of(lines))
    rows, curves = [], {}
    for script in scripts:
        medians = [median(of[script]) for of in (seconds, compiling)]
        row = [code(script), *(f"{x:.1f}" for x in medians), f"{median(speeds[script]):.2f}"]
        if script == CAR:
            rows.append([*row, "", ""])
            continue
        took, lines, curves[script] = run(script, "--num-seeds 20")
        rows.append([*row, f"{took:.1f}", f"{speed_of(lines):.2f}"])
    del curves[GRID]
    draw_curves(curves)
    head = ["script", "command to end", "compiling", "M steps/s"]
    return table([*head, "with `--num-seeds 20`", "M steps/s"], rows)


def draw_curves(curves):
    """The figure of README.md: training curves, and beside them the greedy returns at the end."""
    figure = Figure(figsize=(11, 3.4), layout="constrained", dpi=120)
    panels = figure.subplots(1, 4, sharey=True)
    for axes, (script, saved) in zip(panels, curves.items(), strict=True):
        timesteps, returns = saved["timesteps"] / 1e3, saved["returns"]
        axes.plot(timesteps, returns, color="C0", linewidth=0.5, alpha=0.5)
        middle = np.median(timesteps, axis=1), np.nanmedian(returns, axis=1)
        (training,) = axes.plot(*middle, color="C0", linewidth=2)
        greedy = saved["greedy_return"].mean(axis=1)
        spread = np.linspace(1.03, 1.12, len(greedy)) * timesteps.max()  # so that all are seen
        (final,) = axes.plot(spread, greedy, "o", color="C1", alpha=0.5, markersize=4)
        bound = axes.axhline(475, color="gray", linestyle=":")
        axes.set_title(script)
        axes.set_xlabel("thousand environment steps")
    panels[0].set_ylabel("mean return")
    names = ["in training, with random actions (median bold)", "greedy, after training"]
    figure.legend(
        [training, final, bound], [*names, "475: solved"], loc="outside upper center", ncols=3
    )
    figure.savefig(PICTURES / "curve.png")


def scale():
    """One, twenty and 256 runs

    Speed over all runs, in million steps per second, after compiling, and seconds from command to
    end; 50,000 steps or 25 iterations a run (grid world: 1,000,000 steps). Runs of a core are
    vmapped in batches that fit its cache (RUNS_AT_ONCE), so that many are as fast as few.
    """
    rows = []
    shorter = {REINFORCE: "--num-iterations 25 --num-intervals 5", GRID: ""}
    for script in [GRID, *TRIO, REINFORCE]:
        flags = shorter.get(script, "--total-timesteps 50000 --num-intervals 5")
        row = [code(script, flags)]
        for runs in 1, 20, 256:
            seconds, lines, _ = run(script, f"{flags} --num-seeds {runs}")
            row.append(f"{speed_of(lines):.2f} ({seconds:.0f} s)")
        rows.append(row)
    return table(["command", "1 run", "20 runs", "256 runs"], rows)


def sweep():
    """A sweep

    The last lines of a command, and its time beside that of a loop over four commands.
    """
    values = {"--learning-rate": ["0.02", "0.2"], "--sigma": ["0.3", "0.5"]}
    flags = " ".join(f"{flag} {' '.join(own)}" for flag, own in values.items())
    plot = f"--plot {PICTURES / 'sweep.png'}"
    seconds, lines, _ = run(PARALLEL, f"{flags} --num-seeds 20 {plot}")
    loop = 0
    for own in itertools.product(*values.values()):
        setting = " ".join(f"{flag} {x}" for flag, x in zip(values, own, strict=True))
        loop += run(PARALLEL, f"{setting} --num-seeds 20")[0]
    shown = "\n".join(["```", f"$ python {PARALLEL} {flags} --num-seeds 20", *lines[-4:], "```"])
    return f"{shown}\n\nThis took {seconds:.0f} seconds, a loop over four commands {loop:.0f}.\n"


def roll_by_step(env):
    """M steps/s of 4,096 cars with random actions by `step` of a class, which resets by itself."""
    space, keys = env.action_space(env.default_params), jax.random.split(jax.random.key(0), 4096)
    rollout = RolloutWrapper(lambda _, obs, key: space.sample(key), env=env, num_env_steps=200)
    jax.block_until_ready(rollout.batch_rollout(keys, None))
    began = time.perf_counter()
    jax.block_until_ready([rollout.batch_rollout(keys, None) for _ in range(5)])
    return 5 * 200 * len(keys) / (time.perf_counter() - began) / 1e6


def cars():
    """The car

    4,096 cars. The script rolls out without resets, on all cores. gymnax's `RolloutWrapper` calls
    `step`, which computes a reset in every step, here on one core. Medians of five, in turn.
    """
    speeds, theirs = [], gymnax.make("MountainCar-v0")[0]
    for _ in range(5):
        own = [speed_of(run(CAR, flags)[1]) for flags in ("", "--policy rocking")]
        speeds.append([*own, roll_by_step(car.ENV), roll_by_step(theirs)])
    names = ["without resets: the script", "without resets, `--policy rocking`"]
    names += ["with resets, by `step` of its class", "with resets, by `step` of gymnax's class"]
    medians = [median(column) for column in zip(*speeds, strict=True)]
    rows = [[name, f"{speed:.0f}"] for name, speed in zip(names, medians, strict=True)]
    ratio = median(own[2] / own[3] for own in speeds)
    text = f"By `step`, its class is {ratio:.2f} times as fast as gymnax's.\n"
    return f"{table(['rollout', 'M steps/s'], rows)}\n{text}"


ONE_PRODUCT = """
-    return jnp.stack([w_a @ phi for w_a in params["weights"]])
+    return params["weights"] @ phi
"""
WIDE = """
-        "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.1 to 1.3 times as fast
"""
WIDE_CAR = """
-        "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.3 times as fast
"""
LIBRARY = """
-        "xla_disable_hlo_passes": "dot-library-rewriter",
"""
COSINE = """
-        slope = cosine(3 * state.position)
+        slope = jnp.cos(3 * state.position)
"""


def at_once(script, value):
    """A diff that puts another value into RUNS_AT_ONCE."""
    [line] = re.findall(r"^RUNS_AT_ONCE = .*$", (ROOT / script).read_text(), re.MULTILINE)
    return f"-{line}\n+RUNS_AT_ONCE = {value}\n"


def short_loops(script):
    """A diff that gives XLA its own limit of 1,000 bytes for loops in one function."""
    [line] = re.findall(r"^LOOPS = .*$", (ROOT / script).read_text(), re.MULTILINE)
    return f'-{line}\n+{line.rpartition("=")[0]}=1000"\n'


def level_3(script):
    """A diff without the lower level of optimization."""
    pattern = r'^        "xla_backend_optimization_level": 1.*$'
    [line] = re.findall(pattern, (ROOT / script).read_text(), re.MULTILINE)
    return f"-{line}\n"


def speed(newest=None):
    """What the lines for speed are worth

    Each row compares a script with a copy that lacks one line or option, in turn: the fastest of
    three commands each, because other programs only slow a command down. Brackets have the smallest
    and the largest factor of the three pairs.
    """
    long, many, rocking = "--total-timesteps 1e6", "--num-seeds 256", "--policy rocking"
    cases = [
        ("one product per action", PARALLEL, long, ONE_PRODUCT),
        ("wide vectors", PARALLEL, long, WIDE),
        ("batches of runs", PARALLEL, f"{many} --total-timesteps 40000", at_once(PARALLEL, 9999)),
        ("batches of runs", REPLAY, f"{many} --total-timesteps 20000", at_once(REPLAY, 9999)),
        ("batches of runs", REINFORCE, f"{many} --num-iterations 5", at_once(REINFORCE, 9999)),
        ("agents one by one", GRID, "--num-seeds 20", at_once(GRID, 9999)),
        ("loops as one function", GRID, "--total-timesteps 1e7", short_loops(GRID)),
        ("batches of cars", CAR, "", at_once(CAR, 999_999)),
        ("batches of cars", CAR, rocking, at_once(CAR, 999_999)),
        ("wide vectors", CAR, "", WIDE_CAR),
        ("wide vectors", CAR, rocking, WIDE_CAR),
        ("loops as one function", CAR, "", short_loops(CAR)),
        ("loops as one function", CAR, rocking, short_loops(CAR)),
        ("Taylor's series", CAR, "", COSINE),
        ("Taylor's series", CAR, rocking, COSINE),
    ]
    rows = []
    for what, script, flags, diff in cases:
        rows.append([what, code(script, flags), *compared(script, flags, diff)])
    if newest:
        cells = compared(PARALLEL, long, LIBRARY, newest)
        command = code(PARALLEL, long) + " (newest jax)"
        rows.append(["no matrix library of jax 0.11", command, *cells])
    for script in PARALLEL, REINFORCE:
        diffs = ["", level_3(script)] * 3
        seconds = [run(script, "--num-seeds 20", diff=diff)[2]["compile_seconds"] for diff in diffs]
        fast, slow = min(seconds[::2]), min(seconds[1::2])
        cells = f"{fast:.1f} s", f"{slow:.1f} s", f"{slow / fast:.2f}"
        rows.append(["level 1: compiling", code(script, "--num-seeds 20"), *cells])
    return table(["line", "command", "M steps/s with it", "without", "factor"], rows)


def compared(script, flags, diff, python=sys.executable):
    """Speed of a script with and without a line, and their ratio."""
    speeds = [speed_of(run(script, flags, python, own)[1]) for own in ["", diff] * 3]
    fast, slow = max(speeds[::2]), max(speeds[1::2])
    pairs = [one / two for one, two in zip(speeds[::2], speeds[1::2], strict=True)]
    factor = f"{fast / slow:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
    return f"{fast:.2f}", f"{slow:.2f}", factor


SECTIONS = [learning, ablations, padding, tasks, search, peer]
SECTIONS += [times, scale, sweep, cars, speed]
HEAD = """# Results

Written by `python tests/benchmark.py`, section by section. "Fresh" seeds are 271000 and those that
follow it (and 352000 for one row): no file of this repository had named them, and they were used
only to report. What chose the defaults and the settings: seeds 0 to 149, 1000 to 1399, 40000 to
40199, 60000 to 60399, 70000 to 70099, 81000 to 81399, 82000 to 82059, 85000 to 85139 and, in
earlier versions of this page, 95000 to 95399, as far as the history of commits shows.

The machine is shared with other programs, so the speed of a short run can vary by a factor of two.
On one machine, the same command learns the same, bit by bit; elsewhere, roundings differ.
"""


def title_and_text(section):
    title, _, text = inspect.getdoc(section).partition("\n")
    return title, text.strip()


def write(section, text):
    """Put a section into RESULTS.md, in the place of the old one."""
    old = RESULTS.read_text() if RESULTS.exists() else ""
    parts = re.split(r"^## ", old, flags=re.MULTILINE)[1:]
    parts = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "optax", "gymnax"))
    machine = f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}, {packages}"
    title, description = title_and_text(section)
    stamp = f"Measured on {date.today()}: {machine}."
    parts[title] = f"{description}\n\n{text.strip()}\n\n{stamp}"
    titles = [title_and_text(section)[0] for section in SECTIONS]
    pages = [f"## {title}\n\n{parts[title]}\n" for title in titles if title in parts]
    RESULTS.write_text("\n".join([HEAD, *pages]))


def main():
    by_name = {section.__name__: section for section in SECTIONS}
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(by_name))
    parser.add_argument("--newest", metavar="PYTHON", help="a Python that has the newest jax")
    args = parser.parse_args()
    for name in args.sections or by_name:
        section = by_name[name]
        write(section, section(args.newest) if section is speed else section())


if __name__ == "__main__":
    main()
