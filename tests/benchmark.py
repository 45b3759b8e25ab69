"""Measure what README.md and comments in the scripts say, and write tests/RESULTS.md.

python tests/benchmark.py --newest python3.13    # a Python that has the newest jax; an hour
"""

import argparse
import importlib.metadata
import inspect
import itertools
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
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
from gymnax.experimental import RolloutWrapper
from matplotlib.figure import Figure

README = (ROOT / "README.md").read_text()
DOUBLE_Q, SARSA = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
FOLDER = Path(tempfile.mkdtemp())
PARALLEL, REPLAY, DECAY = TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
GRID, REINFORCE, CAR = "gridworld_qlearning.py", "reinforce_parallel.py", "mountaincar_env.py"
TWENTY, FRESH = "--num-seeds 20", "--seed 95000"  # seeds on which nothing was chosen
SWEEP = {"--learning-rate": "0.02 0.2", "--sigma": "0.3 0.5"}  # README.md shows it
# Other tasks: the flags that fix the size of a run, and the values that the search combines.
SIZE = "--num-centers 1000 --total-timesteps 5e5"
RATES, SIGMAS = [0.01, 0.03, 0.06], [0.15, 0.25, 0.5]
TD_VALUES = {"learning-rate": RATES, "epsilon": [0.1, 0.25], "sigma": SIGMAS}
DECAY_VALUES = {"learning-rate": RATES, "end-e": [0.05, 0.1], "sigma": SIGMAS}
PI_VALUES = {"learning-rate": [0.003, 0.01, 0.03], "gamma": [0.95, 0.98, 0.99]}
TASKS = [
    *itertools.product(TRIO, ["Acrobot-v1", "MountainCar-v0"], [SIZE]),
    (REINFORCE, "Acrobot-v1", "--num-envs 256"),
    (REINFORCE, "MountainCarContinuous-v0", "--num-envs 64"),
    (REINFORCE, "Pendulum-v1", "--num-envs 128 --num-iterations 500"),
]
VALUES = {PARALLEL: TD_VALUES, REPLAY: TD_VALUES, DECAY: DECAY_VALUES, REINFORCE: PI_VALUES}

NETWORK = """
-        "centers": jax.random.uniform(key_centers, (obs.shape[1], run.num_centers), minval=-1.0),
-        "weights": jnp.zeros((num_actions, run.num_centers)),
+        "w0": jax.random.normal(key_centers, (obs.shape[1], run.num_centers)),
+        "b0": jnp.zeros(run.num_centers),
+        "w1": jnp.zeros((run.num_centers, num_actions)),
+        "b1": jnp.zeros(num_actions),
-    centers = jax.lax.stop_gradient(params["centers"])  # they stay where they are
-    squared_distance = jnp.sum((scaled[:, None] - centers) ** 2, axis=0)  # (F,)
-    phi = jnp.exp(-squared_distance / (2 * run.sigma**2))  # (F,)
-    # One product for each action: 1.7 times as fast as weights @ phi.
-    return jnp.stack([w_a @ phi for w_a in params["weights"]])
+    hidden = jax.nn.relu(scaled @ params["w0"] + params["b0"])
+    return hidden @ params["w1"] + params["b1"]
"""
DEEP = "--num-envs 4 --batch-size 128 --num-centers 64 --learning-rate 0.001 --total-timesteps 3e5"
# What is changed, script, flags, and texts that occur once in it with their replacement.
LOSS = "    loss = partial(td_loss, run)\n"
OWN_TARGETS = """    def loss(params, batch, _):
        of_params = partial(td_target, run, state._replace(params=params))
        return td_loss(run, params, batch, jax.vmap(of_params)(batch))

"""
SCHEDULE = "optax.linear_schedule(run.learning_rate, 0.0, run.num_updates)", "run.learning_rate"
LIMIT = "        terminated=terminated,\n", "        terminated=terminated | truncated,\n"
LEARN = "_replace(params=params, target_params=target_params, opt_state=opt_state)\n"
WAIT = "    state = jax.tree.map(partial(jnp.where, timesteps > 1000), learned, state)\n"
LATER = [(f"    state = state.{LEARN}", f"    learned = state.{LEARN}{WAIT}")]
ABLATIONS = [
    ("nothing", PARALLEL, "", []),
    ("gradient through the target", PARALLEL, "", [(LOSS, OWN_TARGETS)]),
    ("a time limit taken for a terminal state", PARALLEL, "", [LIMIT]),
    ("constant learning rate", PARALLEL, "", [SCHEDULE]),
    ("nothing", REPLAY, "", []),
    ("no averaged target", REPLAY, "--tau 1", []),
    ("a small buffer", REPLAY, "--buffer-size 1000", []),
    ("1,000 steps before the first update", REPLAY, "", LATER),
    ("Double Q-learning (README.md)", REPLAY, "", DOUBLE_Q),
    ("a network", REPLAY, DEEP, NETWORK),
]

