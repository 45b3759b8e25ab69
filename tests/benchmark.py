"""Measure what README.md says and write tests/RESULTS.md.

    python tests/benchmark.py                               # half an hour on two cores
    python tests/benchmark.py --peer --newest python3.13    # with rejax, and the newest jax
    python tests/benchmark.py --environments                # with REINFORCE on all of gymnax

Each script runs as a user would run it, in a process of its own. --peer installs rejax in a virtual
environment of its own. --newest names a Python that has the packages with the newest jax.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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
FRESH = ["--seed", "95000"]  # seeds on which no default was chosen

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

# Sweeps, and the loop over commands that each replaces. README.md shows the first.
SWEEPS = [
    ("parallel_td.py", {"--learning-rate": "0.02 0.2", "--sigma": "0.3 0.5"}),
    ("gridworld_qlearning.py", {"--learning-rate": "0.1 0.5", "--epsilon": "0.1 0.3"}),
]

SYNC = "padding", "truncation"

# The TD scripts on other tasks: script, environment and flags.
HILL = "--sigma 0.15 --gamma 1 --learning-rate 0.02 --num-centers 1000 --total-timesteps 500000"
SWING = "--num-centers 1000 --total-timesteps 500000"
TASKS = [
    f"replay_td.py --env-id MountainCar-v0 {HILL} --epsilon 0.1",
    f"epsilon_decay_td.py --env-id MountainCar-v0 {HILL} --end-e 0.1",
    "parallel_td.py --env-id MountainCar-v0 --sigma 0.4 --learning-rate 0.003"
    " --total-timesteps 500000",
    f"replay_td.py --env-id Acrobot-v1 {SWING} --learning-rate 0.05",
    f"parallel_td.py --env-id Acrobot-v1 {SWING} --learning-rate 0.1",
]

# Ablations: what is changed, script, flags, and texts that occur once in it with their replacement.
ERRORS = "    td_errors, q = jax.vmap(partial(td_error, args, weights, centers))(batch, targets)\n"
OWN_TARGETS = (
    "    targets = jax.vmap(partial(td_target, args, state._replace(weights=weights)))(batch)\n"
)
THROUGH_TARGET = [
    (
        "def td_loss(args, weights, centers, batch, targets)",
        "def td_loss(args, weights, state, batch)",
    ),
    (ERRORS, OWN_TARGETS + ERRORS.replace("centers", "state.centers")),
    ("(args, state.weights, state.centers, batch, targets)", "(args, state.weights, state, batch)"),
]
TIME_LIMIT = [("        terminated=terminated,\n", "        terminated=terminated | truncated,\n")]
CONSTANT = [
    ("optax.linear_schedule(args.learning_rate, 0.0, args.num_updates)", "args.learning_rate")
]
OF_THE_LIVING = [
    (
        "others = (relative.sum(axis=0) - relative) / (len(relative) - 1)",
        "others = (episodes.mask * relative).sum(axis=0)"
        " / jnp.maximum(episodes.mask.sum(axis=0), 1)",
    )
]
TERMINAL = "a time limit taken for a terminal state"
ABLATIONS = [
    ("one environment", "parallel_td.py", "--num-envs 1", []),
    ("less exploration", "parallel_td.py", "--epsilon 0.1", []),
    ("gradient through the target", "parallel_td.py", "", THROUGH_TARGET),
    (TERMINAL, "parallel_td.py", "", TIME_LIMIT),
    ("constant learning rate", "parallel_td.py", "", CONSTANT),
    ("no averaged target", "replay_td.py", "--tau 1", []),
    ("small buffer", "replay_td.py", "--buffer-size 1000", []),
    ("less exploration", "replay_td.py", "--epsilon 0.1", []),
    ("episodes cut at the shortest", "reinforce_parallel.py", "--sync truncation", []),
    ("mean of the living as baseline", "reinforce_parallel.py", "", OF_THE_LIVING),
]
HILL_ABLATIONS = [("none", []), (TERMINAL, TIME_LIMIT), ("constant learning rate", CONSTANT)]

# What lines that are there for speed are worth: what they do, script, flags, whether the newest jax
# is meant, and each text with its replacement.
LONG, CARS = "--total-timesteps 1e6", "--total-timesteps 2e8 --log-interval 1e8"
AGENTS = "--total-timesteps 1e7"
NEW, OLD = True, False
WIDE = ('    "xla_cpu_prefer_vector_width": 512,', "    #")
SPLIT = ("cpu-parallel-task-assigner,", "")
LIBRARY = (",dot-library-rewriter", "")
ACTION_BY_ACTION = ("jnp.stack([w_a @ phi for w_a in weights])", "weights @ phi")
CENTERS = [
    ("(obs.shape[1], args.num_centers)", "(args.num_centers, obs.shape[1])"),
    ("(scaled[:, None] - centers) ** 2, axis=0)", "(scaled - centers) ** 2, axis=1)"),
]
STEP_BY_STEP = [
    (
        "    explore = jax.random.bernoulli(key_explore, args.epsilon, BLOCK)\n"
        "    draws = explore, jax.random.uniform(key_uniform, BLOCK)\n",
        "    draws = jax.random.split(key_explore, BLOCK)\n",
    ),
    (
        "    explore, uniform = draws\n",
        "    key_explore, key_uniform = jax.random.split(draws)\n"
        "    explore = jax.random.bernoulli(key_explore, args.epsilon)\n"
        "    uniform = jax.random.uniform(key_uniform)\n",
    ),
]
LOOPS = [("byte_threshold=500000", "byte_threshold=1000")]
CAR_LOOPS = [("byte_threshold=1000000000", "byte_threshold=1000")]
TAYLOR = [("slope = cosine(", "slope = jnp.cos(")]
SPEED = [
    ("one product per action", "parallel_td.py", LONG, OLD, [ACTION_BY_ACTION]),
    ("one product per action", "parallel_td.py", "--num-seeds 20", OLD, [ACTION_BY_ACTION]),
    ("centers (D, F)", "parallel_td.py", "--num-seeds 20", OLD, CENTERS),
    ("wide vectors", "parallel_td.py", LONG, OLD, [WIDE]),
    ("small arrays not split among threads", "parallel_td.py", LONG, OLD, [SPLIT]),
    ("no jax 0.11 matrix library", "parallel_td.py", LONG, NEW, [LIBRARY]),
    (
        "agents one by one",
        "gridworld_qlearning.py",
        "--num-seeds 20",
        OLD,
        [('if jax.default_backend() == "cpu":', "if 0:")],
    ),
    ("loops as one function", "gridworld_qlearning.py", AGENTS, OLD, LOOPS),
    ("random numbers in blocks", "gridworld_qlearning.py", AGENTS, OLD, STEP_BY_STEP),
    ("loops as one function", "mountaincar_env.py", CARS, OLD, CAR_LOOPS),
    ("Taylor series of the cosine", "mountaincar_env.py", CARS, OLD, TAYLOR),
    ("wide vectors", "mountaincar_env.py", CARS, OLD, [WIDE]),
    ("wide vectors", "mountaincar_env.py", CARS, NEW, [WIDE]),
]

# What the level of optimization is worth: seconds of compiling, beside level 3.
COMPILING = [
    ("parallel_td.py", "", 1),
    ("reinforce_parallel.py", "--num-seeds 20", 1),
    ("mountaincar_env.py", "--total-timesteps 1e6", 2),
]

# rejax as its authors run it on CartPole-v1: the values of configs/gymnax/cartpole.yaml in
# https://github.com/keraJLi/rejax (commit 4954fbf), but that it evaluates only once, at the end.
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

# How all are evaluated: 100 greedy episodes of CartPole-v1, which begin the same for all.
PLAY = """
import gymnax, jax, jax.numpy as jnp

