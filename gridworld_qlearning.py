# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["jax==0.10.1", "matplotlib==3.11.2"]
# ///
"""Tabular Q-learning on a grid world: one agent or thousands, each with a table of its own.

    Q(s, a) <- Q(s, a) + alpha (target - Q(s, a))
    target  =  r + gamma max_a' Q(s', a'),    or r if s' is the goal

This update follows each step (Watkins 1989; Sutton & Barto 2018, section 6.5).

The agent starts in the lower right cell, and the reward is 1 in the upper left cell, the goal, and
0 elsewhere. Moves and rewards are not random, so a constant alpha converges to the exact values, as
long as all actions are tried again and again (epsilon > 0). The exact value is
Q(s, a) = gamma^(d - 1), where d is the number of steps of the shortest path from s to the goal
whose first action is a.

    python gridworld_qlearning.py                                          # one agent
    python gridworld_qlearning.py --gamma 0.8 0.9 --num-seeds 500 --plot grid.png   # 1,000 agents

Shapes: R runs (agents), K intervals, T = BLOCK steps, H = num_rows, W = num_columns, A actions.
"""

import argparse
import json
import math
import os
import time
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import NamedTuple

# Each logical CPU becomes a device of jax. This must be set before jax is imported.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
# Compile loops over up to 500 kB of data into one function: 1.9 times as fast with one agent.
LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=500000"
os.environ["XLA_FLAGS"] = LOOPS + " " + os.environ.get("XLA_FLAGS", "")  # the user's flags win
import jax
import jax.numpy as jnp
import numpy as np

MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # (A, 2) right, down, left, up
SIGNS = np.array([">", "v", "<", "^"])  # (A,) how they are printed
BLOCK = 1000  # steps whose random numbers are drawn at once


def count(text):
    """Read a flag: an integer of at least 1. It may be written 2e6."""
    value = float(text)
    if not 1 <= value <= 2**30 or value != int(value):
        raise ValueError
    return int(value)


