# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["jax==0.10.1", "matplotlib==3.11.2"]
# ///
"""Tabular Q-learning on a grid world: one agent or thousands, each with a table of its own.

    Q(s, a) <- Q(s, a) + alpha (target - Q(s, a))
    target  =  r + gamma max_a' Q(s', a'),    or r if s' is the goal

This update follows each step (Watkins 1989; Sutton & Barto 2018, section 6.5). The agent starts in
the lower right cell, and the reward is 1 in the upper left cell, the goal, and 0 elsewhere. Only
the actions are random, so a constant alpha converges to the exact values, as long as all actions
are tried again and again (epsilon > 0). These are Q(s, a) = gamma^(d - 1), where d is the number of
steps of the shortest path to the goal that begins with a.

    python gridworld_qlearning.py                                          # one agent
    python gridworld_qlearning.py --gamma 0.8 0.9 --num-seeds 500 --plot grid.png   # 1,000

To change the task, change `start`, `is_goal`, MOVES, SIGNS and `env_step`. If moves are random, as
on slippery ground, draw their numbers in `train_block`, and let `evaluate` play many episodes: one
greedy path then says little.

Shapes: R runs (agents), K intervals, U = interval_blocks blocks of T = BLOCK steps,
H, W = grid_size rows and columns, S = H * W cells, A actions.

Read the flags, the algorithm for one run, and `main`. The helpers below are not about learning.
"""

import argparse
import json
import math
import os
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

# Each core of the CPU becomes a device. This must be set before jax is imported.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
# Compile loops over up to 500 kB of data into one function: 1.9 times as fast with one agent.
LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=500000"
os.environ["XLA_FLAGS"] = LOOPS + " " + os.environ.get("XLA_FLAGS", "")  # the user's flags win
import jax
import jax.numpy as jnp
import numpy as np

MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # (A, 2) change of row, of column
SIGNS = np.array([">", "v", "<", "^"])  # (A,) how they are printed: right, down, left, up
BLOCK = 1000  # steps whose random numbers are drawn at once


