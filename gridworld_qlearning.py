# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""Tabular Q-learning on a grid world: one agent or thousands, each with a table of its own.

    Q(s, a) <- Q(s, a) + alpha (target - Q(s, a))
    target  =  r + gamma max_a' Q(s', a'),    or r if s' is the goal

after each step (Watkins 1989; Sutton & Barto 2018, section 6.5). Nothing but actions is random: a
constant alpha leads to the exact gamma^(d - 1), d steps being the shortest path that begins with a.

    python gridworld_qlearning.py                                    # one agent
    python gridworld_qlearning.py --num-seeds 1024 --plot grid.png   # in one compiled program

Shapes: R runs (agents), T steps, S = H * W cells numbered row by row, A actions.
"""

import argparse
import itertools
import json
import math
import os
import queue
import signal
import sys
import time
from functools import partial
from typing import NamedTuple

# jax reads these when it is imported: each core is a device; vectors are as wide as they can be;
# lower optimisation and older code compile sooner; operations are not split over cores (1,024
# agents: 1.2 times as fast); a loop over up to 500 kB is one function (one agent: 1.9, thirty: 3).
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_prefer_vector_width=512 --xla_backend_optimization_level=1"
    " --xla_cpu_use_fusion_emitters=false --xla_disable_hlo_passes=cpu-parallel-task-assigner"
    " --xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=500000",
)
import jax

if "--distributed" in sys.argv:  # before anything makes an array
    jax.distributed.initialize()

import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # (A, 2) right, down, left, up: row, column
GOAL = 0  # the first cell; episodes start in the last one
ORDERS = np.array(list(itertools.permutations(range(len(MOVES)))))  # (24, A)
BLOCK = 1000  # steps whose random words are drawn at once


def number(kind, low, high):
    """An argparse type: an int or a float in [low, high]; an int may be written 2e6."""

    def parse(text):
        value = float(text)
        if not low <= value <= high or value != kind(value):
            raise ValueError
        return kind(value)

    parse.__name__ = f"{kind.__name__} in [{low:g}, {high:g}]"  # argparse shows it in its error
    return parse


def parse_args(argv=None):
    """Read and check the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument
    count = number(int, 1, 1e6)
    share = number(float, 0, 1)
    add("--seed", type=number(int, 0, 2e9), default=0, help="of the first run; run i has seed + i")
    add("--num-seeds", type=count, default=1, help="agents in one program, on all cores or devices")
    add("--total-timesteps", type=number(int, 1, 1e9), default=1_000_000, help="steps of a run")
    add("--grid-size", type=number(int, 2, 1e3), default=[8, 12], nargs=2, help="rows and columns")
    add("--learning-rate", type=share, default=[0.1], nargs="+", help="alpha; runs with each")
    add("--gamma", type=share, default=0.9, help="discount factor")
    add("--epsilon", type=share, default=0.1, help="probability of a random action")
    add("--log-interval", type=count, default=100_000, help="environment steps per progress line")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", metavar="FILE.npz", help="write tables, learning curve and arguments")
    add("--plot", metavar="FILE.png", help="draw values and greedy actions")
    args = parser.parse_args(argv)
    for path in [args.save, args.plot]:
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"no such folder: {path}")
    args.num_cells = math.prod(args.grid_size)
    # a chunk: the blocks up to the next progress line
    args.chunk_blocks = math.ceil(min(args.log_interval, args.total_timesteps) / BLOCK)
    args.num_chunks = math.ceil(args.total_timesteps / (args.chunk_blocks * BLOCK))
    return args


class TrainState(NamedTuple):
    """All that changes during a run."""

    key: jax.Array
    learning_rate: jax.Array
    q_table: jax.Array  # (S, A)
    cell: jax.Array  # where the agent is


def env_step(args, cell, action):
    """Next cell, one further or at a wall the same; reward; and if the goal is reached."""
    moved = np.indices(args.grid_size).reshape(2, -1, 1) + MOVES.T[:, None, :]  # (2, S, A)
    next_cells = np.ravel_multi_index(tuple(moved), args.grid_size, mode="clip")  # (S, A)
    next_cell = jnp.asarray(next_cells)[cell, action]  # NumPy above: a constant when compiled
    terminated = next_cell == GOAL
    return next_cell, jnp.where(terminated, 1.0, 0.0), terminated


def init_state(args, seed, learning_rate):
    """The state in which the run with this seed starts."""
    q_table = jnp.zeros((args.num_cells, len(MOVES)))
    return TrainState(jax.random.key(seed), learning_rate, q_table, jnp.array(args.num_cells - 1))


def select_action(values, word, epsilon):
    """Epsilon-greedy among values (A,), ties broken at random, by one random 32-bit word.

    Its size decides whether to explore, its remainder picks one of the 24 rankings of the actions:
    the candidate that ranks highest is taken. The rankings are equally likely up to a share of
    24 / (epsilon 2^32).
    """
    candidates = (word / 2.0**32 < epsilon) | (values == jnp.max(values))  # (A,)
    order = jnp.asarray(ORDERS)[word % len(ORDERS)]  # (A,)
    return jnp.argmax(jnp.where(candidates, order, -1))