def fraction(text):
    """Read a flag: a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def check_file(parser, path, *endings):
    """Refuse a wrong ending or a folder that cannot be written, before anything is computed."""
    if path and not (path.endswith(endings) and os.access(os.path.dirname(path) or ".", os.W_OK)):
        parser.error(f"{path} must end in {' or '.join(endings)}, in a folder that can be written")


def parse_args(argv=None):
    """Read the flags. Those of `sweep` take several values (a list), and all combinations run."""
    style = argparse.ArgumentDefaultsHelpFormatter
    what = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=what, formatter_class=style, allow_abbrev=False)
    flag = parser.add_argument
    sweep = partial(flag, nargs="+")
    flag("--seed", type=int, default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    flag("--total-timesteps", type=count, default=1_000_000, help="environment steps of a run")
    flag("--num-intervals", type=count, default=10, help="progress lines, at most")
    flag("--num-rows", type=count, default=8, help="rows of the grid")
    flag("--num-columns", type=count, default=12, help="columns of the grid")
    sweep("--learning-rate", type=fraction, default=[0.1], help="step size alpha")
    sweep("--gamma", type=fraction, default=[0.9], help="discount factor")
    sweep("--epsilon", type=fraction, default=[0.1], help="probability of a random action")
    flag("--save", metavar="FILE.npz", help="write tables, learning curves and flags")
    flag("--plot", metavar="FILE.png", help="draw values and greedy actions (.png, .pdf, .svg)")
    args = parser.parse_args(argv)
    check_file(parser, args.save, ".npz")
    check_file(parser, args.plot, ".png", ".pdf", ".svg")
    if args.seed < 0 or args.seed + args.num_seeds > 2**31:
        parser.error("--seed and the seeds that follow must be from 0 to 2**31 - 1")
    # All intervals are equally long. In the last, steps beyond total_timesteps have a rate of 0.
    num_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.interval_blocks = math.ceil(num_blocks / args.num_intervals)
    args.num_intervals = math.ceil(num_blocks / args.interval_blocks)
    args.interval_timesteps = args.interval_blocks * BLOCK
    return args


# The algorithm, for one run. `run` holds its flags. Its seed and its values of swept flags are
# traced arrays: use them in arithmetic, not as a shape or in `if`. `compile_over_runs` vmaps
# these functions over many runs.


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    q_table: jax.Array  # (H, W, A)
    cell: jax.Array  # (2,) where the agent is: row, column
    timesteps: jax.Array  # environment steps so far
    episode_began: jax.Array  # timesteps when the current episode began


def start(run):
    """The cell (2,) in which episodes start: the last row, the last column."""
    return jnp.array([run.num_rows - 1, run.num_columns - 1])


def env_step(run, cell, action):
    """Step once. Return the next cell (the same at a wall), the reward, and terminated."""
    last_cell = jnp.array([run.num_rows, run.num_columns]) - 1
    next_cell = jnp.clip(cell + jnp.array(MOVES)[action], 0, last_cell)
    at_goal = jnp.all(next_cell == 0)  # the upper left cell
    return next_cell, jnp.where(at_goal, 1.0, 0.0), at_goal


def init_state(run):
    """Initial state of one run."""
    return TrainState(
        key=jax.random.key(run.seed),
        q_table=jnp.zeros((run.num_rows, run.num_columns, len(MOVES))),
        cell=start(run),
        timesteps=jnp.array(0),
        episode_began=jnp.array(0),
    )


def select_action(values, explore, uniform):
    """Choose among all actions if the agent explores, else among those of the highest value.

    Each candidate is equally likely. If these are actions 1 and 3, a uniform number below 0.5 picks
    action 1, and another one action 3.
    """
    candidates = explore | (values == jnp.max(values))  # (A,)
    counts = jnp.cumsum(candidates)  # (A,) candidates up to each action
    return jnp.argmax(counts > uniform * counts[-1])  # the first action whose count exceeds it


def train_step(run, state, draws):
    """Take one step and update the value of its action. Also return counts to sum."""
    row, column = state.cell
    explore, uniform = draws
    values = state.q_table[row, column]  # (A,)
    action = select_action(values, explore, uniform)
    next_cell, reward, terminated = env_step(run, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[*next_cell]))
    td_error = reward + run.gamma * next_value - values[action]
    learning_rate = jnp.where(state.timesteps < run.total_timesteps, run.learning_rate, 0.0)
    timesteps = state.timesteps + 1
    state = state._replace(
        q_table=state.q_table.at[row, column, action].add(learning_rate * td_error),
        cell=jnp.where(terminated, start(run), next_cell),
        timesteps=timesteps,
        episode_began=jnp.where(terminated, timesteps, state.episode_began),
    )
    return state, {"episodes": terminated}


def train_block(run, state, _):
    """Take T steps. To draw their random numbers at once is faster than to draw in each step."""
    key, key_explore, key_uniform = jax.random.split(state.key, 3)
    explore = jax.random.bernoulli(key_explore, run.epsilon, BLOCK)
    draws = explore, jax.random.uniform(key_uniform, BLOCK)
    state, metrics = jax.lax.scan(partial(train_step, run), state._replace(key=key), draws)
    return state, jax.tree.map(partial(jnp.sum, axis=0), metrics)


def train_interval(run, state):
    """Train up to the next progress line. Also return the sums of all metrics."""
    before = state.episode_began
    state, metrics = jax.lax.scan(partial(train_block, run), state, length=run.interval_blocks)
    sums = jax.tree.map(partial(jnp.sum, axis=0), metrics)
    # One episode follows the other, so this is the total length of those that ended.
    episode_steps = state.episode_began - before
    return state, {"episode_steps": episode_steps, **sums}


def greedy_steps(run, q_table):
    """Steps of the greedy policy from the start to the goal; inf if it never arrives.

    The policy is deterministic: among equal values, it takes the first. If it is not at the goal
    after H * W steps, it has visited a cell twice, and never arrives.
    """
    greedy = jnp.argmax(q_table, axis=-1)  # (H, W)

    def step(cell, _):
        next_cell, _, terminated = env_step(run, cell, greedy[*cell])
        return next_cell, terminated

    _, terminated = jax.lax.scan(step, start(run), length=greedy.size)  # (H * W,)
    return jnp.where(jnp.any(terminated), jnp.argmax(terminated) + 1.0, jnp.inf)


def evaluate(run, state):
    """Results of a run: the greedy policy's steps, the value of the start, and the table."""
    return {
        "greedy_steps": greedy_steps(run, state.q_table),
        "start_value": jnp.max(state.q_table[*start(run)]),
        "q_table": state.q_table,
    }