def parse_args(argv=None):
    """Read the flags. Those of `sweep` take several values, and all combinations run.

    Every flag whose value is a list is swept. Sweep numbers for arithmetic, not shapes or counts.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = parser.add_argument
    sweep = partial(flag, nargs="+")
    flag("--seed", type=int, default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs (agents) of each setting")
    flag("--total-timesteps", type=count, default=1_000_000, help="environment steps of a run")
    flag("--num-intervals", type=count, default=10, help="progress lines, at most")
    flag("--grid-size", type=count, default=[8, 12], nargs=2, help="rows, columns")
    sweep("--learning-rate", type=fraction, default=[0.1], help="step size alpha")
    sweep("--gamma", type=fraction, default=[0.9], help="discount factor")
    sweep("--epsilon", type=fraction, default=[0.1], help="probability of a random action")
    flag("--save", metavar="FILE.npz", help="write tables, learning curves and flags")
    flag("--plot", metavar="FILE.png", help="draw values and greedy actions (.png, .pdf, .svg)")
    args = parser.parse_args(argv)
    check_file(parser, args.save, ".npz")
    check_file(parser, args.plot, ".png", ".pdf", ".svg")
    args.grid_size = tuple(args.grid_size)  # a list would be swept
    # The total is rounded up to whole blocks, and these to equal intervals.
    num_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.interval_blocks = math.ceil(num_blocks / args.num_intervals)
    args.num_intervals = math.ceil(num_blocks / args.interval_blocks)
    return args


# The algorithm, written for one run. `run` holds its flags. `run.seed` and swept flags are traced,
# like all arrays: use them in arithmetic, never as a shape, in `range` or in `if`. All other flags
# are Python values. partial(f, run) fixes `run`, and vmap maps over the arguments that are left.
#
# A metric is an entry of the dictionary that `train_step` returns. It is averaged over the steps of
# an interval, printed if it is one number, and saved.


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    q_table: jax.Array  # (H, W, A)
    cell: jax.Array  # (2,) where the agent is: row, column


def start(run):
    """Return the cell (2,) in which episodes start: the last row, the last column."""
    return jnp.array(run.grid_size) - 1


def is_goal(run, cell):
    """Return whether a cell (2,) is the goal, in which episodes end: the upper left one."""
    return jnp.all(cell == jnp.array([0, 0]))


def env_step(run, cell, action):
    """Return the next cell (the same at a wall), the reward, and whether it is terminal."""
    next_cell = jnp.clip(cell + jnp.array(MOVES)[action], 0, jnp.array(run.grid_size) - 1)
    at_goal = is_goal(run, next_cell)
    return next_cell, jnp.where(at_goal, 1.0, 0.0), at_goal


def init_state(run):
    """Initial state of one run."""
    return TrainState(
        key=jax.random.key(run.seed),
        q_table=jnp.zeros((*run.grid_size, len(MOVES))),
        cell=start(run),
    )


def select_action(values, explore, uniform):
    """Choose among all actions if the agent explores, else among those of the highest value.

    Each of n candidates is equally likely: a uniform number in [0, 1) picks floor(n uniform).
    """
    candidates = explore | (values == jnp.max(values))  # (A,)
    counts = jnp.cumsum(candidates)  # (A,) candidates up to each action
    return jnp.argmax(counts > uniform * counts[-1])  # the first action whose count exceeds it


def train_step(run, state, draws):
    """Take one step and update the value of its action. Also return what to average."""
    row, column = state.cell
    explore, uniform = draws
    values = state.q_table[row, column]  # (A,)
    action = select_action(values, explore, uniform)
    next_cell, reward, terminated = env_step(run, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[*next_cell]))
    td_error = reward + run.gamma * next_value - values[action]
    q_table = state.q_table.at[row, column, action].add(run.learning_rate * td_error)
    cell = jnp.where(terminated, start(run), next_cell)
    metrics = {"rewards": reward, "episodes": terminated}
    return TrainState(state.key, q_table, cell), metrics


def train_block(run, state, _):
    """Take T steps. To draw their random numbers at once is faster than to draw in each step."""
    key, key_explore, key_uniform = jax.random.split(state.key, 3)
    explore = jax.random.bernoulli(key_explore, run.epsilon, BLOCK)
    draws = explore, jax.random.uniform(key_uniform, BLOCK)
    state, metrics = jax.lax.scan(partial(train_step, run), state._replace(key=key), draws)
    return state, jax.tree.map(partial(jnp.mean, axis=0), metrics)


def train_interval(run, state):
    """Train up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_block, run), state, length=run.interval_blocks)
    means = jax.tree.map(partial(jnp.mean, axis=0), metrics)
    episodes = means.pop("episodes")  # ended per step
    steps_per_episode = jnp.where(episodes > 0, 1 / episodes, jnp.nan)
    returns = means.pop("rewards") * steps_per_episode
    timesteps = jnp.array(run.interval_blocks * BLOCK)
    return state, dict(
        timesteps=timesteps, returns=returns, steps_per_episode=steps_per_episode, **means
    )


def greedy_steps(run, q_table):
    """Steps of the greedy policy from the start to the goal; inf if it never arrives.

    The policy is deterministic: among equal values, it takes the first. If it is not at the goal
    after S steps, it has visited a cell twice, and never arrives.
    """
    greedy = jnp.argmax(q_table, axis=-1)  # (H, W)

    def step(cell, _):
        next_cell, _, terminated = env_step(run, cell, greedy[*cell])
        # The goal is asked for, too: you may add other cells in which episodes end.
        return next_cell, (terminated, is_goal(run, next_cell))

    _, (ends, at_goal) = jax.lax.scan(step, start(run), length=greedy.size)  # (S,)
    last = jnp.argmax(ends)  # the first step that ends the episode; 0 if none does
    return jnp.where(ends[last] & at_goal[last], last + 1.0, jnp.inf)


