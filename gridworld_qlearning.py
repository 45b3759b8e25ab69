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

    python gridworld_qlearning.py                                    # one agent
    python gridworld_qlearning.py --num-seeds 1024 --plot grid.png   # 1,024, on all cores

Shapes: R runs (agents), K progress lines, H rows, W columns, S = H * W cells numbered row by row,
A actions.

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
# Compile loops over up to 500 kB of data into one function: 1.5 times as fast with one agent.
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
GOAL = 0  # the first cell; episodes start in the last one
RANKINGS = np.array(list(itertools.permutations(range(len(MOVES)))))  # (24, A)
BLOCK = 1000  # steps whose random numbers are drawn at once


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    learning_rate: jax.Array
    q_table: jax.Array  # (S, A)
    cell: jax.Array  # where the agent is
    episodes: jax.Array  # number that ended since the last progress line


def env_step(args, cell, action):
    """Return the next cell (the same at a wall), reward, and whether the goal is reached."""
    moved = np.indices(args.grid_size).reshape(2, -1, 1) + MOVES.T[:, None, :]  # (2, S, A)
    next_cells = np.ravel_multi_index(tuple(moved), args.grid_size, mode="clip")  # (S, A)
    next_cell = jnp.asarray(next_cells)[cell, action]  # NumPy above: a constant when compiled
    terminated = next_cell == GOAL
    return next_cell, jnp.where(terminated, 1.0, 0.0), terminated


def init_state(args, seed, learning_rate):
    """Return the state in which the run with this seed starts."""
    return TrainState(
        key=jax.random.key(seed),
        learning_rate=learning_rate,
        q_table=jnp.zeros((args.num_cells, len(MOVES))),
        cell=jnp.array(args.num_cells - 1),
        episodes=jnp.array(0),
    )


def select_action(values, explore, ranking):
    """Choose an action epsilon-greedily by values (A,).

    The candidates are all actions if the agent explores, and the best ones otherwise. A random
    ranking of the actions breaks ties: the candidate with the highest rank is taken.
    """
    candidates = explore | (values == jnp.max(values))  # (A,)
    ranks = jnp.asarray(RANKINGS)[ranking]  # (A,)
    return jnp.argmax(jnp.where(candidates, ranks, -1))


def train_step(args, state, draws):
    """Take one step, and update the value of the action taken."""
    values = state.q_table[state.cell]  # (A,)
    action = select_action(values, *draws)
    next_cell, reward, terminated = env_step(args, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[next_cell]))
    td_error = reward + args.gamma * next_value - values[action]
    value = values[action] + state.learning_rate * td_error
    state = state._replace(
        q_table=state.q_table.at[state.cell, action].set(value),
        cell=jnp.where(terminated, args.num_cells - 1, next_cell),
        episodes=state.episodes + terminated,
    )
    return state, None


def train_block(args, state, _):
    """Take BLOCK steps. Their random numbers are drawn at once: fast, and in little memory."""
    key, key_explore, key_ranking = jax.random.split(state.key, 3)
    explore = jax.random.bernoulli(key_explore, args.epsilon, BLOCK)
    ranking = (len(RANKINGS) * jax.random.uniform(key_ranking, BLOCK)).astype(int)
    draws = explore, ranking
    return jax.lax.scan(partial(train_step, args), state._replace(key=key), draws)


def train_chunk(args, state):
    """Train up to the next progress line. Return the state and what the line shows."""
    state = state._replace(episodes=jnp.array(0))
    state, _ = jax.lax.scan(partial(train_block, args), state, length=args.chunk_blocks)
    episodes = jnp.where(state.episodes > 0, state.episodes, jnp.nan)  # nan if no episode ended
    return state, {"steps_per_episode": args.chunk_timesteps / episodes}


def evaluate(args, state):
    """Number of steps of the greedy policy from the start to the goal, inf if it never arrives.

    The policy is deterministic: among equal values it takes the first. If it is not at the goal
    after S steps, it has visited some cell twice. So it walks in circles and never arrives.
    """
    greedy = jnp.argmax(state.q_table, axis=1)  # (S,)

    def step(cell, _):
        next_cell, _, terminated = env_step(args, cell, greedy[cell])
        return next_cell, terminated

    start = jnp.array(args.num_cells - 1)
    _, terminated = jax.lax.scan(step, start, length=args.num_cells)  # (S,)
    return jnp.where(jnp.any(terminated), jnp.argmax(terminated) + 1.0, jnp.inf)


COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 1,  # compiles in two thirds of the time, runs as fast
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1,024 agents are 1.2 times as fast
}

# On a CPU, the data of many runs would leave the cache. A GPU takes all runs at once.
RUNS_AT_ONCE = 128 if jax.default_backend() == "cpu" else 10**6


# Fewer runs than this are 2 to 9 times as fast one after the other: the table update is a slow
# operation of its own when it is vmapped.
MIN_AT_ONCE = 64 if jax.default_backend() == "cpu" else 0


def spread(num_runs, all_devices):
    """Spread R runs evenly. Return how many devices, runs at once on each, and copies to add."""
    num_devices = jax.device_count() if all_devices else min(num_runs, jax.device_count())
    per_device = math.ceil(num_runs / num_devices)
    num_batches = math.ceil(per_device / RUNS_AT_ONCE)
    at_once = math.ceil(per_device / num_batches)
    if at_once < MIN_AT_ONCE:
        num_batches, at_once = per_device, 1
    return num_devices, at_once, num_devices * num_batches * at_once - num_runs