# Lines for speed: what they do, script, flags, whether the newest jax is meant, replacements.
LONG, AGENTS, NEW, OLD = "--total-timesteps 1e6", "--total-timesteps 1e7", True, False
WIDE = ('    "xla_cpu_prefer_vector_width": 512,', "    #")
LIBRARY = ('    "xla_disable_hlo_passes": "dot-library-rewriter",', "    #")
ONE_ENV = '"--num-envs", type=count, default=16', '"--num-envs", type=count, default=1'
PRODUCTS = 'jnp.stack([w_a @ phi for w_a in params["weights"]])', 'params["weights"] @ phi'
LOOPS = [("byte_threshold=500000", "byte_threshold=1000")]
CAR_LOOPS = [("byte_threshold=1000000000", "byte_threshold=1000")]
TAYLOR = [("slope = cosine(", "slope = jnp.cos(")]
AT_ONCE = [('if jax.default_backend() == "cpu":', "if 0:")]
LEVEL = '"xla_backend_optimization_level": 1', '"xla_backend_optimization_level": 3'
SPEED = [
    ("one product per action", PARALLEL, LONG, OLD, [PRODUCTS]),
    ("16 environments in lockstep", PARALLEL, LONG, OLD, [ONE_ENV]),
    ("16 environments in lockstep", PARALLEL, TWENTY, OLD, [ONE_ENV]),
    ("wide vectors", PARALLEL, LONG, OLD, [WIDE]),
    ("no jax 0.11 matrix library", PARALLEL, LONG, NEW, [LIBRARY]),
    ("agents one by one", GRID, TWENTY, OLD, AT_ONCE),
    ("loops as one function", GRID, AGENTS, OLD, LOOPS),
    ("wide vectors", CAR, "", OLD, [WIDE]),
    ("wide vectors", CAR, "--policy rocking", OLD, [WIDE]),
    ("loops as one function", CAR, "", OLD, CAR_LOOPS),
    ("loops as one function", CAR, "--policy rocking", OLD, CAR_LOOPS),
    ("Taylor's series", CAR, "", OLD, TAYLOR),
    ("Taylor's series", CAR, "--policy rocking", OLD, TAYLOR),
]


def run(script, flags="", python=sys.executable):
    """Run a script. Returns seconds from command to end, printed lines and saved arrays."""
    path = Path(tempfile.mkdtemp(dir=FOLDER)) / "saved.npz"
    script = ROOT / script  # a path of its own stays what it is
    command = [python, str(script), *flags.split()]
    if script.name != CAR:
        command += ["--save", str(path)]
    began = time.perf_counter()
    # Few runs at a time stay in the cache of a core: 400 are 1.8 times as fast.
    env = USER_ENV | {"JAX_NUM_CPU_DEVICES": "20"} if "00 --seed" in flags else USER_ENV
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    saved = dict(np.load(path)) if path.exists() else {}
    return time.perf_counter() - began, process.stdout.splitlines(), saved


def changed(script, changes):
    """Write a copy of a script. Changes are pairs of texts, old and new, or a diff."""
    text = (ROOT / script).read_text()
    if isinstance(changes, str):
        parts = re.findall(r"(?:^[ -].*\n)+(?:^\+.*\n)*", changes, re.MULTILINE)
        lines = [[re.findall(rf"^[ {s}](.*\n)", p, re.MULTILINE) for s in "-+"] for p in parts]
        changes = [("".join(old), "".join(new)) for old, new in lines]
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {script}"
        text = text.replace(old, new)
    copy = Path(tempfile.mkdtemp(dir=FOLDER)) / script
    copy.write_text(text)
    return copy


def speed_of(lines):
    """Speed in the last progress line, in million steps per second."""
    digits, million = re.findall(r"([\d.,]+) (M )?steps/s", "\n".join(lines))[-1]
    return float(digits.replace(",", "")) * (1 if million else 1e-6)