def greedy_returns(values, params):
    env, env_params = gymnax.make("CartPole-v1")

    def step(carry, key):
        obs, env_state, alive, total = carry
        action = jnp.argmax(values(params, obs))
        obs, env_state, _, over, _ = env.step_env(key, env_state, action, env_params)
        return (obs, env_state, alive & ~over, total + alive), None

    def episode(key):
        start = *env.reset_env(key, env_params), True, 0
        return jax.lax.scan(step, start, jax.random.split(key, 500))[0][3]

    return jax.vmap(episode)(jax.random.split(jax.random.key(1), 100))
"""

# Runs rejax: algorithm, configuration, number of seeds. Prints seconds of compiling and training,
# and the greedy mean return of each seed.
PEER = """
import json, sys, time
import rejax
config = json.loads(sys.argv[2])
config |= {"eval_freq": config["total_timesteps"], "skip_initial_evaluation": True}
agent = getattr(rejax, sys.argv[1]).create(env="CartPole-v1", **config)
keys = jax.random.split(jax.random.key(0), int(sys.argv[3]))
began = time.perf_counter()
train = jax.jit(jax.vmap(agent.train)).lower(keys).compile()
compiled = time.perf_counter()
state, _ = jax.block_until_ready(train(keys))
trained = time.perf_counter() - compiled

