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

To change the task, change START, GOAL, MOVES and `env_step`.

Shapes: R runs (agents), K log intervals, U blocks, T steps of a block, H rows, W columns,
S = H * W cells numbered row by row, A actions.

The algorithm comes first, for one run. The flags, and what runs it on all devices, come after it.
"""

import argparse
import itertools
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
# Compile loops over up to 500 kB of data into one function: 1.6 times as fast with one agent.
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
GOAL = 0, 0  # row, column
START = -1, -1  # the last row, the last column
RANKINGS = np.array(list(itertools.permutations(range(len(MOVES)))))  # (24, A)
BLOCK = 1000  # steps whose random numbers are drawn at once

# These flags take several values, and every combination of them is run. In a function of one run,
# args holds that run's own values.
SWEPT = "learning_rate", "gamma", "epsilon"


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    q_table: jax.Array  # (S, A)
    cell: jax.Array  # where the agent is
    episode_return: jax.Array  # so far
    episode_length: jax.Array  # steps so far


def cell_at(args, position):
    """Number of the cell in a row and a column. Negative ones count from the end."""
    return int(np.ravel_multi_index(np.mod(position, args.grid_size), args.grid_size))


def env_step(args, cell, action):
    """Return the next cell (the same at a wall), reward, and whether the goal is reached."""
    moved = np.indices(args.grid_size).reshape(2, -1, 1) + MOVES.T[:, None, :]  # (2, S, A)
    next_cells = np.ravel_multi_index(tuple(moved), args.grid_size, mode="clip")  # (S, A)
    next_cell = jnp.asarray(next_cells)[cell, action]  # NumPy above: a constant when compiled
    terminated = next_cell == cell_at(args, GOAL)
    return next_cell, jnp.where(terminated, 1.0, 0.0), terminated


def init_state(args):
    """State in which a run starts."""
    return TrainState(
        key=jax.random.key(args.seed),
        q_table=jnp.zeros((math.prod(args.grid_size), len(MOVES))),
        cell=jnp.array(cell_at(args, START)),
        episode_return=jnp.array(0.0),
        episode_length=jnp.array(0),
    )


def select_action(values, explore, ranking):
    """Choose an action epsilon-greedily by values (A,).

    The candidates are all actions if the agent explores, and the best ones otherwise. A random
    ranking of the actions breaks ties: the candidate with the highest rank is taken. One random
    number is enough for a ranking; one for each action would take 1.8 times as long.
    """
    candidates = explore | (values == jnp.max(values))  # (A,)
    ranks = jnp.asarray(RANKINGS)[ranking]  # (A,)
    return jnp.argmax(jnp.where(candidates, ranks, -1))


def train_step(args, state, draws):
    """Take one step, and update the value of the action taken. Also return what ended with it."""
    values = state.q_table[state.cell]  # (A,)
    action = select_action(values, *draws)
    next_cell, reward, terminated = env_step(args, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[next_cell]))
    td_error = reward + args.gamma * next_value - values[action]
    value = values[action] + args.learning_rate * td_error
    total, length = state.episode_return + reward, state.episode_length + 1
    state = state._replace(
        q_table=state.q_table.at[state.cell, action].set(value),
        cell=jnp.where(terminated, cell_at(args, START), next_cell),
        episode_return=jnp.where(terminated, 0.0, total),
        episode_length=jnp.where(terminated, 0, length),
    )
    ended = {"episodes": 1, "return_sum": total, "length_sum": length}
    return state, {name: terminated * value for name, value in ended.items()}


def train_block(args, state, _):
    """Take T steps. Their random numbers are drawn at once: fast, and in little memory."""
    key, key_explore, key_ranking = jax.random.split(state.key, 3)
    explore = jax.random.bernoulli(key_explore, args.epsilon, BLOCK)
    ranking = (len(RANKINGS) * jax.random.uniform(key_ranking, BLOCK)).astype(int)
    draws = explore, ranking
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
    greedy = jnp.argmax(state.q_table, axis=1)  # (S,)

    def step(cell, _):
        next_cell, _, terminated = env_step(args, cell, greedy[cell])
        return next_cell, terminated

    start = jnp.array(cell_at(args, START))
    _, terminated = jax.lax.scan(step, start, length=len(greedy))  # (S,)
    return jnp.where(jnp.any(terminated), jnp.argmax(terminated) + 1.0, jnp.inf)


COMPILER_OPTIONS = {  # on a CPU
    "xla_backend_optimization_level": 2,  # compiles in 0.7 of the time of level 3, runs as fast
}

# A CPU core takes at most MAX_BATCH runs at once: the data of more would leave its cache. Fewer
# than MIN_BATCH are 2 to 12 times as fast one after the other: the table update is a slow operation
# of its own when it is vmapped.
MIN_BATCH, MAX_BATCH = 64, 128


def sweep(args):
    """Combine the values of the swept flags with each other (a setting) and with the seeds (a run).

    Return the values that differ between runs, (R,) each by name, the runs of a setting one after
    the other; and a label for each setting, which names the flags that vary.
    """
    values = {name: vars(args)[name] for name in SWEPT}
    values["seed"] = args.seed + np.arange(args.num_seeds)
    grid = np.meshgrid(*values.values(), indexing="ij")  # the last one, the seed, varies fastest
    runs = {name: array.ravel() for name, array in zip(values, grid, strict=True)}
    several = [name for name in SWEPT if len(values[name]) > 1]
    firsts = range(0, len(runs["seed"]), args.num_seeds)  # the first run of each setting
    labels = [", ".join(f"{name} {runs[name][run]:g}" for name in several) for run in firsts]
    return runs, labels


def spread(runs, all_devices):
    """Return how many devices R runs need, and runs to which copies of the last one are added.

    The copies fill up the devices: each takes the same number of runs.
    """
    num_runs = len(runs["seed"])
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if all_devices else math.ceil(num_runs / per_device)
    copies = num_devices * per_device - num_runs
    return num_devices, {name: np.pad(own, (0, copies), "edge") for name, own in runs.items()}


def in_batches(function):
    """Make a function of one run one of all runs of a device: a few at a time, vmapped."""

    def of_all_runs(*arrays):
        num_runs = len(jax.tree.leaves(arrays)[0])
        batch_size = math.ceil(num_runs / math.ceil(num_runs / MAX_BATCH))
        if jax.default_backend() != "cpu":
            batch_size = num_runs
        elif batch_size < MIN_BATCH:
            batch_size = 1
        return jax.lax.map(lambda run: function(*run), arrays, batch_size=batch_size)

    return of_all_runs


def over_runs(function, args, num_devices):
    """Compile function(args, *arrays) of one run for all runs, vmapped and spread over devices.

    The compiled function takes runs in the place of args: each run's own values replace those in
    args. The other arrays have an axis of runs in front.
    """

    def of_one_run(own, *arrays):
        return function(argparse.Namespace(**vars(args) | own), *arrays)

    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(in_batches(of_one_run), in_specs=jax.P("runs"), out_specs=jax.P("runs"))
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS if on_cpu else None)


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
        place = path if os.path.exists(path) else os.path.join(folder, ".")
        can_write = os.access(place, os.W_OK) and not os.path.isdir(path)
        if not can_write or os.path.splitext(name)[1] != suffix:
            raise argparse.ArgumentTypeError(f"{path!r} is not a {suffix} file that can be written")
        return path

    return parse


def parse_args(argv=None):
    """Read and check the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument
    count = number(int, 1, 1e6)
    steps = number(int, 1, 1e9)
    unit = number(float, 0, 1)
    side = number(int, 2, 1e3)
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of the first run")
    text = "runs (agents) of each setting, with successive seeds"
    add("--num-seeds", type=count, default=1, help=text)
    text = "environment steps per run, rounded up to whole log intervals"
    add("--total-timesteps", type=steps, default=1_000_000, help=text)
    add("--grid-size", type=side, default=[8, 12], nargs=2, help="numbers of rows and columns")
    add("--learning-rate", type=unit, nargs="+", default=[0.1], help="step size alpha")
    add("--gamma", type=unit, nargs="+", default=[0.9], help="discount factor")
    text = "probability of a random action"
    add("--epsilon", type=unit, nargs="+", default=[0.1], help=text)
    text = "approximate number of environment steps between progress lines"
    add("--log-interval", type=steps, default=100_000, help=text)
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=file_name(".npz"), metavar="FILE", help="write tables, curves, arguments")
    add("--plot", type=file_name(".png"), metavar="FILE", help="draw values and greedy actions")
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    min_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.num_intervals = math.ceil(min_blocks / math.ceil(args.log_interval / BLOCK))
    args.interval_blocks = math.ceil(min_blocks / args.num_intervals)
    args.interval_timesteps = args.interval_blocks * BLOCK
    return args


