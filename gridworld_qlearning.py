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

Shapes: R runs (agents), K intervals, U = interval_blocks blocks of T = BLOCK steps,
H, W = grid_size rows and columns, S = H * W cells, A actions.

First come the flags, then the algorithm, for one run, then the launcher, the same in all learners.
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
# A command draws into files, with any backend. In a notebook, the user's backend stays.
if __name__ == "__main__" and "IPython" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"
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
SIGNS = np.array([">", "v", "<", "^"])  # (A,) how a move is printed
BLOCK = 1000  # steps whose random numbers are drawn at once
MAX_PANELS = 4  # settings in a figure


def parse_args(argv=None):
    """Read and check the flags. Those of `sweep` take several values: all combinations are run."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    # A swept flag is a list in args. In a function of one run, run.gamma is one value, and traced:
    # good for arithmetic, not for shapes, loops or `if`. Other flags are plain Python values.
    # `number` and `output` (see the launcher) refuse wrong values.
    flag, sweep = parser.add_argument, partial(parser.add_argument, nargs="+")
    count, unit, side = number(int, 1, 1e6), number(float, 0, 1), number(int, 2, 1e3)
    flag("--seed", type=number(int, 0, 2e9), default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs (agents) of each setting")
    text = "environment steps per run, rounded up to equal intervals"
    flag("--total-timesteps", type=number(int, 1, 1e9), default=1_000_000, help=text)
    flag("--num-intervals", type=count, default=10, help="progress lines, at most")
    flag("--grid-size", type=side, default=[8, 12], nargs=2, help="rows, columns")
    sweep("--learning-rate", type=unit, default=[0.1], help="step size alpha")
    sweep("--gamma", type=unit, default=[0.9], help="discount factor")
    sweep("--epsilon", type=unit, default=[0.1], help="probability of a random action")
    flag("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    flag("--save", type=output(".npz"), metavar="FILE", help="write tables, curves, flags (.npz)")
    picture = output(".png", ".pdf", ".svg")
    text = f"draw values and greedy actions of at most {MAX_PANELS} settings (.png, .pdf, .svg)"
    flag("--plot", type=picture, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    args.grid_size = tuple(args.grid_size)  # only lists are swept
    num_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.interval_blocks = math.ceil(num_blocks / args.num_intervals)
    args.num_intervals = math.ceil(num_blocks / args.interval_blocks)
    return args


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    q_table: jax.Array  # (H, W, A)
    cell: jax.Array  # (2,) where the agent is: row, column


def start(run):
    """Return the cell (2,) in which episodes start: the last row, the last column."""
    return jnp.array(run.grid_size) - 1


def goal(run):
    """Return the cell (2,) in which episodes end: the first row, the first column."""
    return jnp.array([0, 0])


def env_step(run, cell, action):
    """Return the next cell (the same at a wall), reward, and whether the goal is reached."""
    next_cell = jnp.clip(cell + jnp.array(MOVES)[action], 0, jnp.array(run.grid_size) - 1)
    terminated = jnp.all(next_cell == goal(run))
    return next_cell, jnp.where(terminated, 1.0, 0.0), terminated


def init_state(run):
    """State in which a run starts."""
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
    return jnp.argmax(counts > uniform * counts[-1])  # the first action whose count is above


def train_step(run, state, draws):
    """Take one step and update the value of its action. Also return what to average."""
    row, column = state.cell
    values = state.q_table[row, column]  # (A,)
    explore, uniform = draws
    action = select_action(values, explore, uniform)
    next_cell, reward, terminated = env_step(run, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[*next_cell]))
    td_error = reward + run.gamma * next_value - values[action]
    q_table = state.q_table.at[row, column, action].add(run.learning_rate * td_error)
    cell = jnp.where(terminated, start(run), next_cell)
    metrics = {"rewards": reward, "episodes": terminated}
    return state._replace(q_table=q_table, cell=cell), metrics


def train_block(run, state, _):
    """Take T steps. Their random numbers are drawn at once: fast, and in little memory."""
    key, key_explore, key_uniform = jax.random.split(state.key, 3)
    explore = jax.random.bernoulli(key_explore, run.epsilon, BLOCK)
    draws = explore, jax.random.uniform(key_uniform, BLOCK)
    state, metrics = jax.lax.scan(partial(train_step, run), state._replace(key=key), draws)
    return state, jax.tree.map(jnp.mean, metrics)


def train_interval(run, state):
    """Train up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_block, run), state, length=run.interval_blocks)
    means = jax.tree.map(jnp.mean, metrics)
    episodes = means.pop("episodes")  # ended per step
    means["steps_per_episode"] = 1 / episodes  # inf if none ended
    means["returns"] = means.pop("rewards") / episodes  # nan if none ended
    return state, {"timesteps": jnp.array(run.interval_blocks * BLOCK), **means}