def train_step(args, state, word):
    """One step of the agent, and what it learns from it."""
    values = state.q_table[state.cell]  # (A,)
    action = select_action(values, word, args.epsilon)
    next_cell, reward, terminated = env_step(args, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[next_cell]))
    td_error = reward + args.gamma * next_value - values[action]
    value = values[action] + state.learning_rate * td_error
    q_table = state.q_table.at[state.cell, action].set(value)  # .add rounds one agent otherwise
    cell = jnp.where(terminated, args.num_cells - 1, next_cell)
    return state._replace(q_table=q_table, cell=cell), terminated


def train_block(args, state, _):
    """BLOCK steps, their random words drawn at once: fast, and in little memory."""
    key, key_words = jax.random.split(state.key)
    words = jax.random.bits(key_words, BLOCK)
    state, terminated = jax.lax.scan(partial(train_step, args), state._replace(key=key), words)
    return state, jnp.sum(terminated)


def train_chunk(args, state):
    """All steps up to the next progress line; steps per episode that ended, or inf."""
    state, episodes = jax.lax.scan(partial(train_block, args), state, length=args.chunk_blocks)
    return state, args.chunk_blocks * BLOCK / jnp.sum(episodes)


def evaluate(args, state):
    """Steps of the greedy policy from start to goal; all S if it never gets there."""
    greedy = jnp.argmax(state.q_table, axis=1)  # (S,)
    onward, _, _ = env_step(args, jnp.arange(args.num_cells), greedy)  # (S,)
    onward = onward.at[GOAL].set(GOAL)
    start = jnp.array(args.num_cells - 1)
    _, path = jax.lax.scan(lambda cell, _: (onward[cell], cell), start, length=args.num_cells)
    return jnp.sum(path != GOAL)


def over_runs(function, num_devices, **jit_options):
    """Compile a function of one run for R runs: vmapped, and sharded over the devices."""
    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    runs = jax.P("runs")
    batched = jax.vmap(function)
    sharded = jax.shard_map(batched, mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False)
    return jax.jit(sharded, **jit_options)


def grid_text(q_table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all is 0."""
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
    plt.colorbar(label="max_a Q, mean over the agents", orientation="horizontal")
    plt.quiver(column, row, to_right, down, angles="xy", pivot="mid", color="white")
    plt.savefig(path)


def main(argv=None):
    """Train, evaluate, report; the exit code."""
    args = parse_args(argv)
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_devices = math.gcd(jax.device_count(), len(seed))
    if args.distributed and num_devices < jax.device_count():
        sys.exit(f"the number of runs must be a multiple of the {jax.device_count()} devices")
    print(f"grid world, {len(seed)} runs on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    state = over_runs(partial(init_state, args), num_devices)(seed, learning_rate)
    chunk = over_runs(partial(train_chunk, args), num_devices, donate_argnums=0)
    chunk = chunk.lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    interrupts = queue.SimpleQueue()
    signal.signal(signal.SIGINT, interrupts.put)  # Ctrl-C lets the chunk under way end
    began = time.perf_counter()
    timesteps, steps_per_episode = [], []  # (K,), (K, R)
    for chunks in range(1, args.num_chunks + 1):
        state, episode_steps = chunk(state)
        steps_per_episode.append(process_allgather(episode_steps, tiled=True))
        timesteps.append(chunks * args.chunk_blocks * BLOCK)
        train_seconds = time.perf_counter() - began
        speed = timesteps[-1] * len(seed) / train_seconds
        mean = steps_per_episode[-1].mean()
        print(f"step {timesteps[-1]:,}  steps per episode {mean:.1f}  {speed:,.0f} steps/s")
        if process_allgather(not interrupts.empty()).any():  # in any process
            break

    greedy_steps = over_runs(partial(evaluate, args), num_devices)(state)  # (R,)
    greedy_steps, q_table = process_allgather((greedy_steps, state.q_table), tiled=True)
    q_table = q_table.reshape(len(seed), *args.grid_size, len(MOVES))  # (R, H, W, A)
    mean_table = q_table.mean(axis=0)
    print(grid_text(mean_table))
    for rate in args.learning_rate:
        worst = greedy_steps[learning_rate == rate].max()
        value = q_table[learning_rate == rate, -1, -1].max(axis=-1).mean()
        print(f"learning rate {rate:g}: start worth {value:.5f}, at most {worst} steps to the goal")
    if args.save:
        np.savez(
            args.save,
            args=json.dumps(vars(args)),
            seed=seed,
            learning_rate=learning_rate,
            compile_seconds=compile_seconds,
            train_seconds=train_seconds,
            timesteps=timesteps,
            steps_per_episode=steps_per_episode,
            greedy_steps=greedy_steps,
            q_table=q_table,
        )
    if args.plot:
        plot(args.plot, mean_table)
    return 0 if interrupts.empty() else 130


if __name__ == "__main__":
    sys.exit(main())