LEARNED = ["passed", "worst run", "greedy return", "first at 475", "training return at the end"]


def learned(saved):
    """The columns of LEARNED, for runs of CartPole-v1."""
    greedy, returns = saved["greedy_return"].mean(axis=1), saved["returns"]
    first = np.median(np.where(returns >= 475, saved["timesteps"], np.inf).min(axis=0))
    passed = f"{np.sum(greedy >= 475)} of {len(greedy)}", f"{greedy.min():.0f}"
    text = "never" if np.isinf(first) else f"{first / 1e3:.0f}k"
    return *passed, f"{greedy.mean():.1f}", text, f"{np.nanmean(returns[-3:]):.0f}"


def table(head, rows):
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def command_of(script, flags):
    return f"`{script} {flags}`".replace(" `", "`")


# The functions below are the sections of RESULTS.md. Their docstrings are its titles and texts.


def times(newest):
    """Where the time goes

    Seconds of `python NAME.py`, the fastest of three commands; of these, compiling, which includes
    the evaluation. The rest is importing (1 to 2 seconds), training, and leaving Python.
    """
    rows, curves = [], {}
    for script in [GRID, *TRIO, REINFORCE, CAR]:
        seconds, lines, _ = min((run(script) for _ in range(3)), key=lambda one: one[0])
        compiling = re.findall(r"compiled in ([\d.]+)", lines[1])[0]
        row = [f"`{script}`", f"{seconds:.1f}", compiling, f"{speed_of(lines):.2f}", "", ""]
        if script != CAR:
            many, lines, curves[script] = run(script, TWENTY)
            row[-2:] = f"{many:.1f}", f"{speed_of(lines):.2f}"
        rows.append(row)
    del curves[GRID]
    picture(curves)
    head = ["script", "command to end", "compiling", "M steps/s"]
    return table([*head, "with `--num-seeds 20`", "M steps/s"], rows)


def picture(curves):
    """Draw the curves of four learners: each run thin, the median bold, 475 dotted."""
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    for axes, (script, saved) in zip(panels, curves.items(), strict=True):
        timesteps, returns = saved["timesteps"], saved["returns"]
        axes.plot(timesteps, returns, "C0.-", linewidth=0.5, markersize=1, alpha=0.5)
        axes.plot(np.median(timesteps, axis=1), np.nanmedian(returns, axis=1), "C0.-", linewidth=2)
        axes.axhline(475, color="gray", linestyle=":")
        axes.set_title(script, fontsize=14)
        axes.set_xlabel("environment steps", fontsize=12)
    panels[0].set_ylabel("return of training episodes", fontsize=12)
    figure.savefig(ROOT / ".pictures" / "curve.png", dpi=80)


def sweep(newest):
    """A sweep

    The last lines of a command, and its time beside that of a loop over four commands.
    """
    flags = " ".join(f"{flag} {values}" for flag, values in SWEEP.items())
    plot = f"--plot {ROOT / '.pictures' / 'sweep.png'}"
    seconds, lines, _ = run(PARALLEL, f"{flags} {TWENTY} {plot}")
    loop = itertools.product(*[[f"{k} {v}" for v in vs.split()] for k, vs in SWEEP.items()])
    loop = sum(run(PARALLEL, f"{' '.join(own)} {TWENTY}")[0] for own in loop)
    shown = "\n".join(["```", f"$ python {PARALLEL} {flags} {TWENTY}", *lines[-4:], "```"])
    return f"{shown}\n\nThis took {seconds:.0f} seconds, a loop over four commands {loop:.0f}.\n"