def evaluate(run, state):
    """What a run ends with: its table, and the greedy policy's steps from the start to the goal.

    They are inf if it never arrives. The policy is deterministic: among equal values it takes the
    first. If it is not at the goal after S steps, it has visited a cell twice and never arrives.
    """
    greedy = jnp.argmax(state.q_table, axis=2)  # (H, W)

    def step(cell, _):
        next_cell, _, terminated = env_step(run, cell, greedy[*cell])
        return next_cell, (terminated, jnp.all(next_cell == goal(run)))

    _, (ends, arrives) = jax.lax.scan(step, start(run), length=greedy.size)  # (S,)
    first = jnp.argmax(ends)
    steps = jnp.where(jnp.any(ends) & arrives[first], first + 1.0, jnp.inf)
    return {"greedy_steps": steps, "q_table": state.q_table}


def grid_text(table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all are 0."""
    values = table.max(axis=-1)
    signs = np.where(np.any(table, axis=-1), SIGNS[table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


def report(args, learned):
    """Describe what the r runs of a setting learned: the mean of their tables, and how they do."""
    table, greedy_steps = learned["q_table"].mean(axis=0), learned["greedy_steps"]
    arrived = greedy_steps[np.isfinite(greedy_steps)]
    longest = f", in at most {arrived.max():.0f} steps" if len(arrived) else ""
    value = learned["q_table"][:, *start(args)].max(axis=-1).mean()
    reach = f"{len(arrived)} of {len(greedy_steps)} greedy agents reach the goal{longest}"
    return f"value of the start {value:.5f}  {reach}\n{grid_text(table)}"


def draw(args, labels, results):
    """Draw the mean table of each setting for --plot."""
    if args.plot:
        tables = [agents.mean(axis=0) for agents in np.split(results["q_table"], len(labels))]
        plot(args.plot, labels, tables)


def plot(path, labels, tables):
    """Draw values and greedy actions of tables (H, W, A), one for each label."""
    from matplotlib.figure import Figure

    shown = labels[:MAX_PANELS]
    figure = Figure(figsize=(6, 1 + 3 * len(shown)), layout="constrained")
    if len(shown) < len(labels):
        figure.suptitle(f"the first {len(shown)} of {len(labels)} settings")
    panels = figure.subplots(len(shown), squeeze=False)[:, 0]
    for axes, label, table in zip(panels, labels, tables, strict=False):
        image = axes.imshow(table.max(axis=-1))
        figure.colorbar(image, label="max_a of the agents' mean Q")
        row, column = np.nonzero(np.any(table, axis=-1))
        down, to_right = MOVES[table.argmax(axis=-1)[row, column]].T
        if len(row):
            axes.quiver(column, row, to_right, down, angles="xy", pivot="mid", color="white")
        axes.set_title(label)
    figure.savefig(path)


def vectorize(function):
    """Make a function of one run one of all runs of a device.

    A CPU core takes them one after the other: updating many tables at once is slow there.
    """
    if jax.default_backend() == "cpu":
        return lambda *arrays: jax.lax.map(lambda columns: function(*columns), arrays)
    return jax.vmap(function)


COMPILER_OPTIONS = None


# From here on, all learners are the same to the letter: the launcher.


def all_runs(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and a label for each setting.
    """
    swept = {name: values for name, values in vars(args).items() if isinstance(values, list)}
    product = itertools.product(*swept.values())
    settings = [dict(zip(swept, values, strict=True)) for values in product]
    seeds = range(args.seed, args.seed + args.num_seeds)
    runs = [{**setting, "seed": seed} for setting in settings for seed in seeds]
    varied = [name for name, values in swept.items() if len(values) > 1]
    labels = [", ".join(f"{name} {setting[name]:.9g}" for name in varied) for setting in settings]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}, labels


