"""Measure what README.md and comments in the scripts say, and write tests/RESULTS.md.

    python tests/benchmark.py                       # 40 minutes on two cores
    python tests/benchmark.py --newest python3.13   # with the newest jax, too
    python tests/benchmark.py --environments        # with REINFORCE on all of gymnax, too

Each script runs as a user would run it, in a process of its own. --newest names a Python that has
the packages with the newest jax.
"""

import argparse
import importlib.metadata
import itertools
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
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
USER_ENV = dict(os.environ)
import mountaincar_env as car  # it adds settings to os.environ, which jax reads when imported

# isort: split
import gymnax
import jax
import numpy as np

README = (ROOT / "README.md").read_text()
DOUBLE_Q, SARSA, NETWORK = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
[NETWORK_FLAGS] = re.findall(r"`(--num-envs 4 [^`]*)`", README)
FOLDER = Path(tempfile.mkdtemp())
LEARNERS = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py", "reinforce_parallel.py"]
TWENTY = "--num-seeds 20"
FRESH = "--num-seeds 400 --seed 95000"  # seeds on which no default was chosen
CONSTANTS = "0.05", "0.1", "0.15", "0.2", "0.25"  # values of epsilon beside its decay
SWEEP = {"--learning-rate": "0.02 0.2", "--sigma": "0.3 0.5"}  # README.md shows it

# MountainCar-v0: the same search for the two scripts, five seeds of each setting.
HILL = "--env-id MountainCar-v0 --num-centers 1000 --total-timesteps 500000"
HILL_VALUES = {
    "sigma": [0.07, 0.1, 0.15, 0.25],
    "learning_rate": [0.003, 0.01, 0.03, 0.1],
    "gamma": [0.99, 1],
    "epsilon": [0.1, 0.25],
}

# Flags of reinforce_parallel.py where its defaults do not learn or take too long.
ENV_FLAGS = {
    "Pendulum-v1": "--num-envs 128 --num-iterations 500 --gamma 0.95 --num-seeds 20",
    "Acrobot-v1": "--num-seeds 100",
    "MountainCarContinuous-v0": "--num-envs 64",
    "Asterix-MinAtar": "--num-envs 8 --num-iterations 50 --eval-episodes 20",
    "Breakout-MinAtar": "--num-envs 16 --num-iterations 300 --learning-rate 0.003 --gamma 0.9",
    "Freeway-MinAtar": "--num-envs 4 --num-iterations 25 --eval-episodes 20",
    "Seaquest-MinAtar": "--num-envs 2 --num-iterations 10 --eval-episodes 10",
    "SpaceInvaders-MinAtar": "--eval-episodes 20",
    "Catch-bsuite": "--num-envs 64 --num-iterations 300",
    "DeepSea-bsuite": "--num-envs 256 --num-iterations 500",
    "UmbrellaChain-bsuite": "--num-envs 64",
    "DiscountingChain-bsuite": "--num-envs 128",
    "MetaMaze-misc": "--num-envs 64 --num-iterations 200",
    "PointRobot-misc": "--num-envs 128 --num-iterations 200",
    "Pong-misc": "--num-iterations 30 --hidden-size 16 --eval-episodes 20",
}

# Ablations: what is changed, script, flags, and texts that occur once in it with their replacement.
ERRORS = "    td_errors = jax.vmap(partial(td_error, args, params))(batch, targets)  # (B,)\n"
OWN_TARGETS = (
    "    targets = jax.vmap(partial(td_target, args, state._replace(params=params)))(batch)\n"
)
THROUGH_TARGET = [
    ("def td_loss(params, args, batch, targets)", "def td_loss(params, args, state, batch)"),
    (ERRORS, OWN_TARGETS + ERRORS),
    ("(state.params, args, batch, targets)", "(state.params, args, state, batch)"),
]
TIME_LIMIT = [("        terminated=terminated,\n", "        terminated=terminated | truncated,\n")]
CONSTANT = [
    ("optax.linear_schedule(args.learning_rate, 0.0, args.num_updates)", "args.learning_rate")
]
ASSIGN = "state._replace(params=params, target_params=average, opt_state=opt_state)\n"
WARM_UP = [
    (
        f"    state = {ASSIGN}",
        f"    learned = {ASSIGN}"
        "    state = jax.tree.map(partial(jnp.where, timesteps > 1000), learned, state)\n",
    )
]
ABLATIONS = [
    ("gradient through the target", "parallel_td.py", "", THROUGH_TARGET),
    ("a time limit taken for a terminal state", "parallel_td.py", "", TIME_LIMIT),
    ("constant learning rate", "parallel_td.py", "", CONSTANT),
    ("no averaged target", "replay_td.py", "--tau 1", []),
    ("small buffer", "replay_td.py", "--buffer-size 1000", []),
    ("1,000 steps before the first update", "replay_td.py", FRESH, WARM_UP),
    ("episodes cut at the shortest", "reinforce_parallel.py", "--sync truncation", []),
]

