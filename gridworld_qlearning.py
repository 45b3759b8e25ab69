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
    python gridworld_qlearning.py --num-seeds 1024 --plot grid.png   # in one compiled program

Shapes: R runs (agents), K progress lines, H rows, W columns, S = H * W cells numbered row by row,
A actions.
"""

import argparse
import itertools
import json
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

# jax reads this when it is imported: each CPU core that this process may use becomes a device.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
# Compile loops over up to 500 kB of data into one function: 2 times as fast with one agent.
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
BLOCK = 1000  # steps whose random bits are drawn at once
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 1,  # compiles sooner, runs as fast
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: random bits are drawn faster
    "xla_disable_hlo_passes": "cpu-parallel-task-assigner",  # do not split small arrays: 1.2 times
}


def number(kind, low, high):
    """Make an argparse type: an int or a float in [low, high]. An int may be written 2e6."""

    def parse(text):
        value = float(text)
        if not low <= value <= high or value != kind(value):
            raise ValueError
        return kind(value)

    parse.__name__ = f"{kind.__name__} in [{low:g}, {high:g}]"  # argparse shows it in its error
    return parse


def output_file(path):
    """Check for argparse that a file can be opened for writing."""
    try:
        open(path, "ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path!r}: {error.strerror}") from error
    return path


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
    text = "environment steps per run, rounded up to thousands"
    add("--total-timesteps", type=steps, default=1_000_000, help=text)
    add("--grid-size", type=side, default=[8, 12], nargs=2, help="numbers of rows and columns")
    text = "step size alpha; several values: each one runs with each seed"
    add("--learning-rate", type=unit, default=[0.1], nargs="+", help=text)
    add("--gamma", type=unit, default=0.9, help="discount factor")
    add("--epsilon", type=unit, default=0.1, help="probability of a random action")
    text = "environment steps per progress line, rounded up to thousands"
    add("--log-interval", type=steps, default=100_000, help=text)
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=output_file, metavar="FILE.npz", help="write tables, curves, arguments")
    add("--plot", type=output_file, metavar="FILE.png", help="draw values and greedy actions")
    args = parser.parse_args(argv)
    args.num_cells = math.prod(args.grid_size)
    args.total_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.log_blocks = math.ceil(args.log_interval / BLOCK)
    return args


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


def select_action(values, bits, epsilon):
    """Choose an action epsilon-greedily by values (A,). Ties are broken at random.

    One random integer of 32 bits makes both decisions: two draws make a step 1.6 to 4 times as
    slow. If the integer is below epsilon 2^32, all actions are candidates; otherwise only the best
    are. The integer modulo 24 picks one of the 24 rankings of the actions, and the candidate with
    the highest rank is taken. One integer is enough for both, because each remainder occurs almost
    equally often among the integers below epsilon 2^32.
    """
    candidates = (bits / 2.0**32 < epsilon) | (values == jnp.max(values))  # (A,)
    ranks = jnp.asarray(RANKINGS)[bits % len(RANKINGS)]  # (A,)
    return jnp.argmax(jnp.where(candidates, ranks, -1))


def train_step(args, state, bits):
    """Take one step, and update the value of the action taken."""
    values = state.q_table[state.cell]  # (A,)
    action = select_action(values, bits, args.epsilon)
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
    """Take BLOCK steps. Their random bits are drawn at once: fast, and in little memory."""
    key, key_bits = jax.random.split(state.key)
    bits = jax.random.bits(key_bits, BLOCK)
    return jax.lax.scan(partial(train_step, args), state._replace(key=key), bits)


def train_chunk(args, num_blocks, state):
    """Train up to the next progress line. Return state, and steps per episode (inf if none)."""
    state = state._replace(episodes=jnp.array(0))
    state, _ = jax.lax.scan(partial(train_block, args), state, length=num_blocks)
    return state, num_blocks * BLOCK / state.episodes


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


def over_runs(function, num_devices, **jit_options):
    """Compile a function of one run for R runs: vmapped, and sharded over the devices."""
    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    runs = jax.P("runs")
    batched = jax.vmap(function)
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    sharded = jax.shard_map(batched, mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False)
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS, **jit_options)


def gather(tree, num_runs):
    """Copy the arrays of all runs, in all processes, to the host. Cut the surplus runs off."""
    # In a thread: Python handles Ctrl-C while it waits for a thread, but not inside of jax.
    host = ThreadPoolExecutor(1).submit(process_allgather, tree, tiled=True).result()
    return jax.tree.map(lambda array: array[:num_runs], host)


def catch_signals():
    """Collect Ctrl-C and SIGTERM in a list. The same signal again ends the process."""
    caught = []

    def handler(signum, frame):
        caught.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return caught


def grid_text(q_table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all are 0."""
    values = q_table.max(axis=-1)
    signs = np.where(values > 0, np.array(list(">v<^"))[q_table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


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


def main(argv=None, signals=()):
    """Train until done, or until `signals` is not empty. Evaluate, report, return the exit code."""
    args = parse_args(argv)
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_runs = len(seed)
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if args.distributed else math.ceil(num_runs / per_device)
    padding = (0, num_devices * per_device - num_runs)  # copies of the last run fill the devices
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"grid world, {runs} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    init = over_runs(partial(init_state, args), num_devices)
    state = init(np.pad(seed, padding, "edge"), np.pad(learning_rate, padding, "edge"))
    ends = [*range(args.log_blocks, args.total_blocks, args.log_blocks), args.total_blocks]
    chunks = np.diff(ends, prepend=0)  # blocks for each progress line
    programs = {}
    for blocks in set(chunks):
        chunk = over_runs(partial(train_chunk, args, blocks), num_devices, donate_argnums=0)
        programs[blocks] = chunk.lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    began = time.perf_counter()
    timesteps = np.array(ends) * BLOCK  # (K,)
    report = []  # (K, R)
    for blocks, step in zip(chunks, timesteps, strict=True):
        state, steps_per_episode = programs[blocks](state)
        report.append(gather(steps_per_episode, num_runs))
        train_seconds = time.perf_counter() - began
        ended = report[-1][np.isfinite(report[-1])]  # of runs in which an episode ended
        print(
            f"step {step:,}  steps per episode {ended.mean() if len(ended) else math.nan:.1f}"
            f"  {step * num_runs / train_seconds:,.0f} steps/s"
        )
        if process_allgather(bool(signals)).any():  # in any process
            break

    greedy_steps = over_runs(partial(evaluate, args), num_devices)(state)  # (R,)
    greedy_steps, q_table = gather((greedy_steps, state.q_table), num_runs)
    q_table = q_table.reshape(num_runs, *args.grid_size, len(MOVES))  # (R, H, W, A)
    mean_table = q_table.mean(axis=0)
    print(grid_text(mean_table))
    for rate in args.learning_rate:
        value = q_table[learning_rate == rate, -1, -1].max(axis=-1).mean()
        steps = greedy_steps[learning_rate == rate]
        arrived = steps[np.isfinite(steps)]
        longest = f", in at most {arrived.max():.0f} steps" if len(arrived) else ""
        print(
            f"learning rate {rate:g}: value of the start {value:.5f},"
            f" goal reached by {len(arrived)} of {len(steps)} greedy agents{longest}"
        )
    if args.save:
        np.savez(
            args.save,
            args=json.dumps(vars(args)),
            seed=seed,
            learning_rate=learning_rate,
            compile_seconds=compile_seconds,
            train_seconds=train_seconds,
            timesteps=timesteps[: len(report)],
            steps_per_episode=report,
            greedy_steps=greedy_steps,  # inf where the greedy policy never reaches the goal
            q_table=q_table,
        )
    if args.plot:
        plot(args.plot, mean_table)
    return 130 if signals else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(main(signals=catch_signals()))