def evaluate(run, state):
    """Results of a run: the greedy policy's steps, the value of the start, and the table."""
    return {
        "greedy_steps": greedy_steps(run, state.q_table),
        "start_value": jnp.max(state.q_table[*start(run)]),
        "q_table": state.q_table,
    }


def grid_text(table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all are 0."""
    values = table.max(axis=-1)
    signs = np.where(np.any(table, axis=-1), SIGNS[table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


def report(learned, rows):
    """Describe what the agents of a setting, in these rows, have learned: their mean table."""
    steps, start_value = learned["greedy_steps"][rows], learned["start_value"][rows].mean()
    reach = f"{np.isfinite(steps).sum()} of {len(steps)} greedy agents reach the goal"
    text = f"value of the start {start_value:.5f}  {reach}, in at most {steps.max():.0f} steps"
    return f"{text}\n{grid_text(learned['q_table'][rows].mean(axis=0))}"


def draw(args, settings, results):
    """Draw the mean values and greedy actions of each setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1 + 3 * len(settings)), layout="constrained")
    panels = figure.subplots(len(settings), squeeze=False)[:, 0]
    for axes, (label, rows) in zip(panels, settings.items(), strict=True):
        table = results["learned"]["q_table"][rows].mean(axis=0)  # (H, W, A)
        figure.colorbar(axes.imshow(table.max(axis=-1)), label="max_a of the agents' mean Q")
        row, column = np.nonzero(np.any(table, axis=-1))
        down, right = MOVES[table.argmax(axis=-1)[row, column]].T
        axes.quiver(column, row, right, down, angles="xy", pivot="mid", color="white")
        axes.set_title(label)
    figure.savefig(args.plot)


def main(argv=None):
    """Train, evaluate, save and report. Return what --save writes, as nested dictionaries."""
    args = parse_args(argv)  # if None, from the command line; in a notebook, call main([])
    runs, settings = make_runs(args)  # {flag: (R,)} of all runs; {label: rows} of each setting
    num_runs = len(runs["seed"])
    devices, at_once, padded = divide(runs)  # padded with copies of runs, which `gather` cuts off

    # All is compiled before training, so a mistake in `evaluate` shows now.
    began = time.perf_counter()
    over_runs = partial(compile_over_runs, args=args, devices=devices, at_once=at_once)
    init = over_runs(init_state, padded)
    state = init(padded)
    train = over_runs(train_interval, padded, state)
    finish = over_runs(evaluate, padded, state)
    seconds = time.perf_counter() - began
    where = f"{len(devices)} x {devices[0].device_kind}"
    print(f"runs: {num_runs}  devices: {where}  compiled in {seconds:.1f} s", flush=True)

    history, timesteps = [], np.zeros(num_runs, int)
    began = time.perf_counter()
    try:
        for _ in range(args.num_intervals):
            next_state, metrics = train(padded, state)
            metrics = gather(metrics, num_runs)  # waits for `train`
            seconds = time.perf_counter() - began
            state = next_state
            timesteps = timesteps + metrics.pop("timesteps").astype(int)  # (R,) so far
            history.append({"timesteps": timesteps, "seconds": seconds, **metrics})
            # Log elsewhere here: wandb.log({key: np.nanmean(x) for key, x in history[-1].items()})
            speed = f"{timesteps.sum() / seconds:,.0f} steps/s"
            print(f"step {timesteps.mean():,.0f}", *describe(metrics), speed, sep="  ", flush=True)
    except KeyboardInterrupt:  # Ctrl-C ends training early
        if not history:
            raise
        print("interrupted: evaluating what was learned up to the last line")

    learned = gather(finish(padded, state), num_runs)  # (R, ...) each
    curves = jax.tree.map(lambda *values: np.stack(values), *history)  # (K, R) each; seconds (K,)
    results = {
        "args": json.dumps(vars(args), default=str),
        "interrupted": len(history) < args.num_intervals,
        "runs": runs,
        "curves": curves,
        "learned": learned,
    }
    if args.save:
        np.savez(args.save, **flat(results))
    for label, rows in settings.items():
        print(f"{label}  {report(learned, rows)}".strip())
    if args.plot:
        draw(args, settings, results)
    return results