# What lines that are there for speed are worth: what they do, script, flags, whether the newest jax
# is meant, and each text with its replacement.
LONG, AGENTS = "--total-timesteps 1e6", "--total-timesteps 1e7"
NEW, OLD = True, False
WIDE = ('    "xla_cpu_prefer_vector_width": 512,', "    #")
LIBRARY = ('    "xla_disable_hlo_passes": "dot-library-rewriter",', "    #")
ACTION_BY_ACTION = (
    'jnp.stack([w_a @ phi for w_a in params["weights"]])',
    'params["weights"] @ phi',
)
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
IN_EACH_STEP = [
    (
        "    uniform = jax.random.uniform(key_action, time_limit)",
        "    uniform = jax.random.split(key_action, time_limit)",
    ),
    ("        key, uniform = draws\n", "        key, uniform = draws[0], uniform_of(draws[1])\n"),
    ("def play(", "uniform_of = jax.random.uniform\n\n\ndef play("),
]
GYMNAX_CAR = [("ENV = MountainCar()\n", 'ENV = __import__("gymnax").make("MountainCar-v0")[0]\n')]
LEVEL = '"xla_backend_optimization_level": 1', '"xla_backend_optimization_level": 3'
AGENTS_AT_ONCE = [('if jax.default_backend() == "cpu":', "if 0:")]
SPEED = [
    ("one product per action", "parallel_td.py", LONG, OLD, [ACTION_BY_ACTION]),
    ("one product per action", "parallel_td.py", TWENTY, OLD, [ACTION_BY_ACTION]),
    ("wide vectors", "parallel_td.py", LONG, OLD, [WIDE]),
    ("no jax 0.11 matrix library", "parallel_td.py", LONG, NEW, [LIBRARY]),
    ("optimization level 1", "parallel_td.py", LONG, OLD, [LEVEL]),
    ("optimization level 1", "reinforce_parallel.py", TWENTY, OLD, [LEVEL]),
    ("agents one by one", "gridworld_qlearning.py", TWENTY, OLD, AGENTS_AT_ONCE),
    ("loops as one function", "gridworld_qlearning.py", AGENTS, OLD, LOOPS),
    ("wide vectors", "mountaincar_env.py", "", OLD, [WIDE]),
    ("wide vectors", "mountaincar_env.py", "--policy rocking", OLD, [WIDE]),
    ("loops as one function", "mountaincar_env.py", "", OLD, CAR_LOOPS),
    ("loops as one function", "mountaincar_env.py", "--policy rocking", OLD, CAR_LOOPS),
    ("random numbers in blocks", "gridworld_qlearning.py", AGENTS, OLD, STEP_BY_STEP),
]
COMPILING = [("parallel_td.py", ""), ("reinforce_parallel.py", TWENTY)]


def run(script, flags="", python=sys.executable, save=True, **env):
    """Run a script. Returns seconds from command to end, printed lines and saved arrays."""
    path = Path(tempfile.mkdtemp(dir=FOLDER)) / "saved.npz"
    script = ROOT / script  # a path of its own stays what it is
    command = [python, str(script), *flags.split()]
    print("+", " ".join(command), flush=True)
    if save and script.name != "mountaincar_env.py":
        command += ["--save", str(path)]
    began = time.perf_counter()
    process = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**USER_ENV, **env}
    )
    seconds = time.perf_counter() - began
    saved = dict(np.load(path)) if path.exists() else {}
    return seconds, process.stdout.splitlines(), saved


def changed(script, changes):
    """Write a copy of a script in which each text, which must occur once, is replaced."""
    text = (ROOT / script).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {script}"
        text = text.replace(old, new)
    copy = Path(tempfile.mkdtemp(dir=FOLDER)) / script
    copy.write_text(text)
    return copy