# Many runs at once. What follows is not about learning.


def grid_text(tables):  # (R, H, W, A)
    """Means of max_a Q, and greedy actions of the mean table; "." where all are 0."""
    values = tables.max(axis=-1).mean(axis=0)  # (H, W)
    table = tables.mean(axis=0)  # (H, W, A)
    signs = np.where(np.any(table, axis=-1), SIGNS[table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


def report(learned, rows):
    """Summary of one setting, whose agents are `rows`."""
    steps, start_value = learned["greedy_steps"][rows], learned["start_value"][rows].mean()
    arrived = steps[np.isfinite(steps)]
    text = f"value of the start {start_value:.5f}  {len(arrived)} of {len(steps)} greedy agents"
    text += f" reach the goal  longest path {max(arrived, default=np.nan):.0f} steps"
    return f"{text}\n{grid_text(learned['q_table'][rows])}"


def draw(args, settings, results):
    """Draw the mean values and greedy actions of each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1 + 3 * len(settings)), layout="constrained")
    panels = figure.subplots(len(settings), squeeze=False)[:, 0]
    for axes, (label, rows) in zip(panels, settings, strict=True):
        tables = results["learned"]["q_table"][rows]  # (R, H, W, A)
        values, table = tables.max(axis=-1).mean(axis=0), tables.mean(axis=0)
        figure.colorbar(axes.imshow(values), label="mean over agents of max_a Q")
        row, column = np.nonzero(np.any(table, axis=-1))
        down, right = MOVES[table.argmax(axis=-1)[row, column]].T
        axes.quiver(column, row, right, down, angles="xy", pivot="mid", color="white")
        axes.set_title(label)
    figure.savefig(args.plot)


AT_ONCE = 1  # runs vmapped together on a core of a CPU; more at once are slower
COMPILER_OPTIONS = {}


def make_runs(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and the (label, rows) of each setting.
    """
    swept = {name: values for name, values in vars(args).items() if isinstance(values, list)}
    varied = [name for name in swept if len(swept[name]) > 1]
    swept["seed"] = range(args.seed, args.seed + args.num_seeds)
    arrays = np.meshgrid(*swept.values(), indexing="ij")  # the seed varies fastest
    runs = {name: array.ravel() for name, array in zip(swept, arrays, strict=True)}
    settings = []
    for i in range(0, len(runs["seed"]), args.num_seeds):
        label = ", ".join(f"{name} {runs[name][i]}" for name in varied)
        settings.append((label or "all runs", slice(i, i + args.num_seeds)))
    return runs, settings


def compile_over_runs(function, *inputs, fixed, devices, donate=()):
    """Compile function(run, *arrays) of one run into a function of (runs, *arrays) of all."""

    def one_run(arrays):
        own, *others = arrays  # its own seed and values of swept flags
        return function(SimpleNamespace(**(fixed | own)), *others)

    def one_device(*arrays):
        if devices[0].platform == "cpu":
            return jax.lax.map(one_run, arrays, batch_size=AT_ONCE)
        return jax.vmap(one_run)(arrays)

    mesh = jax.sharding.Mesh(devices, "runs")
    axis = jax.sharding.PartitionSpec("runs")  # the first axis of each array is divided
    # check_vma would reject loops whose carry starts as a constant.
    sharded = jax.shard_map(one_device, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS.get(devices[0].platform)
    jitted = jax.jit(sharded, compiler_options=options, donate_argnums=donate)
    return jitted.lower(*inputs).compile()


def setting_mean(metrics, name, rows):
    """Mean of a metric over the runs of one setting. Steps are averaged over all episodes."""
    values, episodes = metrics[name][rows], metrics["episodes"][rows]
    if name != "episode_steps":
        return values.mean()
    return values.sum() / episodes.sum() if any(episodes) else np.nan


def low_to_high(numbers, form="#.4g"):
    """Text of the lowest and the highest number, or of one if they look the same. nan is last."""
    ends = [f"{number:{form}}" for number in np.sort(numbers)[[0, -1]]]
    return " to ".join(dict.fromkeys(ends))


def gather(tree, num_runs):
    """Copy arrays from all devices to the host, without the repeated runs."""
    return jax.tree.map(lambda array: np.asarray(array)[:num_runs], tree)


def flat(tree):
    """Make {name: array} of any tree. Names are joined, as in curves.timesteps."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def main(argv=None):
    """Train, evaluate and report. Return what --save writes, as nested dictionaries."""
    args = parse_args(argv)  # if None, from the command line; in a notebook, call main([])
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    runs, settings = make_runs(args)
    num_runs = len(runs["seed"])
    devices = jax.devices()[:num_runs]
    # The first runs are repeated until each device has equally many.
    length = math.ceil(num_runs / len(devices)) * len(devices)
    padded = {name: np.resize(array, length) for name, array in runs.items()}

    # Everything is compiled before training, so that errors surface now.
    began = time.perf_counter()
    over_runs = partial(compile_over_runs, fixed=vars(args), devices=devices)
    state = over_runs(init_state, padded)(padded)
    train = over_runs(train_interval, padded, state, donate=1)  # it may reuse the state's memory
    finish = over_runs(evaluate, padded, state)
    hardware = f"{len(devices)} x {devices[0].device_kind}"
    seconds = time.perf_counter() - began
    print(f"runs: {num_runs}  devices: {hardware}  compiled in {seconds:.1f} s")
    shown = "means over all runs" if len(settings) == 1 else "lowest to highest mean of a setting"
    print(f"{shown} (episode_steps: over all episodes)", flush=True)

    history = []
    began = time.perf_counter()
    for i in range(1, args.num_intervals + 1):
        state, metrics = train(padded, state)
        metrics = gather(metrics, num_runs)  # waits for `train`
        seconds = time.perf_counter() - began
        timesteps = np.full(num_runs, i * args.interval_timesteps)
        history.append({"timesteps": timesteps, "seconds": seconds, **metrics})  # add a logger here
        words = []
        for name in metrics:
            means = [setting_mean(metrics, name, rows) for _, rows in settings]
            words.append(f"{name} {low_to_high(means)}")
        speed = f"{timesteps.sum() / seconds:,.0f} steps/s in total"
        print(f"step {timesteps[0]:,}", *words, speed, sep="  ", flush=True)

    learned = gather(finish(padded, state), num_runs)  # (R, ...) each
    curves = jax.tree.map(lambda *values: np.stack(values), *history)  # (K, R) each; seconds (K,)
    results = {
        "args": json.dumps(vars(args)),
        "versions": json.dumps(versions),
        "runs": runs | {"setting": np.repeat([label for label, _ in settings], args.num_seeds)},
        "curves": curves,
        "learned": learned,
    }
    if args.save:
        np.savez(args.save, **flat(results))
    for label, rows in settings:
        print(f"{label}: {report(learned, rows)}")
    if args.plot:
        draw(args, settings, results)
    return results


if __name__ == "__main__":
    main()