def over_runs(function, num_devices, at_once):
    """Compile a function of one run for R runs: each device takes a few at a time, vmapped."""

    def on_one_device(*runs):
        return jax.lax.map(lambda run: function(*run), runs, batch_size=at_once)

    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(on_one_device, in_specs=jax.P("runs"), out_specs=jax.P("runs"))
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS)


def gather(tree, num_runs):
    """Copy the arrays of all runs, in all processes, to the host. Cut the padding off."""
    return jax.tree.map(lambda array: array[:num_runs], process_allgather(tree, tiled=True))


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
        if not path.endswith(suffix) or not os.access(os.path.dirname(path) or ".", os.W_OK):
            raise ValueError
        return path

    parse.__name__ = f"{suffix} file in a writable folder"
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
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of run 0; run i uses seed + i")
    text = "runs (agents) per learning rate, spread over devices"
    add("--num-seeds", type=count, default=1, help=text)
    text = "environment steps per run, rounded up to whole progress lines"
    add("--total-timesteps", type=steps, default=1_000_000, help=text)
    add("--grid-size", type=side, default=[8, 12], nargs=2, help="numbers of rows and columns")
    text = "step size alpha; several values: each one runs with each seed"
    add("--learning-rate", type=unit, default=[0.1], nargs="+", help=text)
    add("--gamma", type=unit, default=0.9, help="discount factor")
    add("--epsilon", type=unit, default=0.1, help="probability of a random action")
    text = "approximate number of environment steps per progress line"
    add("--log-interval", type=steps, default=100_000, help=text)
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=file_name(".npz"), metavar="FILE", help="write tables, curves, arguments")
    add("--plot", type=file_name(".png"), metavar="FILE", help="draw values and greedy actions")
    args = parser.parse_args(argv)
    if len(set(args.learning_rate)) < len(args.learning_rate):
        parser.error("argument --learning-rate: the same value twice")
    args.num_cells = math.prod(args.grid_size)
    min_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.num_chunks = math.ceil(min_blocks / math.ceil(args.log_interval / BLOCK))
    args.chunk_blocks = math.ceil(min_blocks / args.num_chunks)
    args.chunk_timesteps = args.chunk_blocks * BLOCK
    return args


def grid_text(q_table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all are 0."""
    values = q_table.max(axis=-1)
    signs = np.where(values > 0, np.array(list(">v<^"))[q_table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


def print_rate(rate, q_table, greedy_steps):
    """Print what the runs (r,) with one learning rate learned: tables (r, H, W, A)."""
    value = q_table[:, -1, -1].max(axis=-1).mean()
    arrived = greedy_steps[np.isfinite(greedy_steps)]
    longest = f", in at most {arrived.max():.0f} steps" if len(arrived) else ""
    print(
        f"learning rate {rate:g}: value of the start {value:.5f},"
        f" goal reached by {len(arrived)} of {len(greedy_steps)} greedy agents{longest}"
    )


def plot(path, q_table):
    """Draw values and greedy actions of a table (H, W, A)."""
    import matplotlib.pyplot as plt

    plt.figure()
    values = q_table.max(axis=-1)
    row, column = np.nonzero(values)
    down, to_right = MOVES[q_table.argmax(axis=-1)[row, column]].T
    plt.imshow(values)
    plt.colorbar(label="max_a of the agents' mean Q", orientation="horizontal")
    plt.quiver(column, row, to_right, down, angles="xy", pivot="mid", color="white")
    plt.savefig(path)


def main(argv=None):
    """Train, evaluate and report. Return what --save writes."""
    args = parse_args(argv)
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_runs = len(seed)
    num_devices, at_once, copies = spread(num_runs, args.distributed)
    compiled = partial(over_runs, num_devices=num_devices, at_once=at_once)
    how_many = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"grid world, {how_many} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    runs = [np.pad(values, (0, copies), "edge") for values in (seed, learning_rate)]
    state = compiled(partial(init_state, args))(*runs)
    train = compiled(partial(train_chunk, args)).lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    timesteps = args.chunk_timesteps * np.arange(1, args.num_chunks + 1)  # (K,)
    lines, train_seconds = [], 0.0
    try:
        for timestep in timesteps:
            began = time.perf_counter()
            next_state, metrics = train(state)
            lines.append(gather(metrics, num_runs))  # waits for the chunk; Ctrl-C is raised here
            state = next_state
            train_seconds += time.perf_counter() - began
            mean = jax.tree.map(jnp.nanmean, lines[-1])  # NumPy's would warn if all are nan
            speed = timestep * num_runs / train_seconds
            print(
                f"step {timestep:,}  steps per episode {mean['steps_per_episode']:.1f}"
                f"  {speed:,.0f} steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not lines:
            raise
        print("interrupted: the results are those of the last line")

    greedy_steps = compiled(partial(evaluate, args))(state)  # (R,)
    greedy_steps, q_table = gather((greedy_steps, state.q_table), num_runs)
    q_table = q_table.reshape(num_runs, *args.grid_size, len(MOVES))  # (R, H, W, A)
    mean_table = q_table.mean(axis=0)
    print(grid_text(mean_table))
    for rate in args.learning_rate:
        print_rate(rate, q_table[learning_rate == rate], greedy_steps[learning_rate == rate])
    results = {
        "args": json.dumps(vars(args)),
        "seed": seed,
        "learning_rate": learning_rate,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(lines) < args.num_chunks,
        "timesteps": timesteps[: len(lines)],
        **jax.tree.map(lambda *values: np.stack(values), *lines),  # (K, R)
        "greedy_steps": greedy_steps,  # inf where the greedy policy never reaches the goal
        "q_table": q_table,
    }
    if args.save:
        np.savez(args.save, **results)
    if args.plot:
        plot(args.plot, mean_table)
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