def apply(recipe, text):
    """Apply a recipe of README.md: "-" and " " are looked for, "+" and " " replace them."""
    for part in re.findall(r"(?:^[ -].*\n)+(?:^\+.*\n)*", recipe, re.MULTILINE):
        old, new = ("".join(re.findall(rf"^[ {sign}](.*\n)", part, re.MULTILINE)) for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def speed_of(lines):
    """Speed in the last progress line, in million steps per second."""
    found = re.findall(r"([\d.,]+) (M )?steps/s", "\n".join(lines))
    digits, million = found[-1]
    return float(digits.replace(",", "")) * (1 if million else 1e-6)


def speeds_in_turn(commands, rounds):
    """Run commands (arguments of `run`) in turn, several rounds; a list of speeds for each."""
    speeds = [[] for _ in commands]
    for _ in range(rounds):
        for own, command in zip(speeds, commands, strict=True):
            own.append(speed_of(run(*command, save=False)[1]))
    return speeds


def learned(saved):
    """Number of runs that passed, the worst, steps to the first line at 475, return at the end."""
    greedy, returns = saved["greedy_return"].mean(axis=1), saved["returns"]
    timesteps = np.broadcast_to(saved["timesteps"].T, returns.T.shape).T
    firsts = np.where(returns >= 475, timesteps, np.inf).min(axis=0)
    first = "never" if np.isinf(np.median(firsts)) else f"{np.median(firsts) / 1e3:.0f}k"
    passed = f"{np.sum(greedy >= 475)} of {len(greedy)}"
    return passed, f"{greedy.min():.0f}", first, f"{np.nanmean(returns[-3:]):.0f}"


LEARNED = ["passed", "worst run", "first at 475", "return at the end"]


def table(head, rows):
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def learning():
    """Measure 400 runs of each learner, and of replay_td.py with constant values of epsilon."""
    rows = []
    for script in LEARNERS:
        constants = CONSTANTS if script == "replay_td.py" else [None]
        for epsilon in constants:
            flags = f"--epsilon {epsilon}" if epsilon else ""
            saved = run(script, f"{flags} {FRESH}", JAX_NUM_CPU_DEVICES="20")[2]
            rows.append([f"`{script} {flags}`".replace(" `", "`"), *learned(saved)])
    return table(["script", *LEARNED], rows)


def times():
    """Measure what the seconds of a command consist of, with 1 and with 20 runs. Draw curves."""
    rows, curves = [], {}
    for script in [*LEARNERS, "gridworld_qlearning.py", "mountaincar_env.py"]:
        command = [sys.executable, "-c", f"import {script.removesuffix('.py')}"]
        importing = np.inf
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, env=USER_ENV)
            importing = min(importing, time.perf_counter() - began)
        seconds, lines, _ = min((run(script) for _ in range(3)), key=lambda one: one[0])
        compiling = float(re.findall(r"compiled in ([\d.]+)", lines[1])[0])
        rest = seconds - importing - compiling
        cells = [f"{part:.1f}" for part in (importing, compiling, rest, seconds)]
        cells.append(f"{speed_of(lines):.2f}")
        if script in LEARNERS:
            twenty_seconds, lines, curves[script] = run(script, TWENTY)
            cells += [f"{twenty_seconds:.1f}", f"{speed_of(lines):.2f}"]
        rows.append([f"`{script}`", *cells, "", ""][:8])
    picture(curves)
    cache = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    cache["JAX_COMPILATION_CACHE_DIR"] = str(FOLDER / "cache")
    first, second = (run("replay_td.py", f"--seed {seed}", **cache)[0] for seed in (0, 1))
    head = ["script", "importing", "compiling", "rest", "command to end", "M steps/s"]
    head += ["20 runs, command to end", "M steps/s"]
    return f"""{table(head, rows)}
With `JAX_COMPILATION_CACHE_DIR` and `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0` set,
`python replay_td.py` takes {first:.1f} s, and a second command with another seed {second:.1f} s.
"""