def values(params, obs):
    if sys.argv[1] == "PPO":
        return agent.actor.apply(params, obs[None], method="_action_dist").logits[0]
    return agent.agent.apply(params, obs[None])[0]

params = state.actor_ts.params if sys.argv[1] == "PPO" else state.q_ts.params
returns = jax.jit(jax.vmap(lambda own: greedy_returns(values, own)))(params)
print(json.dumps([compiled - began, trained, returns.mean(axis=1).tolist()]))
"""
PEER_PACKAGES = ["rejax==0.1.3", "gymnax==0.0.9", "jax==0.10.1", "jaxlib==0.10.1", "six"]


def run(script, *flags, save=True, python=sys.executable):
    """Run a script. Returns seconds from command to end, printed lines and saved arrays."""
    path = Path(tempfile.mkdtemp(dir=FOLDER)) / "saved.npz"
    command = [python, str(script), *flags]
    print("+", " ".join(command), flush=True)
    if save:
        command += ["--save", str(path)]
    began = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    saved = dict(np.load(path)) if save else {}
    return seconds, process.stdout.splitlines(), saved


def two_at_a_time(calls):
    """Run several commands of which no speed is wanted."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda call: run(*call), calls))


def speed_of(lines):
    """Speed in the last progress line, in million steps per second."""
    found = re.findall(r"([\d.,]+) (M )?steps/s", "\n".join(lines))
    digits, million = found[-1]
    return float(digits.replace(",", "")) * (1 if million else 1e-6)


def passes(returns):
    """Number of runs that passed, and the greedy mean of the worst run."""
    greedy = np.mean(returns, axis=1)
    return f"{np.sum(greedy >= 475)} of {len(greedy)}", f"{greedy.min():.0f}"


