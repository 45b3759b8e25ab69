# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "matplotlib"]
# ///
"""Tabular Q-learning on a grid world: one agent or thousands, each with a table of its own.

    Q(s, a) <- Q(s, a) + alpha (target - Q(s, a))
    target  =  r + gamma max_a' Q(s', a'),    or r if s' is the goal

This update follows each step (Watkins 1989; Sutton & Barto 2018, section 6.5). The agent starts in
the lower right cell, and the reward is 1 in the upper left cell, the goal, and 0 elsewhere. Only
the actions are random, so a constant alpha converges to the exact values: Q(s, a) = gamma^(d - 1),
where d is the number of steps of the shortest path to the goal that begins with a.

    python gridworld_qlearning.py                                          # one agent
    python gridworld_qlearning.py --gamma 0.8 0.9 --num-seeds 500 --plot grid.png   # a thousand

To change the task, change `start`, `goal`, MOVES, SIGNS and `env_step`.

Shapes: R runs (agents), K log intervals, U = args.interval_blocks blocks of T = BLOCK steps,
H, W = args.grid_size rows and columns, S = H * W cells, A actions.

The algorithm comes first, for one run. Then come flags, and the code that runs it on all devices.
"""

import argparse
import json
import math
import os
import sys
import time
from functools import partial
from typing import NamedTuple

# jax reads this when it is imported: each CPU core that this process may use becomes a device.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
# Compile loops over up to 500 kB of data into one function: 1.3 times as fast with one agent.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=500000"
)
import jax

if "--distributed" in sys.argv:  # before the first array is created
    jax.distributed.initialize()

import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # (A, 2) right, down, left, up: row, column
SIGNS = np.array([">", "v", "<", "^"])  # (A,) how a move is printed
BLOCK = 1000  # steps whose random numbers are drawn at once

# These flags take several values; every combination is run. In a function of one run, args.gamma is
# that run's own value. It is traced: good for arithmetic, not for shapes or loops. Elsewhere,
# args.gamma does not exist; args.swept["gamma"] has all values.
SWEPT = "learning_rate", "gamma", "epsilon"


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    q_table: jax.Array  # (H, W, A)
    cell: jax.Array  # (2,) where the agent is: row, column
    episode_return: jax.Array  # so far
    episode_length: jax.Array  # steps so far


def start(args):
    """Return the cell (2,) in which episodes start: the last row, the last column."""
    return jnp.array(args.grid_size) - 1


def goal(args):
    """Return the cell (2,) in which episodes end: the first row, the first column."""
    return jnp.array([0, 0])


def env_step(args, cell, action):
    """Return the next cell (the same at a wall), reward, and whether the goal is reached."""
    next_cell = jnp.clip(cell + jnp.array(MOVES)[action], 0, jnp.array(args.grid_size) - 1)
    terminated = jnp.all(next_cell == goal(args))
    return next_cell, jnp.where(terminated, 1.0, 0.0), terminated


def init_state(args):
    """State in which a run starts."""
    return TrainState(
        key=jax.random.key(args.seed),
        q_table=jnp.zeros((*args.grid_size, len(MOVES))),
        cell=start(args),
        episode_return=jnp.array(0.0),
        episode_length=jnp.array(0),
    )


def select_action(values, explore, uniform):
    """Choose an action epsilon-greedily by values (A,), with a uniform number in [0, 1).

    Candidates are all actions if the agent explores, else the best ones: each is equally likely.
    """
    candidates = explore | (values == jnp.max(values))  # (A,)
    counts = jnp.cumsum(candidates)  # (A,) candidates up to each action
    return jnp.argmax(counts > uniform * counts[-1])


def train_step(args, state, draws):
    """Take one step and update the value of its action. Also return totals of an ended episode."""
    row, column = state.cell
    values = state.q_table[row, column]  # (A,)
    explore, uniform = draws
    action = select_action(values, explore, uniform)
    next_cell, reward, terminated = env_step(args, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[*next_cell]))
    td_error = reward + args.gamma * next_value - values[action]
    total, length = state.episode_return + reward, state.episode_length + 1
    state = state._replace(
        q_table=state.q_table.at[row, column, action].add(args.learning_rate * td_error),
        cell=jnp.where(terminated, start(args), next_cell),
        episode_return=jnp.where(terminated, 0.0, total),
        episode_length=jnp.where(terminated, 0, length),
    )
    ended = {"episodes": terminated, "return_sum": terminated * total}
    return state, ended | {"length_sum": terminated * length}


def train_block(args, state, _):
    """Take T steps. Their random numbers are drawn at once: fast, and in little memory."""
    key, key_explore, key_uniform = jax.random.split(state.key, 3)
    explore = jax.random.bernoulli(key_explore, args.epsilon, BLOCK)
    draws = explore, jax.random.uniform(key_uniform, BLOCK)
    state, ended = jax.lax.scan(partial(train_step, args), state._replace(key=key), draws)
    return state, jax.tree.map(jnp.sum, ended)