def picture(curves):
    """Draw the curves of the four learners: each run thin, the median bold, 475 dotted."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    _, panels = plt.subplots(1, 4, figsize=(14, 3.6), sharey=True, layout="constrained")
    for axes, (script, saved) in zip(panels, curves.items(), strict=True):
        timesteps = np.broadcast_to(saved["timesteps"].T, saved["returns"].T.shape).T
        axes.plot(timesteps, saved["returns"], "C0", linewidth=0.4)
        middle = np.nanmedian(saved["returns"], axis=1)
        axes.plot(np.median(timesteps, axis=1), middle, "C0", linewidth=2.5)
        axes.axhline(475, color="gray", linestyle=":")
        axes.set_title(script, fontsize=14)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("environment steps", fontsize=12)
    panels[0].set_ylabel("return of training episodes", fontsize=12)
    plt.savefig(ROOT / ".pictures" / "curve.png", dpi=80)


def sweep():
    """Measure a sweep with 20 seeds, and the same runs as a loop over commands."""
    flags = " ".join(f"{flag} {values}" for flag, values in SWEEP.items())
    plot = f"--plot {ROOT / '.pictures' / 'sweep.png'}"
    seconds, lines, _ = run("parallel_td.py", f"{flags} {TWENTY} {plot}")
    settings = list(itertools.product(*[values.split() for values in SWEEP.values()]))
    loop = 0.0
    for setting in settings:
        own = " ".join(f"{flag} {value}" for flag, value in zip(SWEEP, setting, strict=True))
        loop += run("parallel_td.py", f"{own} {TWENTY}")[0]
    shown = "\n".join(lines[-len(settings) :])
    return f"""```
$ python parallel_td.py {flags} {TWENTY}
{shown}
```