def learned(saved):
    """Number of runs that passed, the worst, steps to the first line at 475, return at the end."""
    firsts = []
    timesteps = np.broadcast_to(saved["timesteps"].T, saved["returns"].T.shape)
    for steps, returns in zip(timesteps, saved["returns"].T, strict=True):
        firsts.append(min(steps[returns >= 475], default=np.inf))
    first = "never" if np.isinf(np.median(firsts)) else f"{np.median(firsts) / 1e3:.0f}k"
    return *passes(saved["greedy_return"]), first, f"{np.nanmean(saved['returns'][-3:]):.0f}"


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
    """Format rows as a Markdown table. Also print it, in case a later measurement fails."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", r"\|") for cell in line] for line in lines]
    text = "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"
    print(text, flush=True)
    return text


def learning():
    """Measure 1, 20 and 400 runs of each learner. Returns two tables."""
    rows, speeds, curves = [], [], {}
    for script in LEARNERS:
        seconds, lines, saved = min((run(ROOT / script) for _ in range(2)), key=lambda one: one[0])
        compiling, training = saved["compile_seconds"], saved["train_seconds"]
        importing = import_seconds(script)
        rest = seconds - importing - compiling - training
        times = [f"{part:.1f}" for part in (importing, compiling, training, rest, seconds)]
        twenty_seconds, many_lines, curves[script] = run(ROOT / script, *TWENTY)
        _, most_lines, saved = run(ROOT / script, "--num-seeds", "400", *FRESH)
        speed = [f"{speed_of(printed):.2f}" for printed in (lines, many_lines, most_lines)]
        training = f"{saved['train_seconds']:.0f}"
        passed = passes(saved["greedy_return"])
        rows.append([f"`{script}`", *passed, training, *learned(curves[script])[2:]])
        speeds.append([f"`{script}`", *times, f"{twenty_seconds:.1f}", *speed])
    for script, steps in [("gridworld_qlearning.py", 1), ("mountaincar_env.py", 400)]:  # million
        outcomes = [run(ROOT / script, save=False) for _ in range(2)]
        seconds, lines, _ = min(outcomes, key=lambda one: one[0])
        importing, compiling = import_seconds(script), float(re.findall(r"[\d.]+", lines[1])[0])
        training = steps / speed_of(lines)
        parts = importing, compiling, training, seconds - importing - compiling - training, seconds
        times = [f"{part:.1f}" for part in parts]
        speeds.append([f"`{script}`", *times, "", f"{speed_of(lines):.0f}", "", ""])
    picture(curves)
    head = ["script", "passed", "worst run", "training, s", "first at 475", "return at the end"]
    speed_head = ["script", "importing", "compiling", "training", "rest", "command to end"]
    speed_head += ["20 runs, command to end", "M steps/s, 1 run", "20 runs", "400 runs"]
    return table(head, rows), table(speed_head, speeds)


def sweeps():
    """Measure sweeps with 20 seeds, and the same runs as a loop over commands."""
    rows = []
    for script, values in SWEEPS:
        flags = [word for flag, several in values.items() for word in (flag, *several.split())]
        pictured = ["--plot", str(ROOT / ".pictures" / "sweep.png")] if not rows else []
        seconds, lines, saved = run(ROOT / script, *flags, *TWENTY, *pictured)
        settings = list(itertools.product(*[several.split() for several in values.values()]))
        loop = 0.0
        for setting in settings:
            own = [word for pair in zip(values, setting, strict=True) for word in pair]
            loop += run(ROOT / script, *own, *TWENTY, save=False)[0]
        if not rows:
            shown = "\n".join(lines[-len(settings) :])
        command = f"`{script} {' '.join([*flags, *TWENTY])}`"
        runs = len(saved["seed"])
        rows.append([command, runs, f"{seconds:.1f}", f"{loop:.1f}", f"{loop / seconds:.1f}"])
    head = ["command", "runs", "seconds", "seconds of a loop over commands", "factor"]
    return f"{table(head, rows)}\nThe last lines of the first:\n\n```\n{shown}\n```\n"


def import_seconds(script):
    """Seconds that Python needs to start and to import a script."""
    began = time.perf_counter()
    code = f"import {script.removesuffix('.py')}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return time.perf_counter() - began


def scaling():
    """Measure the speed of poles, of agents, of cars, and of gymnax's own car."""
    rows = []
    for envs in 1, 16:
        flags = ["--num-envs", str(envs)]
        speed = max(speed_of(run(ROOT / "parallel_td.py", *flags)[1]) for _ in range(2))
        rows.append([f"{envs}", f"`parallel_td.py {' '.join(flags)}`", f"{speed:.3f}"])
    for agents, steps in [(1, 3e7), (30, 2e6), (1024, 2e5), (16384, 2e4)]:
        flags = ["--num-seeds", str(agents), "--total-timesteps", f"{steps:g}"]
        flags += ["--log-interval", f"{min(1e6, steps / 2):g}"]
        speed = speed_of(run(ROOT / "gridworld_qlearning.py", *flags, save=False)[1])
        rows.append([f"{agents:,}", f"`gridworld_qlearning.py {' '.join(flags)}`", f"{speed:.0f}"])
    for envs, steps in [(1, 5e7), (16, 2e8), (256, 5e8), (4096, 5e8), (65536, 5e8)]:
        flags = ["--num-envs", str(envs), "--total-timesteps", f"{steps:g}"]
        speed = speed_of(run(ROOT / "mountaincar_env.py", *flags, save=False)[1])
        rows.append([f"{envs:,}", f"`mountaincar_env.py {' '.join(flags)}`", f"{speed:.0f}"])
    plain = "gymnax's own MountainCar-v0, `jax.vmap(env.step)` in `jax.lax.scan`, random actions"
    rows.append(["4,096", plain, f"{gymnax_speed(4096):.0f}"])
    return table(["poles, agents or cars", "command", "M steps/s"], rows)