def learning(newest):
    """Learning, and what decaying exploration is worth

    CartPole-v1, `--num-seeds 400 --seed 95000` (four constants: 200 seeds): seeds on which no
    default was chosen. A run passes if its greedy policy has a mean return of at least 475 over 100
    new episodes. "First at 475" is the median number of steps to the first progress line with a
    training return of at least 475. "Training return at the end" is the mean of the last three
    lines. A training return includes random actions, so a constant epsilon lowers it by definition.
    The rows of `replay_td.py` are five constants (0.25 is its default) beside the decay of
    `epsilon_decay_td.py`. These commands had `JAX_NUM_CPU_DEVICES=20`, which makes them faster.
    """
    constants = [(REPLAY, f"--epsilon {epsilon}") for epsilon in (0.05, 0.1, 0.15, 0.2)]
    rows = []
    for script, flags in [(PARALLEL, ""), *constants, (REPLAY, ""), (DECAY, ""), (REINFORCE, "")]:
        seeds = 200 if flags else 400
        saved = run(script, f"{flags} --num-seeds {seeds} {FRESH}")[2]
        rows.append([command_of(script, flags), *learned(saved)])
    _, lines, saved = run(GRID, f"--num-seeds 400 {FRESH}")
    [line] = [line for line in lines if line.startswith("value of the start")]
    error = np.abs(saved["q_table"][:, -1, -1].max(axis=-1) - 0.9**17).max()
    text = f"The exact value is 0.9^17 = {0.9**17:.5f}, the largest error {error:.0e}."
    return f"{table(['command', *LEARNED], rows)}\n`{GRID}`: {line}. {text}\n"


def tasks(newest):
    """Other tasks

    The same small search for each script and task: all combinations of the values below, five seeds
    (0 to 4) each. The setting with the best mean greedy return then runs on 20 other seeds. Here
    one sees what replay is worth: `parallel_td.py` does not learn MountainCar-v0 on every seed.
    """
    best, grids = [], []
    for script, env_id, size in TASKS:
        values = VALUES[script]
        swept = " ".join(f"--{k} {' '.join(map(str, v))}" for k, v in values.items())
        saved = run(script, f"--env-id {env_id} {size} {swept} --num-seeds 5")[2]
        means = saved["greedy_return"].mean(axis=1).reshape(-1, 5).mean(axis=1)
        settings = [*itertools.product(*values.values())]
        own = zip(values, settings[means.argmax()], strict=True)
        flags = f"--env-id {env_id} {size} " + " ".join(f"--{k} {v}" for k, v in own)
        seconds, _, saved = run(script, f"{flags} {TWENTY} {FRESH}")
        tested = saved["greedy_return"].mean(axis=1)
        cells = means.max(), tested.mean(), tested.min()
        best.append([command_of(script, flags), *(f"{x:.1f}" for x in cells), f"{seconds:.0f}"])
        own = (f"{', '.join(map(str, s))}: {m:.0f}" for s, m in zip(settings, means, strict=True))
        grids.append(f"- `{script}`, {env_id} ({', '.join(values)}): {'; '.join(own)}")
    head = ["command", "in the search", "20 other seeds", "worst run", "seconds (20 runs)"]
    return f"{table(head, best)}\nThe means of all settings:\n\n" + "\n".join(grids) + "\n"


def truncation(newest):
    """What padding is worth

    Greedy returns of 20 runs (the worst run in brackets), with padded episodes, and with episodes
    cut at the shortest. In CartPole-v1, cut episodes have equal returns, so there is no gradient.
    In the other two tasks an episode that ends early is a good one.
    """
    rows = []
    for env_id, flags in [("CartPole-v1", ""), TASKS[-2][1:], ("FourRooms-misc", "")]:
        row = [command_of(REINFORCE, f"--env-id {env_id} {flags}")]
        for sync in "padding", "truncation":
            own = f"--env-id {env_id} {flags} {TWENTY} {FRESH} --sync {sync}"
            greedy = run(REINFORCE, own)[2]["greedy_return"].mean(axis=1)
            row.append(f"{greedy.mean():.2f} ({greedy.min():.2f})")
        rows.append(row)
    return table(["command", "padding", "truncation"], rows)


def ablations(newest):
    """What each ingredient is worth

    Forty runs of CartPole-v1 with one change each: another flag, or other lines in a copy of the
    script. Where a row is as good as "nothing", its ingredient buys nothing on this task. The
    network is this diff of `replay_td.py`:
    """
    rows = []
    for what, script, flags, changes in ABLATIONS:
        saved = run(changed(script, changes), f"--num-seeds 40 {FRESH} {flags}")[2]
        rows.append([command_of(script, flags), what, *learned(saved)])
    sarsa, grid = changed(GRID, SARSA), []
    for what, script in ("nothing", GRID), ("expected SARSA (README.md)", sarsa):
        saved = run(script, f"--epsilon 0.1 0.3 {TWENTY}")[2]
        for epsilon, part in (0.1, slice(20)), (0.3, slice(20, 40)):
            values = saved["q_table"][part, -1, -1].max(axis=-1)  # the start is the last cell
            steps = saved["steps_per_episode"][-1, part].mean()
            grid.append([what, epsilon, f"{values.mean():.5f}", f"{steps:.2f}"])
    head = ["change", "epsilon", "value of the start", "steps of a training episode"]
    rows = table(["command", "change", *LEARNED], rows)
    return f"```diff{NETWORK}```\n\n{rows}\n`{GRID}`:\n\n{table(head, grid)}"