def over_runs(function, args, num_devices):
    """Turn function(run, *arrays) of one run into a function of all runs, spread over devices.

    It takes what differs between runs, {flag: (R,)}, in the place of `run`. The other arrays have
    an axis of runs in front.
    """

    def of_one_run(own, *arrays):
        return function(argparse.Namespace(**{**vars(args), **own}), *arrays)

    mesh, axis = jax.sharding.Mesh(jax.devices()[:num_devices], "runs"), jax.P("runs")
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    return jax.jit(shard(vectorize(of_one_run)), compiler_options=options)


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


def output(*endings):
    """Make an argparse type: a file that can be written, with one of these endings."""

    def parse(path):
        target = path if os.path.exists(path) else os.path.join(os.path.dirname(path), ".")
        if not path.endswith(endings) or os.path.isdir(path) or not os.access(target, os.W_OK):
            text = f"{path!r} is not a {' or '.join(endings)} file that can be written"
            raise argparse.ArgumentTypeError(text)
        return path

    return parse


def main(argv=None):
    """Train, evaluate and report. Return what --save writes. Ctrl-C ends training early."""
    args = parse_args(argv)
    file = None if jax.process_index() == 0 else open(os.devnull, "w")  # one process prints for all
    show = partial(print, file=file, flush=True)
    columns, labels = all_runs(args)
    num_runs = len(columns["seed"])
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if args.distributed else math.ceil(num_runs / per_device)
    # Copies of the first runs fill up the devices; `gather` cuts them off.
    padded = {name: np.resize(column, num_devices * per_device) for name, column in columns.items()}
    on_devices = partial(over_runs, args=args, num_devices=num_devices)
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    show(f"{runs} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    state = on_devices(init_state)(padded)
    train = on_devices(train_interval).lower(padded, state).compile()
    finish = on_devices(evaluate).lower(padded, state).compile()
    compile_seconds = time.perf_counter() - began
    show(f"compiled in {compile_seconds:.1f} s")

    history, timesteps, train_seconds = [], np.zeros(num_runs, np.int64), 0.0
    try:
        for _ in range(args.num_intervals):
            began = time.perf_counter()
            next_state, metrics = train(padded, state)
            metrics = gather(metrics, num_runs)  # waits for train; Ctrl-C is raised here
            train_seconds += time.perf_counter() - began
            # The steps of each run may come in parts, because arrays of jax hold less than 2^31.
            parts = metrics.pop("timesteps").reshape(num_runs, -1)
            timesteps = timesteps + parts.sum(axis=1, dtype=np.int64)  # (R,) so far
            # Not np.nanmean, which would warn if all are nan.
            means = [f"{name} {jnp.nanmean(values):#.4g}" for name, values in metrics.items()]
            speed = f"{timesteps.sum() / train_seconds:,.0f} steps/s"
            # Both in one statement, so that Ctrl-C cannot come between them.
            state, history = next_state, [*history, {"timesteps": timesteps, **metrics}]
            show(f"step {timesteps.mean():,.0f}", *means, speed, sep="  ")
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        show(f"interrupted: the results are those of step {history[-1]['timesteps'].mean():,.0f}")

    learned = gather(finish(padded, state), num_runs)  # (R, ...) each
    for label, rows in zip(labels, np.split(np.arange(num_runs), len(labels)), strict=True):
        text = report(args, {name: values[rows] for name, values in learned.items()})
        show(f"{label}  {text}".strip())
    results = {
        "args": json.dumps(vars(args)),
        **columns,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(history) < args.num_intervals,
        **{name: np.stack([line[name] for line in history]) for name in history[0]},  # (K, R)
        **learned,
    }
    if jax.process_index() == 0:
        if args.save:
            np.savez(args.save, **results)
        draw(args, labels, results)
    return results


if __name__ == "__main__":
    sys.exit(130 if main()["interrupted"] else 0)