def gymnax_speed(num_envs, num_steps=2000):
    """Million steps per second of gymnax's MountainCar-v0, stepped as its documentation shows."""
    env, env_params = gymnax.make("MountainCar-v0")

    def step(carry, _):
        key, env_state = carry
        key, key_action, key_step = jax.random.split(key, 3)
        action = jax.random.randint(key_action, num_envs, 0, 3)
        keys = jax.random.split(key_step, num_envs)
        _, env_state, reward, *_ = jax.vmap(env.step, (0, 0, 0, None))(
            keys, env_state, action, env_params
        )
        return (key, env_state), reward.sum()

    keys = jax.random.split(jax.random.key(0), num_envs)
    carry = jax.random.key(1), jax.vmap(env.reset, (0, None))(keys, env_params)[1]
    rollout = jax.jit(lambda carry: jax.lax.scan(step, carry, length=num_steps))
    jax.block_until_ready(rollout(carry))
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(rollout(carry))
        seconds.append(time.perf_counter() - began)
    return num_envs * num_steps / min(seconds) / 1e6


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
    names = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]
    few = ["--num-seeds", "3"]
    commands = [["--env-id", name, *few, *ENV_FLAGS.get(name, "").split()] for name in names]
    results = two_at_a_time([[ROOT / "reinforce_parallel.py", *command] for command in commands])
    for env_id, (_, _, saved) in zip(names, results, strict=True):
        flags = ENV_FLAGS.get(env_id, "")
        greedy = saved["greedy_return"].mean(axis=1)
        random, idle = unlearned_returns(env_id)
        unlearned = max(random, idle) + 0.005  # equal returns differ by rounding
        mean_above += greedy.mean() > unlearned
        worst_above += greedy.min() > unlearned
        result = f"{greedy.mean():.2f} ({greedy.min():.2f} to {greedy.max():.2f})"
        flags = f"`{flags}`" if flags else "defaults"
        rows.append([env_id, flags, f"{random:.2f}", f"{idle:.2f}", result])
    head = ["environment", "flags", "random play", "always action 0", "greedy (worst to best run)"]
    return f"""{table(head, rows)}
The greedy mean is above both random play and always action 0 in {mean_above} of {len(rows)}
environments. In {worst_above} of these, even the worst run is above both; elsewhere, the
difference may be chance.
"""


def other_tasks():
    """Measure twenty runs of each command in TASKS, and random play."""
    rows = []
    for command in TASKS:
        script, *flags = command.split()
        _, _, saved = run(ROOT / script, *flags, *TWENTY)
        greedy = saved["greedy_return"].mean(axis=1)
        random, _ = unlearned_returns(env_id=flags[1])
        numbers = f"{random:.0f}", f"{greedy.mean():.0f}", f"{greedy.min():.0f}"
        rows.append([f"`{command}`", *numbers, f"{saved['train_seconds']:.0f}"])
    return table(["command", "random play", "greedy, mean", "worst run", "training, s"], rows)