This took {seconds:.0f} seconds, a loop over four commands {loop:.0f}.
"""


def environments_in_lockstep():
    """Compare 16 environments in lockstep with one: five pairs in turn, with 1 and 20 seeds."""
    rows = []
    for seeds, timesteps in (1, "1e6"), (20, "2e5"):
        flags = f"--num-seeds {seeds} --total-timesteps {timesteps}"
        commands = [("parallel_td.py", f"{flags} --num-envs {n}") for n in (1, 16)]
        one, many = speeds_in_turn(commands, 5)
        factors = [b / a for a, b in zip(one, many, strict=True)]
        speeds = f"{median(one):.3f}", f"{median(many):.3f}"
        rows.append([seeds, *speeds, f"{median(factors):.1f}"])
    _, _, saved = run("parallel_td.py", f"--num-envs 1 {TWENTY}")
    head = ["seeds", "M steps/s with `--num-envs 1`", "with 16", "factor (median of five)"]
    text = "With one environment, {} seeds pass; the return reaches 475 at {} steps (median)."
    passed, _, first, _ = learned(saved)
    return f"{table(head, rows)}\n{text.format(passed, first)}\n"


def roll_by_step(env, args):
    """M steps/s of cars that call `step`, which resets by itself. Actions are drawn beforehand."""

    def roll(args):
        def step(carry, draws):
            env_state, total = carry
            key, uniform = draws
            action = (3 * uniform).astype(int)
            obs, env_state, reward, *_ = env.step(key, env_state, action, env_params)
            return (env_state, total + reward + obs[0]), None  # else, nothing is computed

        def episodes(carry, key):
            key_action, key_step = jax.random.split(key)
            draws = jax.random.split(key_step, 200), jax.random.uniform(key_action, 200)
            return jax.lax.scan(step, carry, draws)[0], None

        key, key_reset = jax.random.split(jax.random.key(args.seed))
        carry = env.reset(key_reset, env_params)[1], 0.0
        return jax.lax.scan(episodes, carry, jax.random.split(key, 10))[0][1]

    env_params = jax.tree.map(np.asarray, env.default_params)
    cars = {"seed": np.arange(args.num_envs)}
    compiled = car.over_runs(roll, args, jax.device_count()).lower(cars).compile()
    jax.block_until_ready(compiled(cars))
    began = time.perf_counter()
    jax.block_until_ready([compiled(cars) for _ in range(5)])
    return 5 * 2000 * args.num_envs / (time.perf_counter() - began) / 1e6


def cars():
    """Compare rollouts of 4,096 cars on the same devices with the same options, in turn."""
    args, theirs = car.parse_args([]), gymnax.make("MountainCar-v0")[0]
    names = ["`mountaincar_env.py`", "without the Taylor series", "gymnax's class in its place"]
    names += ["random actions drawn in each step", "by `step` of its class"]
    names += ["by `step` of gymnax's class", "`--policy rocking`"]
    speeds = [[] for _ in names]
    copies = [changed("mountaincar_env.py", part) for part in (TAYLOR, GYMNAX_CAR, IN_EACH_STEP)]
    for _ in range(3):
        own = [speed_of(run(script)[1]) for script in ["mountaincar_env.py", *copies]]
        own += [roll_by_step(env, args) for env in (car.ENV, theirs)]
        own.append(speed_of(run("mountaincar_env.py", "--policy rocking")[1]))
        for several, speed in zip(speeds, own, strict=True):
            several.append(speed)
    medians = [median(several) for several in speeds]
    rows = []
    for name, own in zip(names, medians, strict=True):
        rows.append([name, f"{own:.0f}", f"{medians[0] / own:.1f}"])
    return table(["rollout", "M steps/s", "the script is faster by"], rows)


def hill():
    """Make the same search for two scripts on MountainCar-v0; test the best of each on 20 seeds."""
    found, best, names = {}, {}, list(HILL_VALUES)
    scripts = "parallel_td.py", "replay_td.py"
    for script in scripts:
        flags = [f"--{name.replace('_', '-')} {words(own)}" for name, own in HILL_VALUES.items()]
        flags = f"{HILL} {' '.join(flags)} --num-seeds 5"
        saved = run(script, flags, JAX_NUM_CPU_DEVICES="16")[2]
        greedy = saved["greedy_return"].mean(axis=1).reshape(-1, 5).mean(axis=1)
        settings = list(zip(*[saved[name][::5] for name in names], strict=True))
        found[script] = dict(zip(settings, greedy, strict=True))
        best[script] = settings[greedy.argmax()]
    columns = list(itertools.product(*list(HILL_VALUES.values())[2:]))
    rows = []
    for row in itertools.product(*list(HILL_VALUES.values())[:2]):
        cells = [f"{found[script][row + own]:.0f}" for script in scripts for own in columns]
        rows.append([", ".join(f"{value:g}" for value in row), *cells])
    head = [f"{script.split('_')[0]} {g:g}, {e:g}" for script in scripts for g, e in columns]
    grid = table(["sigma, learning rate", *head], rows)
    rows = []
    commands = [
        (script, setting, "its best" if setting == best[script] else "the other's best", "")
        for setting, script in itertools.product(dict.fromkeys(best.values()), scripts)
    ]
    twice = "its best, twice the steps", " --total-timesteps 1000000"
    commands.insert(1, ("parallel_td.py", best["parallel_td.py"], *twice))
    for script, setting, mark, more in commands:
        own = zip(names, setting, strict=True)
        flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in own) + more
        greedy = run(script, f"{HILL} {flags} {TWENTY} --seed 95000")[2]["greedy_return"]
        means = greedy.mean(axis=1)
        rows.append([f"`{script} {flags}`", mark, f"{means.mean():.1f}", f"{means.min():.1f}"])
    return f"{grid}\n{table(['command', 'flags', 'mean', 'worst run'], rows)}"


def words(values):
    """Write values as a flag takes them."""
    return " ".join(f"{value:g}" for value in values)


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
    """Measure three runs of REINFORCE on each environment of gymnax."""
    rows = []
    names = [name for name in gymnax.registered_envs if name != "MNISTBandit-bsuite"]

    def learn(env_id):
        flags = f"--num-seeds 3 --env-id {env_id} {ENV_FLAGS.get(env_id, '')}"
        return run("reinforce_parallel.py", flags, JAX_NUM_CPU_DEVICES="1")[2]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(learn, names))
    for env_id, saved in zip(names, results, strict=True):
        flags = ENV_FLAGS.get(env_id, "")
        greedy = saved["greedy_return"].mean(axis=1)
        unlearned = [f"{mean:.2f}" for mean in unlearned_returns(env_id)]
        result = f"{greedy.mean():.2f} ({greedy.min():.2f} to {greedy.max():.2f})"
        rows.append([env_id, f"`{flags}`" if flags else "defaults", *unlearned, result])
    head = ["environment", "flags", "random play", "always action 0", "greedy (worst to best run)"]
    return table(head, rows)


def ablations():
    """Measure twenty runs with each change, by flags or in a copy of the script."""
    rows = []
    for what, script, flags, changes in ABLATIONS:
        saved = run(changed(script, changes), f"{TWENTY} {flags}")[2]
        own = f"`{script} {flags}`".replace(" `", "`")
        rows.append([own, what, *learned(saved)])
    return table(["command", "change", *LEARNED], rows)


def recipes():
    """Measure README.md's recipes, each beside the script that it changes."""
    rows = []
    for what, script, recipe, flags in [
        ("Double Q-learning", "replay_td.py", DOUBLE_Q, "--num-seeds 100 --seed 95000"),
        ("a network", "replay_td.py", NETWORK, f"{NETWORK_FLAGS} --num-seeds 40 --seed 95000"),
    ]:
        copy = changed(script, [])
        copy.write_text(apply(recipe, copy.read_text()))
        rows.append([what, f"`{script} {flags}`", *learned(run(copy, flags)[2])])
    flags = "--num-seeds 100 --seed 95000"
    rows.append(["none", f"`replay_td.py {flags}`", *learned(run("replay_td.py", flags)[2])])
    copy, grid = changed("gridworld_qlearning.py", []), []
    copy.write_text(apply(SARSA, copy.read_text()))
    for what, script in ("none", "gridworld_qlearning.py"), ("expected SARSA", copy):
        saved = run(script, f"--epsilon 0.1 0.3 {TWENTY}")[2]
        for epsilon, part in zip([0.1, 0.3], (slice(20), slice(20, 40)), strict=True):
            values = saved["q_table"][part, -1, -1].max(axis=-1)  # the start is the last cell
            steps = saved["steps_per_episode"][-1, part].mean()
            longest = saved["greedy_steps"][part].max()
            grid.append([what, epsilon, f"{values.mean():.5f}", f"{steps:.2f}", f"{longest:.0f}"])
    grid_head = ["recipe", "epsilon", "value of the start", "steps of a training episode"]
    grid_head.append("greedy steps, longest")
    return f"{table(['recipe', 'command', *LEARNED], rows)}\n{table(grid_head, grid)}"