# From here on, nothing is about learning: the helpers of `parse_args` and `main`.

MAX_AT_ONCE = 1  # on a core of a CPU: updating several tables at once is slow there
COMPILER_OPTIONS = {}


def count(text):
    """Read a flag: an integer of at least 1. It may be written 2e6."""
    value = float(text)
    if not 1 <= value < 2**31 or value != int(value):
        raise ValueError
    return int(value)


def fraction(text):
    """Read a flag: a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def check_file(parser, path, *endings):
    """Refuse a name without one of the endings, before anything is computed. Make its folder."""
    if path:
        if not path.endswith(endings):
            parser.error(f"{path} must end in {' or '.join(endings)}")
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)


def make_runs(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and {label: rows} of each setting.
    """
    values = {name: value for name, value in vars(args).items() if isinstance(value, list)}
    varied = [name for name in values if len(values[name]) > 1]
    values["seed"] = range(args.seed, args.seed + args.num_seeds)
    arrays = np.meshgrid(*values.values(), indexing="ij")  # the seed varies fastest
    runs = {name: array.ravel() for name, array in zip(values, arrays, strict=True)}
    settings = {}
    for i in range(0, len(runs["seed"]), args.num_seeds):
        label = ", ".join(f"{name} {runs[name][i]:.9g}" for name in varied)
        settings[label] = slice(i, i + args.num_seeds)
    return runs, settings


def divide(runs):
    """Divide runs evenly among devices, and those of a CPU core into equal batches.

    For example, 300 runs on 16 cores are at most 19 on each. If MAX_AT_ONCE is 8, each core takes 3
    batches of 7. That makes 336 runs, of which the last 36 are copies. Return the devices, the size
    of a batch, and the runs with the copies.
    """
    devices, num_runs = jax.devices(), len(runs["seed"])
    per_device = math.ceil(num_runs / len(devices))
    devices = devices[: math.ceil(num_runs / per_device)]
    most = MAX_AT_ONCE if devices[0].platform == "cpu" else per_device
    num_batches = math.ceil(per_device / most)
    at_once = math.ceil(per_device / num_batches)
    length = len(devices) * num_batches * at_once
    return devices, at_once, {name: np.resize(array, length) for name, array in runs.items()}


def compile_over_runs(function, *inputs, args, devices, at_once):
    """Compile function(run, *arrays) of one run into a function of all runs, over all devices.

    Its inputs are the padded runs and the arrays, each with an axis of runs in front.
    """

    def one_run(inputs):
        own, *arrays = inputs  # its own seed and values of swept flags
        run = SimpleNamespace(**(vars(args) | own))
        return function(run, *arrays)

    def one_device(*inputs):  # one batch after the other, the runs of a batch vmapped
        return jax.lax.map(one_run, inputs, batch_size=at_once)

    mesh = jax.sharding.Mesh(devices, "runs")
    axis = jax.sharding.PartitionSpec("runs")  # the first axis of each array is divided
    # check_vma would reject loops that start from constants.
    sharded = jax.shard_map(one_device, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS.get(devices[0].platform)
    return jax.jit(sharded, compiler_options=options).lower(*inputs).compile()


def gather(tree, num_runs):
    """Copy arrays from all devices to the host, without the copies of runs."""
    return jax.tree.map(lambda array: np.asarray(array)[:num_runs], tree)


def describe(metrics):
    """Write metrics (R,) as words: their means over all runs in which they are known (not nan)."""
    words = []
    for name, values in metrics.items():
        if values.ndim == 1:
            known = values[~np.isnan(values)]
            words.append(f"{name} {known.mean() if len(known) else np.nan:#.4g}")
            if 0 < len(known) < len(values):
                words.append(f"({len(known)} of {len(values)} runs)")
    return words


def flat(tree):
    """Make {name: array} of any tree. Names are joined, as in learned.params.weights."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


if __name__ == "__main__":
    if main()["interrupted"]:
        raise KeyboardInterrupt  # so that Ctrl-C also ends a loop of the shell over commands