def ablations():
    """Measure twenty runs with each change, by flags or in a copy of the script; two tables."""
    rows, hill_rows = [], []
    for what, script, flags, changes in ABLATIONS:
        saved = run(changed(script, changes), *flags.split(), *TWENTY)[2]
        flags = f"`{flags}`" if flags else ""
        rows.append([f"`{script}`", what, flags, *learned(saved)])
    for what, changes in HILL_ABLATIONS:
        script, *flags = TASKS[0].split()
        greedy = run(changed(script, changes), *flags, *TWENTY)[2]["greedy_return"].mean(axis=1)
        numbers = f"{greedy.mean():.1f}", f"{greedy.min():.1f}", f"{greedy.max():.1f}"
        hill_rows.append([what, *numbers])
    head = ["script", "change", "flags", "passed", "worst run", "first at 475", "return at the end"]
    hill_head = ["change", "greedy, mean", "worst run", "best run"]
    return table(head, rows), table(hill_head, hill_rows)


def truncation():
    """Measure twenty runs of REINFORCE on two tasks, with padding and with truncation."""
    rows = []
    for env_id, sync in itertools.product(["Acrobot-v1", "Breakout-MinAtar"], SYNC):
        flags = ["--env-id", env_id, "--sync", sync, *TWENTY]
        greedy = run(ROOT / "reinforce_parallel.py", *flags)[2]["greedy_return"].mean(axis=1)
        numbers = f"{greedy.mean():.1f}", f"{greedy.min():.1f}", f"{greedy.max():.1f}"
        rows.append([f"`reinforce_parallel.py {' '.join(flags)}`", *numbers])
    return table(["command", "greedy, mean", "worst run", "best run"], rows)


def changed(script, changes):
    """Write a copy of a script in which each text, which must occur once, is replaced."""
    text = (ROOT / script).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {script}"
        text = text.replace(old, new)
    copy = FOLDER / script
    copy.write_text(text)
    return copy


def speed_claims(newest):
    """Measure scripts without one of their lines that are there for speed: the better of two."""
    rows = []
    for what, script, flags, needs_newest, changes in SPEED:
        if needs_newest and not newest:
            continue
        python = newest if needs_newest else sys.executable
        scripts = [ROOT / script, changed(script, changes)] * 2
        speeds = [
            speed_of(run(one, *flags.split(), save=False, python=python)[1]) for one in scripts
        ]
        with_line, without = max(speeds[::2]), max(speeds[1::2])
        command = f"`{script} {flags}`" + (" (newest jax)" if needs_newest else "")
        numbers = f"{with_line:.2f}", f"{without:.2f}", f"{with_line / without:.2f}"
        rows.append([what, command, *numbers])
    head = ["line", "command", "M steps/s with it", "without", "factor"]
    compiling = []
    for script, flags, level in COMPILING:
        option = f'"xla_backend_optimization_level": {level}'
        scripts = [ROOT / script, changed(script, [(option, option.replace(str(level), "3"))])] * 2
        seconds = [float(run(one, *flags.split())[2]["compile_seconds"]) for one in scripts]
        with_line, without = min(seconds[::2]), min(seconds[1::2])
        numbers = f"{with_line:.1f}", f"{without:.1f}", f"{without / with_line:.2f}"
        compiling.append([f"optimization level {level}", f"`{script} {flags}`", *numbers])
    head_of_compiling = ["option", "command", "seconds of compiling with it", "without", "factor"]
    return f"{table(head, rows)}\n{table(head_of_compiling, compiling)}"