def speed_claims(newest):
    """Measure scripts without one of their lines that are there for speed: fastest of four."""
    rows = []
    for what, script, flags, needs_newest, changes in SPEED:
        if needs_newest and not newest:
            continue
        python = newest if needs_newest else sys.executable
        commands = [(one, flags, python) for one in (script, changed(script, changes))]
        with_line, without = map(max, speeds_in_turn(commands, 4))
        command = f"`{script} {flags}`".replace(" `", "`") + " (newest jax)" * needs_newest
        numbers = f"{with_line:.2f}", f"{without:.2f}", f"{with_line / without:.2f}"
        rows.append([what, command, *numbers])
    for script, flags in COMPILING:
        scripts = [script, changed(script, [LEVEL])] * 2
        seconds = [float(run(one, flags)[2]["compile_seconds"]) for one in scripts]
        with_line, without = min(seconds[::2]), min(seconds[1::2])
        numbers = f"{with_line:.1f} s", f"{without:.1f} s", f"{without / with_line:.2f}"
        command = f"`{script} {flags}`".replace(" `", "`")
        rows.append(["optimization level 1: compiling", command, *numbers])
    return table(["line", "command", "M steps/s with it", "without", "factor"], rows)


def grid_world():
    """Compare what twenty agents learn with the exact value of the start."""
    _, lines, saved = run("gridworld_qlearning.py", f"{TWENTY} --seed 95000")
    exact = 0.9**17  # the shortest path from (7, 11) to (0, 0) has 18 steps
    error = np.abs(saved["q_table"][:, -1, -1].max(axis=-1) - exact).max()
    return f"""`{lines[-1]}`.
The exact value is 0.9^17 = {exact:.5f}. The largest error is {error:.0e}.
"""