def roll_by_step(env):
    """M steps/s of 4,096 cars with random actions by `step` of a class, which resets by itself."""
    space, keys = env.action_space(env.default_params), jax.random.split(jax.random.key(0), 4096)
    rollout = RolloutWrapper(lambda _, obs, key: space.sample(key), env=env, num_env_steps=200)
    jax.block_until_ready(rollout.batch_rollout(keys, None))
    began = time.perf_counter()
    jax.block_until_ready([rollout.batch_rollout(keys, None) for _ in range(5)])
    return 5 * 200 * len(keys) / (time.perf_counter() - began) / 1e6


def cars(newest):
    """The car

    4,096 cars. The script rolls out without resets, on all cores. gymnax's `RolloutWrapper` calls
    `step`, which computes a reset in every step, here on one core. Medians of five, in turn.
    """
    names = ["without resets: the script", "without resets, `--policy rocking`"]
    names += ["with resets, by `step` of its class", "with resets, by `step` of gymnax's class"]
    speeds, theirs = [], gymnax.make("MountainCar-v0")[0]
    for _ in range(5):
        own = [speed_of(run(CAR, flags)[1]) for flags in ("", "--policy rocking")]
        speeds.append([*own, roll_by_step(car.ENV), roll_by_step(theirs)])
    columns = zip(names, zip(*speeds, strict=True), strict=True)
    ratio = median(own[2] / own[3] for own in speeds)
    rows = table(["rollout", "M steps/s"], [[name, f"{median(own):.0f}"] for name, own in columns])
    return f"{rows}\nBy `step`, its class is {ratio:.2f} times as fast as gymnax's.\n"


def speed_claims(newest):
    """What the lines for speed are worth

    Each row compares a script with a copy that lacks one line or option, in turn: the fastest of
    three commands each, because other programs only slow a command down.
    """
    rows = []
    for what, script, flags, needs_newest, changes in SPEED:
        if needs_newest and not newest:
            continue
        python = newest if needs_newest else sys.executable
        scripts = [script, changed(script, changes)] * 3
        speeds = [speed_of(run(one, flags, python)[1]) for one in scripts]
        fast, slow = max(speeds[::2]), max(speeds[1::2])
        command = command_of(script, flags) + " (newest jax)" * needs_newest
        rows.append([what, command, f"{fast:.2f}", f"{slow:.2f}", f"{fast / slow:.2f}"])
    for script in PARALLEL, REINFORCE:
        scripts = [script, changed(script, [LEVEL])] * 3
        seconds = [run(one, TWENTY)[2]["compile_seconds"] for one in scripts]
        fast, slow = min(seconds[::2]), min(seconds[1::2])
        cells = f"{fast:.1f} s", f"{slow:.1f} s", f"{slow / fast:.2f}"
        rows.append(["optimization level 1: compiling", command_of(script, TWENTY), *cells])
    return table(["line", "command", "M steps/s with it", "without", "factor"], rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--newest", metavar="PYTHON", help="a Python that has the newest jax")
    newest = parser.parse_args().newest
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "optax", "gymnax")]
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    machine = f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"
    for _, script, *_, changes in ABLATIONS + SPEED:
        changed(script, changes)  # now, so that a text that is gone is noticed at once
    page = f"""# Results

Written by `python tests/benchmark.py` on {date.today()}: {machine}, {", ".join(versions)}.
The machine is shared with other programs, so the speed of a short run can vary by a factor of two.
On this machine, the same command learns the same, bit by bit; elsewhere, roundings differ.
"""
    for measure in times, sweep, cars, speed_claims, learning, ablations, truncation, tasks:
        title, _, text = inspect.getdoc(measure).partition("\n")
        page += f"\n## {title}\n{text}\n\n{measure(newest)}"
        (ROOT / "tests" / "RESULTS.md").write_text(page)


if __name__ == "__main__":
    main()