def peer():
    """Measure rejax and our learners with 1 and with 20 seeds, in the same minutes."""
    python = str(FOLDER / "peer" / "bin" / "python")
    try:
        subprocess.run([sys.executable, "-m", "venv", FOLDER / "peer"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
    except subprocess.CalledProcessError as error:
        return f"rejax could not be installed here: {error}.\n"
    rows = []
    exec(PLAY, scope := {})

    def add_row(name, timesteps, one, twenty):
        (compiling, training, returns), seconds = one
        cells = [f"{timesteps:,}", f"{compiling:.1f}", f"{training:.1f}", f"{seconds:.1f}"]
        cells.append(f"{np.mean(returns):.0f}")
        (compiling, training, returns), seconds = twenty
        cells += [f"{compiling:.1f}", f"{training:.1f}", f"{seconds:.1f}"]
        rows.append([name, *cells, f"{np.sum(np.array(returns) >= 475)} of {len(returns)}"])

    def run_peer(algorithm, seeds):
        config = json.dumps(PEER_CONFIGS[algorithm])
        command = [python, "-c", PLAY + PEER, algorithm, config, str(seeds)]
        print(f"+ rejax {algorithm}, {seeds} seeds", flush=True)
        began = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(process.stdout.splitlines()[-1]), time.perf_counter() - began

    def values(saved, obs):
        if "w0" in saved:  # logits of REINFORCE
            hidden = jax.numpy.tanh(obs @ saved["w0"] + saved["b0"])
            return hidden @ saved["w1"] + saved["b1"]
        distance = ((obs / saved["obs_scale"])[:, None] - saved["centers"]) ** 2
        return saved["weights"] @ jax.numpy.exp(-distance.sum(axis=0) / (2 * saved["sigma"] ** 2))

    def run_ours(script, *flags):
        seconds, _, saved = run(ROOT / script, *flags)
        used = "w0", "b0", "w1", "b1", "obs_scale", "centers", "weights", "sigma"
        params = {name: saved[name] for name in used if name in saved}
        greedy_returns = partial(scope["greedy_returns"], values)
        returns = jax.jit(jax.vmap(greedy_returns))(params).mean(axis=1)
        return (saved["compile_seconds"], saved["train_seconds"], returns), seconds, saved

    for script in LEARNERS:
        *one, saved = run_ours(script)
        *twenty, _ = run_ours(script, *TWENTY)
        add_row(f"`{script}`", saved["timesteps"].ravel()[-1], one, twenty)
    for algorithm, config in PEER_CONFIGS.items():
        one, twenty = run_peer(algorithm, 1), run_peer(algorithm, 10 if algorithm == "DQN" else 20)
        add_row(f"rejax {algorithm}", config["total_timesteps"], one, twenty)
    head = ["program", "steps of a run", "1 seed: compiling, s", "training, s", "command to end, s"]
    head += [
        "greedy return",
        "20 seeds (DQN: 10): compiling, s",
        "training, s",
        "command to end, s",
    ]
    versions = ", ".join(PEER_PACKAGES[:3]).replace("==", " ")
    return f"{table([*head, 'passed'], rows)}\nVersions beside ours: {versions}.\n"


def grid_world():
    """Compare what twenty agents learn with the exact value of the start."""
    _, lines, saved = run(ROOT / "gridworld_qlearning.py", *TWENTY)
    args = json.loads(str(saved["args"]))
    values = saved["q_table"][:, -1, -1].max(axis=-1)  # the start is the last cell
    exponent = sum(args["grid_size"]) - 3  # the shortest path has one step more
    [gamma] = args["gamma"]
    exact = gamma**exponent
    error = np.abs(values - exact).max()
    return f"""`{lines[-1]}`.
The exact value is {gamma}^{exponent} = {exact:.5f}. The largest error is {error:.0e}.
"""


def main():
    """Measure everything, then write tests/RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", action="store_true", help="install rejax and run it, too")
    parser.add_argument("--newest", metavar="PYTHON", help="a Python that has the newest jax")
    text = "run REINFORCE on all environments of gymnax, too"
    parser.add_argument("--environments", action="store_true", help=text)
    args = parser.parse_args()
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ["jax", "optax", "gymnax"]
    )
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    machine = f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}, {versions}"
    for _, script, *_, changes in ABLATIONS + SPEED:
        changed(script, changes)  # now, so that a text that is gone is noticed at once
    learning_table, speed_table = learning()
    peers = peer() if args.peer else "Not measured: `--peer` was not given.\n"
    scaling_table, tasks = scaling(), other_tasks()
    ablation_table, hill_table = ablations()
    page = f"""# Results

Written by `python tests/benchmark.py` on {date.today()}: {machine}.
The machine is shared with other programs, so the speed of a short run can vary by a factor of two.
On this machine, the same command learns the same, bit by bit; elsewhere, roundings differ.

## Learning

Each learner makes 400 runs on CartPole-v1 with its default flags (`--num-seeds 400 --seed
{FRESH[1]}`: seeds on which no default was chosen). A run passes if its greedy policy has a mean
return of at least 475 over 100 new episodes. The last two columns describe 20 runs (`--num-seeds
20`). "First at 475" is the number of environment steps to the first progress line with a training
return of at least 475, a median. "Return at the end" is the mean training return of the last three
lines. A training return includes random actions: a quarter of all in the first two scripts.

{learning_table}
## Where the time goes

Seconds of `python NAME.py`, the faster of two commands, and what they consist of. "Rest" is
compiling and running the evaluation, and leaving Python. Importing is timed in a process of its
own, so a short rest can come out below 0. Then the speed of training, over all runs.

{speed_table}
## A peer beside

[rejax](https://github.com/keraJLi/rejax) on CartPole-v1 with its own configuration for this task
(`configs/gymnax/cartpole.yaml`), and our learners with their default flags, in the same minutes:
one seed, and 20 seeds in one vmapped program (10 of DQN, which takes minutes). All final policies
play the same 100 episodes greedily, and a seed passes with a mean return of at least 475. The
budgets differ: each program has its own default. rejax trains neural networks with methods that
scale to other tasks; what is compared is what a user waits for here.

{peers}
## Sweeps

A flag that takes several values makes one program of all runs. Beside it: one command for each
setting, one after the other. All have 20 seeds.

{sweeps()}
## The grid world

The last line of `python gridworld_qlearning.py --num-seeds 20`: {grid_world()}
## Scaling

{scaling_table}
## The TD scripts on other tasks

Each command makes 20 runs (`--num-seeds 20`), then plays 100 greedy episodes per run. A mean return
of -110 solves MountainCar-v0. `parallel_td.py` fails there, with the flags that suit it best of
those tried; it has no replay buffer.

{tasks}
## REINFORCE on every environment of gymnax

This is `reinforce_parallel.py --num-seeds 3` on all environments that gymnax registers, except
MNISTBandit-bsuite, which would download data. "Random play" and "always action 0" (often: doing
nothing) are mean returns of 100 episodes without learning. "Greedy" is the mean return of the
learned policy, undiscounted and without exploration, over three runs. Where the default flags do
not learn or take too long, the table has others.

Environments in which nothing is learned are in the table on purpose.

{every_environment() if args.environments else "Not measured: `--environments` was not given."}

## What each ingredient is worth

Each row makes 20 runs with one change: another value of a flag, or other lines in a copy of the
script. The columns are those of the first table, which shows the unchanged scripts.

{ablation_table}
With a gradient through the target, most runs fail. With episodes cut at the shortest one, all fail:
every reward is 1 and all cut episodes are equally long, so every advantage is exactly 0.

Two ingredients do not change how many seeds pass on CartPole-v1, but learning is slower without
them: to tell time limits from terminal states, and a learning rate that falls. The same changes of
`{TASKS[0]}`, the first of the commands above:

{hill_table}
Where rewards differ, something is learned from cut episodes too. Acrobot-v1 gives -1 for each step
but the last, so the shortest episode is told apart from the others, and that is enough. In
Breakout-MinAtar the bias shows: an episode that goes on earns more after the cut, and this is left
out.

{truncation()}

## What the lines for speed are worth

Each row compares a script with a copy that lacks one line or option: the speed in the last progress
line, the better of two commands each, run in turn. On a shared machine, the factors differ by up to
a sixth from one day to the next.

{speed_claims(args.newest)}"""
    (ROOT / "tests" / "RESULTS.md").write_text(page)


if __name__ == "__main__":
    main()