MAX_TABLES = 4  # that are printed and drawn


def grid_text(table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all are 0."""
    values = table.max(axis=-1)
    signs = np.where(np.any(table, axis=-1), np.array(list(">v<^"))[table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


def summary(q_table, greedy_steps):
    """What the runs (r,) of one setting learned, in words, from tables (r, H, W, A)."""
    value = q_table[:, *START].max(axis=-1).mean()
    arrived = greedy_steps[np.isfinite(greedy_steps)]
    longest = f", in at most {arrived.max():.0f} steps" if len(arrived) else ""
    reach = f"{len(arrived)} of {len(greedy_steps)} greedy agents reach the goal{longest}"
    return f"value of the start {value:.5f}  {reach}"


def plot(path, labels, tables):
    """Draw values and greedy actions of tables (H, W, A), one for each label."""
    import matplotlib.pyplot as plt

    height = 1 + 3 * len(tables)
    figure, panels = plt.subplots(len(tables), figsize=(6, height), layout="constrained", squeeze=0)
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
    """Train, evaluate and report. Return what --save writes."""
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
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    timesteps = args.interval_timesteps * np.arange(1, args.num_intervals + 1)  # (K,)
    history, train_seconds = [], 0.0
    try:
        for timestep in timesteps:
            began = time.perf_counter()
            next_state, metrics = train(runs_and_copies, state)
            history.append(gather(metrics, num_runs))  # waits for it; Ctrl-C is raised here
            state = next_state
            train_seconds += time.perf_counter() - began
            mean = jax.tree.map(jnp.nanmean, history[-1])  # NumPy's would warn if all are nan
            speed = timestep * num_runs / train_seconds
            print(
                f"step {timestep:,}  steps per episode {mean['steps_per_episode']:.1f}"
                f"  return {mean['returns']:.2f}  {speed:,.0f} steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        print("interrupted: the results are those of the last line")

    greedy_steps = on_devices(evaluate)(runs_and_copies, state)  # (R,)
    greedy_steps, q_table = gather((greedy_steps, state.q_table), num_runs)
    q_table = q_table.reshape(num_runs, *args.grid_size, len(MOVES))  # (R, H, W, A)
    settings = np.split(q_table, len(labels)), np.split(greedy_steps, len(labels))
    tables = [q_tables.mean(axis=0) for q_tables in settings[0]]
    for label, table in zip(labels[:MAX_TABLES], tables[:MAX_TABLES], strict=True):
        print(f"{label}  mean of the agents' tables".strip(), grid_text(table), sep="\n")
    if len(labels) > MAX_TABLES:
        print(f"the first {MAX_TABLES} of {len(labels)} tables are shown")
    for label, *learned in zip(labels, *settings, strict=True):
        print(f"{label}  {summary(*learned)}".strip())
    results = {
        "args": json.dumps(vars(args)),
        **runs,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(history) < args.num_intervals,
        "timesteps": timesteps[: len(history)],
        **jax.tree.map(lambda *values: np.stack(values), *history),  # (K, R)
        "greedy_steps": greedy_steps,  # inf where the greedy policy never reaches the goal
        "q_table": q_table,
    }
    if args.save:
        np.savez(args.save, allow_pickle=False, **results)  # an error if they are nested
    if args.plot:
        plot(args.plot, labels[:MAX_TABLES], tables[:MAX_TABLES])
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