def main():
    """Measure everything, then write tests/RESULTS.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--newest", metavar="PYTHON", help="a Python that has the newest jax")
    text = "run REINFORCE on all environments of gymnax, too"
    parser.add_argument("--environments", action="store_true", help=text)
    args = parser.parse_args()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "optax", "gymnax")]
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    machine = [f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}", *versions]
    for _, script, *_, changes in ABLATIONS + SPEED:
        changed(script, changes)  # now, so that a text that is gone is noticed at once
    parts = [
        ("Where the time goes", TIMES, times),
        ("A sweep", "", sweep),
        ("One environment and sixteen", LOCKSTEP, environments_in_lockstep),
        ("The car", CARS, cars),
        ("What the lines for speed are worth", LINES, partial(speed_claims, args.newest)),
        ("The grid world", GRID, grid_world),
        ("Learning", LEARNING, learning),
        ("MountainCar-v0 with and without a replay buffer", HILLS, hill),
        ("Recipes of README.md", RECIPES, recipes),
        ("What each ingredient is worth", INGREDIENTS, ablations),
    ]
    if args.environments:
        parts.append(("REINFORCE on every environment of gymnax", ENVIRONMENTS, every_environment))
    command = " ".join(["tests/benchmark.py", *sys.argv[1:]])
    page = f"""# Results

Written by `python {command}` on {date.today()}: {", ".join(machine)}.
The machine is shared with other programs, so the speed of a short run can vary by a factor of two.
On this machine, the same command learns the same, bit by bit; elsewhere, roundings differ.
"""
    for title, text, measure in parts:
        page += f"\n## {title}\n{text}\n{measure()}"
        (ROOT / "tests" / "RESULTS.md").write_text(page)


LEARNING = f"""
CartPole-v1, default flags, `{FRESH}`: seeds on which no default was chosen. A run passes if
its greedy policy has a mean return of at least 475 over 100 new episodes. "First at 475" is the
number of environment steps to the first progress line with a training return of at least 475, a
median. "Return at the end" is the mean training return of the last three lines. A training return
includes random actions. The rows of `replay_td.py` are what `epsilon_decay_td.py` competes with:
constant rates of exploration. Its own default is 0.25. These commands also had
`JAX_NUM_CPU_DEVICES=20`: twenty runs at a time stay in the cache of a core, so they are faster.
"""
TIMES = """
Seconds of `python NAME.py`, the fastest of three commands, and what they consist of. Compiling
includes the evaluation. "Rest" is training, evaluation and leaving Python.
"""
LOCKSTEP = """
`parallel_td.py`, in turn. A single run has five times the default steps, so that it takes seconds.
"""
CARS = """
4,096 cars, random actions except in the last row, on the same devices with the same compiler
options; medians of three, in turn. Steps in the padding after an episode do not count. In the rows
"by `step`", random actions are drawn for a whole episode, as in the script.
"""
HILLS = f"""
The same search for both scripts: `{HILL}`, each combination of the values below, five seeds
(0 to 4) each. The first table has the greedy mean return for each sigma and learning rate (rows),
gamma and epsilon (columns). Then the best setting of each runs in both scripts, on 20 other seeds.
A mean return of -110 solves the task; random play has -200. The search had
`JAX_NUM_CPU_DEVICES=16`, which makes many runs faster. An update of `replay_td.py` takes twice
as long (see "Where the time goes"), so `parallel_td.py` also gets twice the steps.
"""
GRID = f"""
The last line of `python gridworld_qlearning.py {TWENTY} --seed 95000`:
"""
RECIPES = """
Each recipe of README.md, applied to the script, beside the script itself ("none").
"""
INGREDIENTS = """
Each row makes 20 runs (or as many as its flags say) with one change: another value of a flag, or
other lines in a copy of the script. The columns are those of "Learning". With episodes cut at the
shortest, all fail: every reward is 1 and all cut episodes are equally long, so every advantage is
exactly 0.
"""
LINES = """
Each row compares a script with a copy that lacks one line or option, in turn: the fastest of four
commands each, because other programs only slow a command down. Factors still differ by up to a
sixth from one day to the next.
"""
ENVIRONMENTS = """
This is `reinforce_parallel.py --num-seeds 3` on all environments that gymnax registers, except
MNISTBandit-bsuite, which would download data. "Random play" and "always action 0" (often: doing
nothing) are mean returns of 100 episodes without learning. "Greedy" is the mean return of the
learned policy, undiscounted and without exploration, over all runs. Where the default flags do
not learn or take too long, the table has others.

What is not learned, and why: MountainCar-v0, FrozenLake and Seaquest never or almost never reward
random play. Asterix has long episodes, so a run here plays few of them. MemoryChain, SimpleBandit
and MetaMaze need a memory, which the policy lacks.
"""


if __name__ == "__main__":
    main()