def train_interval(args, state):
    """Train up to the next progress line. Also return what the line shows."""
    state, ended = jax.lax.scan(partial(train_block, args), state, length=args.interval_blocks)
    sums = jax.tree.map(jnp.sum, ended)
    return state, {
        "steps_per_episode": sums["length_sum"] / sums["episodes"],  # nan if none ended
        "returns": sums["return_sum"] / sums["episodes"],
    }


def evaluate(args, state):
    """Number of steps of the greedy policy from the start to the goal, inf if it never arrives.

    The policy is deterministic: among equal values it takes the first. If it is not at the goal
    after S steps, it has visited some cell twice. So it walks in circles and never arrives.
    """
    greedy = jnp.argmax(state.q_table, axis=2)  # (H, W)

    def step(cell, _):
        next_cell, _, terminated = env_step(args, cell, greedy[*cell])
        return next_cell, terminated

    _, terminated = jax.lax.scan(step, start(args), length=greedy.size)  # (S,)
    return jnp.where(jnp.any(terminated), jnp.argmax(terminated) + 1.0, jnp.inf)


def sweep(args):
    """Combine the values of the swept flags (settings), and each setting with all seeds (runs).

    Return the swept flags and the seed by name, (R,) each, setting by setting; and a label for each
    setting: its values of the flags that vary.
    """
    values = {**args.swept, "seed": args.seed + np.arange(args.num_seeds)}
    grid = np.meshgrid(*values.values(), indexing="ij")  # the last one, the seed, varies fastest
    runs = {name: array.ravel() for name, array in zip(values, grid, strict=True)}
    several = [name for name in args.swept if np.size(values[name]) > 1]
    firsts = range(0, len(runs["seed"]), args.num_seeds)  # the first run of each setting
    labels = [", ".join(f"{name} {runs[name][run]:g}" for name in several) for run in firsts]
    return runs, labels


def spread(runs, all_devices):
    """Return how many devices R runs need, and the runs, padded with copies of the last one.

    The copies fill up the devices: each takes the same number of runs.
    """
    num_runs = len(runs["seed"])
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if all_devices else math.ceil(num_runs / per_device)
    copies = num_devices * per_device - num_runs
    return num_devices, {name: np.pad(array, (0, copies), "edge") for name, array in runs.items()}


def over_runs(function, args, num_devices):
    """Compile function(args, *arrays) of one run for all runs, spread over devices.

    The compiled function takes runs in place of args: each run's own values replace those in
    args. The other arrays have an axis of runs in front. A CPU core takes its runs one after the
    other, because updating many tables at once is slow there; on other devices they are vmapped.
    """

    def of_one_run(own, *arrays):
        return function(argparse.Namespace(**{**vars(args), **own}), *arrays)

    def of_all_runs(*arrays):  # of one device
        if jax.default_backend() == "cpu":
            return jax.lax.map(lambda run: of_one_run(*run), arrays)
        return jax.vmap(of_one_run)(*arrays)

    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(of_all_runs, in_specs=jax.P("runs"), out_specs=jax.P("runs"))
    return jax.jit(sharded)


def gather(tree, length):
    """Copy arrays from all devices, in all processes, to the host. Keep the first `length` rows."""
    return jax.tree.map(lambda array: array[:length], process_allgather(tree, tiled=True))


def number(kind, low, high):
    """Make an argparse type: an int or a float in [low, high]. An int may be written 2e6."""

    def parse(text):
        value = float(text)
        if not low <= value <= high or value != kind(value):
            raise ValueError
        return kind(value)

    parse.__name__ = f"{kind.__name__} in [{low:g}, {high:g}]"  # argparse shows it in its error
    return parse


def file_name(suffix):
    """Make an argparse type: the name of a file that can be written and has this suffix."""

    def parse(path):
        folder, name = os.path.split(path)
        must_exist = path if os.path.exists(path) else os.path.join(folder, ".")
        can_write = os.access(must_exist, os.W_OK) and not os.path.isdir(path)
        if not can_write or os.path.splitext(name)[1] != suffix:
            raise argparse.ArgumentTypeError(f"{path!r} is not a {suffix} file that can be written")
        return path

    return parse


def parse_args(argv=None):
    """Read and check the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument
    steps = number(int, 1, 1e9)
    unit = number(float, 0, 1)
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of run 0; run i uses seed + i")
    add("--num-seeds", type=number(int, 1, 1e6), default=1, help="runs (agents) of each setting")
    text = "environment steps per run, rounded up to equal log intervals"
    add("--total-timesteps", type=steps, default=1_000_000, help=text)
    add("--grid-size", type=number(int, 2, 1e3), default=[8, 12], nargs=2, help="rows, columns")
    add("--learning-rate", type=unit, nargs="+", default=[0.1], help="step size alpha")
    add("--gamma", type=unit, nargs="+", default=[0.9], help="discount factor")
    add("--epsilon", type=unit, nargs="+", default=[0.1], help="probability of a random action")
    text = "approximate number of environment steps between progress lines"
    add("--log-interval", type=steps, default=100_000, help=text)
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=file_name(".npz"), metavar="FILE", help="write tables, curves, arguments")
    add("--plot", type=file_name(".png"), metavar="FILE", help="draw values and greedy actions")
    args = parser.parse_args(argv)
    args.swept = {name: vars(args).pop(name) for name in SWEPT}
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    min_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.num_intervals = math.ceil(min_blocks / math.ceil(args.log_interval / BLOCK))
    args.interval_blocks = math.ceil(min_blocks / args.num_intervals)
    args.interval_timesteps = args.interval_blocks * BLOCK
    return args


MAX_TABLES = 4  # printed and drawn, at most


def grid_text(table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all are 0."""
    values = table.max(axis=-1)
    signs = np.where(np.any(table, axis=-1), SIGNS[table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


def summary(args, q_table, greedy_steps):
    """Describe what the r runs of a setting learned: tables (r, H, W, A), greedy steps (r,)."""
    value = q_table[:, *start(args)].max(axis=-1).mean()
    arrived = greedy_steps[np.isfinite(greedy_steps)]
    longest = f", in at most {arrived.max():.0f} steps" if len(arrived) else ""
    reach = f"{len(arrived)} of {len(greedy_steps)} greedy agents reach the goal{longest}"
    return f"value of the start {value:.5f}  {reach}"


def plot(path, labels, tables):
    """Draw values and greedy actions of tables (H, W, A), one for each label."""
    import matplotlib.pyplot as plt

    size = 6, 1 + 3 * len(tables)
    figure, panels = plt.subplots(len(tables), figsize=size, layout="constrained", squeeze=False)
    for axes, label, table in zip(panels.flat, labels, tables, strict=True):
        image = axes.imshow(table.max(axis=-1))
        figure.colorbar(image, label="max_a of the agents' mean Q")
        row, column = np.nonzero(np.any(table, axis=-1))
        down, to_right = MOVES[table.argmax(axis=-1)[row, column]].T
        if len(row):
            axes.quiver(column, row, to_right, down, angles="xy", pivot="mid", color="white")
        axes.set_title(label)
    plt.savefig(path)
    plt.close()


def main(argv=None):
    """Train, evaluate and report. Return what --save writes. Ctrl-C ends training early."""
    args = parse_args(argv)
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    runs, labels = sweep(args)
    num_runs = len(runs["seed"])
    num_devices, runs_and_copies = spread(runs, args.distributed)
    on_devices = partial(over_runs, args=args, num_devices=num_devices)
    how_many = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"grid world, {how_many} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    state = on_devices(init_state)(runs_and_copies)
    train = on_devices(train_interval).lower(runs_and_copies, state).compile()
    play_greedily = on_devices(evaluate).lower(runs_and_copies, state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    timesteps = args.interval_timesteps * np.arange(1, args.num_intervals + 1)  # (K,)
    history, train_seconds = [], 0.0
    try:
        for timestep in timesteps:
            began = time.perf_counter()
            next_state, metrics = train(runs_and_copies, state)
            history.append(gather(metrics, num_runs))  # waits for train; Ctrl-C is raised here
            state = next_state
            train_seconds += time.perf_counter() - began
            mean = jax.tree.map(jnp.nanmean, history[-1])  # np.nanmean would warn if all are nan
            speed = timestep * num_runs / train_seconds
            print(
                f"step {timestep:,}  steps per episode {mean['steps_per_episode']:.1f}"
                f"  return {mean['returns']:.2f}  {speed:,.0f} steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        print("interrupted: the results are those of the last line")

    arrays = play_greedily(runs_and_copies, state), state.q_table
    greedy_steps, q_table = gather(arrays, num_runs)  # (R,), (R, H, W, A)
    q_tables, steps = np.split(q_table, len(labels)), np.split(greedy_steps, len(labels))
    tables = [agents.mean(axis=0) for agents in q_tables]
    for label, table in zip(labels[:MAX_TABLES], tables[:MAX_TABLES], strict=True):
        print(f"{label}  mean of the agents' tables".strip(), grid_text(table), sep="\n")
    if len(labels) > MAX_TABLES:
        print(f"the first {MAX_TABLES} of {len(labels)} tables are shown")
    for label, *learned in zip(labels, q_tables, steps, strict=True):
        print(f"{label}  {summary(args, *learned)}".strip())
    results = {
        "args": json.dumps(vars(args)),
        **runs,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(history) < args.num_intervals,
        "timesteps": timesteps[: len(history)],
        **{name: np.stack([line[name] for line in history]) for name in history[0]},  # (K, R)
        "greedy_steps": greedy_steps,  # inf where the greedy policy never reaches the goal
        "q_table": q_table,
    }
    if args.save:
        np.savez(args.save, allow_pickle=False, **results)  # an error if one is not an array
    if args.plot:
        plot(args.plot, labels[:MAX_TABLES], tables[:MAX_TABLES])
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
