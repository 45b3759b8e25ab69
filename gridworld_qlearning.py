# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "matplotlib==3.11.2"]
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
on slippery ground, also draw their numbers in `train_block`, pass them on in `train_step`, and let
`evaluate` play many episodes, since one greedy path then says little.

Shapes: R runs (agents), K intervals, U = interval_blocks blocks of T = BLOCK steps,
H, W = grid_size rows and columns, S = H * W cells, A actions.

Read down to the end of `main`: first come the flags, then the algorithm, written for one run, then
`main`, which runs it. What follows `main` is not about learning.
"""

import argparse
import itertools
import json
import math
import os
import re
import sys
import time
from functools import partial
from typing import NamedTuple

# Each core of the CPU becomes a device. This must be set before jax is imported.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
if __name__ == "__main__" and "IPython" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"  # draw to files; a notebook keeps its own backend
# Compile loops over up to 500 kB of data into one function: 1.9 times as fast with one agent.
LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=500000"
os.environ["XLA_FLAGS"] = LOOPS + " " + os.environ.get("XLA_FLAGS", "")  # the user's flags win
import jax

if __name__ == "__main__" and "--distributed" in sys.argv:
    jax.distributed.initialize()  # before the first array is created

import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # (A, 2) change of row, of column
SIGNS = np.array([">", "v", "<", "^"])  # (A,) how they are printed: right, down, left, up
BLOCK = 1000  # steps whose random numbers are drawn at once
MAX_PRINTED = 4000  # tables with fewer entries are printed


def parse_args(argv=None):
    """Read and check the flags. Those added by `sweep` take several values: all combinations run.

    Only numbers that are used in arithmetic can be swept, not those that set shapes or counts.
    """
    parser, flag, sweep = make_parser()
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
    text = "join the processes of a Slurm or Open MPI 4 job"
    flag("--distributed", action="store_true", help=text)
    flag("--save", type=output(".npz"), metavar="FILE", help="write tables, curves, flags (.npz)")
    picture = output(".png", ".pdf", ".svg")
    text = "draw values and greedy actions of at most four settings (.png, .pdf, .svg)"
    flag("--plot", type=picture, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    if len(SIGNS) != len(MOVES):
        parser.error("SIGNS must hold a sign for each of MOVES")
    num_blocks = math.ceil(args.total_timesteps / BLOCK)
    args.interval_blocks = math.ceil(num_blocks / args.num_intervals)
    args.num_intervals = math.ceil(num_blocks / args.interval_blocks)
    return args


# The algorithm, written for one run. `run` holds its flags. `run.seed` and the flags of `sweep`
# differ between runs, so they are traced: use them in arithmetic, not in shapes, Python loops or
# `if`. All other flags are Python values. (In `args`, which `main` has, swept flags are lists.)
#
# A metric is an entry of the dictionary that `train_step` returns. It is averaged up to the next
# progress line, printed if it is one number, and saved.


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
    """Return the next cell (the same at a wall), reward, and whether the goal is reached."""
    next_cell = jnp.clip(cell + jnp.array(MOVES)[action], 0, jnp.array(run.grid_size) - 1)
    terminated = is_goal(run, next_cell)
    return next_cell, jnp.where(terminated, 1.0, 0.0), terminated


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
    values = state.q_table[row, column]  # (A,)
    explore, uniform = draws
    action = select_action(values, explore, uniform)
    next_cell, reward, terminated = env_step(run, state.cell, action)
    next_value = jnp.where(terminated, 0.0, jnp.max(state.q_table[*next_cell]))
    td_error = reward + run.gamma * next_value - values[action]
    # A table of integers would round all updates to 0. With `astype`, its type changes, which the
    # loop over steps refuses.
    q_table = state.q_table.astype(float)
    q_table = q_table.at[row, column, action].add(run.learning_rate * td_error)
    cell = jnp.where(terminated, start(run), next_cell)
    metrics = {"rewards": reward, "episodes": terminated}
    return state._replace(q_table=q_table, cell=cell), metrics


def train_block(run, state, _):
    """Take T steps. To draw their random numbers at once is faster than to draw in each step."""
    key, key_explore, key_uniform = jax.random.split(state.key, 3)
    explore = jax.random.bernoulli(key_explore, run.epsilon, BLOCK)
    draws = explore, jax.random.uniform(key_uniform, BLOCK)
    state, metrics = jax.lax.scan(partial(train_step, run), state._replace(key=key), draws)
    return state, jax.tree.map(partial(jnp.mean, axis=0), metrics)


def train_interval(run, state):
    """Train up to the next progress line. Also return what the line shows.

    Steps and rewards are divided by the number of episodes that ended; nan if none did.
    """
    state, metrics = jax.lax.scan(partial(train_block, run), state, length=run.interval_blocks)
    means = jax.tree.map(partial(jnp.mean, axis=0), metrics)
    episodes = means.pop("episodes")  # ended per step
    steps_per_episode = jnp.where(episodes > 0, 1 / episodes, jnp.nan)
    returns = means.pop("rewards") * steps_per_episode
    # Of this interval and run; `main` adds them up.
    timesteps = jnp.array(run.interval_blocks * BLOCK)
    return state, dict(
        timesteps=timesteps, returns=returns, steps_per_episode=steps_per_episode, **means
    )


def evaluate(run, state):
    """Results of a run: its table, and the greedy policy's steps from the start to the goal.

    The number of steps is inf if it never arrives. The policy is deterministic: among equal values
    it takes the first. If it is not at the goal after S steps, it has visited a cell twice, and
    never arrives.
    """
    greedy = jnp.argmax(state.q_table, axis=-1)  # (H, W)

    def step(cell, _):
        next_cell, _, terminated = env_step(run, cell, greedy[*cell])
        # The goal is asked for, too, in case you add other cells in which episodes end.
        return next_cell, (terminated, is_goal(run, next_cell))

    _, (ends, at_goal) = jax.lax.scan(step, start(run), length=greedy.size)  # (S,)
    last = jnp.argmax(ends)  # the first step that ends the episode; 0 if none does
    arrives = ends[last] & at_goal[last]
    return {
        "greedy_steps": jnp.where(arrives, last + 1.0, jnp.inf),
        "start_value": jnp.max(state.q_table[*start(run)]),
        "q_table": state.q_table,
    }


def grid_text(table):
    """Greedy actions and values of a table (H, W, A), a line per row; "." where all are 0."""
    values = table.max(axis=-1)
    signs = np.where(np.any(table, axis=-1), SIGNS[table.argmax(axis=-1)], ".")
    cells = np.char.add(signs, np.char.mod(" %.3f", values))
    return "\n".join("  ".join(row) for row in cells)


def report(learned):
    """Describe what the runs of a setting learned: the mean of their tables, and how they do.

    `main` first calls it with zeros, so that a mistake shows before training.
    """
    table, greedy_steps = learned["q_table"].mean(axis=0), learned["greedy_steps"]
    arrived = greedy_steps[np.isfinite(greedy_steps)]
    longest = f", in at most {arrived.max():.0f} steps" if len(arrived) else ""
    value = learned["start_value"].mean()
    reach = f"{len(arrived)} of {len(greedy_steps)} greedy agents reach the goal{longest}"
    text = f"value of the start {value:.5f}  {reach}"
    # A large table would fill pages. --plot draws it.
    return f"{text}\n{grid_text(table)}" if table.size < MAX_PRINTED else text


def draw(args, labels, results, learned):
    """Draw what --plot asks for: the mean table of each setting."""
    if args.plot:
        tables = [agents.mean(axis=0) for agents in np.split(learned["q_table"], len(labels))]
        plot(args.plot, labels, tables)


def main(argv=None):
    """Train, evaluate, save and report. Return what --save writes. Ctrl-C ends training early."""
    args = parse_args(argv)  # if None, those of the command line; in a notebook, call main([])
    flags_json = json.dumps(vars(args), default=as_json)
    columns, labels = settings_and_seeds(args)  # what differs between runs: {flag: (R,)}
    num_runs = len(columns["seed"])
    devices, at_once, padded = divide(args, columns)  # padded with copies, which `gather` cuts off
    over_runs = partial(vectorize, args=args, devices=devices, at_once=at_once)
    writes = jax.process_index() == 0  # in a job, only process 0 prints and writes
    show = partial(print, flush=True) if writes else lambda *_: None
    show(f"{num_runs} run{'s' * (num_runs > 1)} on {len(devices)} x {devices[0].device_kind}")
    # Trace everything, which tells the shapes and types of results; check them; compile.
    began = time.perf_counter()
    state = over_runs(init_state)(padded)  # init_state of all runs at once, on all devices
    train = over_runs(train_interval).lower(padded, state)
    finish = over_runs(evaluate).lower(padded, state)
    check_results(columns, state, *train.out_info, finish.out_info)
    try_report(finish.out_info, args.num_seeds)
    train, finish = train.compile(), finish.compile()
    compile_seconds = time.perf_counter() - began
    show(f"compiled in {compile_seconds:.1f} s")
    # Train up to one progress line after the other. Ctrl-C loses at most the one in progress.
    lines, num_lines, timesteps, stopped = [], 0, 0, None
    began = time.perf_counter()
    try:
        while num_lines < args.num_intervals:
            next_state, metrics = train(padded, state)
            line = flat(gather(metrics, num_runs))  # waits for train; Ctrl-C is raised here
            train_seconds = time.perf_counter() - began
            timesteps = timesteps + line["timesteps"].astype(np.int64)  # (R,) so far
            lines.append({**line, "timesteps": timesteps.copy()})
            state, num_lines = next_state, num_lines + 1  # Ctrl-C cannot come in between
            show(describe(lines[-1], train_seconds))
    except BaseException as error:  # Ctrl-C, or an error in a logger of yours, for example
        if args.distributed or num_lines == 0:
            raise
        stopped = error
        show(f"interrupted by {error!r}: evaluating what was learned up to line {num_lines}")
    # Evaluate, save, then report: so a mistake in a report or a figure loses nothing.
    results = {
        "args": flags_json,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": stopped is not None,
        **columns,  # (R,) each
    }
    results |= stack(lines[:num_lines], [*results, *flat(finish.out_info)])  # (K, R) each
    path = args.save if writes else None
    learned = evaluate_or_save(partial(finish, padded), state, num_runs, path, results)
    if any(x.dtype.kind in "fc" and np.isnan(x).any() for x in flat(learned).values()):
        show("warning: what was learned contains nan")
    results |= flat(learned)  # (R, ...) each
    save(path, results)
    for label, of_setting in zip(labels, split(learned, len(labels)), strict=True):
        show(f"{label}  {report(of_setting)}".strip())
    if writes:
        draw(args, labels, results, learned)
    if stopped is not None and not isinstance(stopped, KeyboardInterrupt):
        raise stopped  # what was learned is saved by now
    return results


RUNS_AT_ONCE = 1  # on a core of a CPU: updating several tables at once is slow there
COMPILER_OPTIONS = {}


def plot(path, labels, tables):
    """Draw values and greedy actions of tables (H, W, A), one for each label."""
    import matplotlib.style
    from matplotlib.figure import Figure

    shown = labels[:4]
    with matplotlib.style.context("default"):  # whatever a matplotlibrc says
        figure = Figure(figsize=(6, 1 + 3 * len(shown)), layout="constrained")
        if len(shown) < len(labels):
            figure.suptitle(f"the first {len(shown)} of {len(labels)} settings")
        panels = figure.subplots(len(shown), squeeze=False)[:, 0]
        for axes, label, table in zip(panels, labels, tables, strict=False):
            image = axes.imshow(table.max(axis=-1))
            figure.colorbar(image, label="max_a of the agents' mean Q")
            row, column = np.nonzero(np.any(table, axis=-1))
            down, to_right = MOVES[table.argmax(axis=-1)[row, column]].T
            if len(row):  # at least one arrow; rows count downwards, as angles="xy" knows
                axes.quiver(column, row, to_right, down, angles="xy", pivot="mid", color="white")
            axes.set_title(label)
        figure.savefig(path)


# From here on, nothing is about learning: the helpers of `parse_args` and `main`, the same in all
# learners.


def make_parser():
    """Make a parser, and functions that add a flag of one value, and a swept flag of several."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    swept = []
    parser.set_defaults(swept=swept)  # so args.swept has the names of all swept flags

    def sweep(name, **more):
        if more.get("type") is bool or "action" in more:  # bool("False") is True
            raise TypeError(f"{name}: to sweep it, use type=int, with 0 and 1")
        action = parser.add_argument(name, nargs="+", **more)
        swept.append(action.dest)

    return parser, parser.add_argument, sweep


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
    """Make an argparse type: a writable file with one of these endings."""

    def parse(path):
        target = path if os.path.lexists(path) else os.path.join(os.path.dirname(path), ".")
        if not path.endswith(endings) or os.path.isdir(path) or not os.access(target, os.W_OK):
            text = f"{path!r} is not a {' or '.join(endings)} file that can be written"
            raise argparse.ArgumentTypeError(text)
        return path

    return parse


def as_json(value):
    """Convert a flag that JSON does not know: an array to a list, anything else to text."""
    if hasattr(value, "tolist"):  # an array
        return value.tolist()
    return re.sub(" at 0x[0-9a-f]+", "", str(value))  # addresses differ each time


def settings_and_seeds(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and a label for each setting.
    """
    swept = {name: getattr(args, name) for name in args.swept}
    for name, values in swept.items():
        array = np.array(values)
        fits = array.dtype.kind in "bf" or (array.dtype.kind in "iu" and abs(array).max() < 2**31)
        if array.ndim != 1 or not fits:
            text = "a list of numbers; integers must be below 2^31"
            raise ValueError(f"{name} is swept, so it must be {text}. Else declare it by `flag`.")
    product = itertools.product(*swept.values())
    settings = [dict(zip(swept, values, strict=True)) for values in product]
    seeds = range(args.seed, args.seed + args.num_seeds)
    runs = [{**setting, "seed": seed} for setting in settings for seed in seeds]
    varied = [name for name, values in swept.items() if len(values) > 1]
    labels = [", ".join(f"{name} {setting[name]:.9g}" for name in varied) for setting in settings]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}, labels


def divide(args, columns):
    """Divide runs evenly among devices, and those of a CPU core into equal batches.

    For example, 300 runs on 16 cores are at most 19 on each. If 8 fit at once, that makes 3 batches
    of 7 on each core, so 336 runs: the last 36 are copies of the first, which `gather` cuts off.
    Return the devices, the runs in a batch, and the columns with the copies.
    """
    devices, num_batches, num_runs = jax.devices(), 1, len(columns["seed"])
    per_device = math.ceil(num_runs / len(devices))
    if not args.distributed:  # in a job, each process needs all of its devices
        devices = devices[: math.ceil(num_runs / per_device)]
    if devices[0].platform == "cpu":
        num_batches = math.ceil(per_device / RUNS_AT_ONCE)
    at_once = math.ceil(per_device / num_batches)
    length = len(devices) * num_batches * at_once
    padded = {name: np.resize(column, length) for name, column in columns.items()}
    return devices, at_once, padded


def make_run(args, own):
    """Make the flags of one run: those of all, with its own seed and values of swept flags."""
    return argparse.Namespace(**{**vars(args), **own})


def vectorize(function, args, devices, at_once):
    """Turn function(run, *arrays) of one run into a function of all runs, spread over devices.

    It takes what differs between runs, {flag: (R,)}, in place of `run`. The other arrays have a
    leading axis of runs.
    """

    def one_run(inputs):
        own, *arrays = inputs
        return function(make_run(args, own), *arrays)

    def one_device(*inputs):  # one batch of runs after the other, each batch vmapped
        return jax.lax.map(one_run, inputs, batch_size=at_once)

    mesh, axis = jax.sharding.Mesh(devices, "runs"), jax.P("runs")
    # Each device gets an equal part of the runs. check_vma would reject loops that start from
    # constants.
    spread = jax.shard_map(one_device, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS.get(devices[0].platform)
    return jax.jit(spread, compiler_options=options)


def take(tree, rows):
    """Take some rows of each array."""
    return jax.tree.map(lambda array: array[rows], tree)


def split(tree, parts):
    """Split the rows of each array into equal parts. Return a list of trees."""
    length = len(jax.tree.leaves(tree)[0]) // parts
    return [take(tree, slice(i * length, (i + 1) * length)) for i in range(parts)]


def gather(tree, length):
    """Copy arrays from all devices, in all processes, to the host. Keep the first `length` rows."""
    return take(process_allgather(tree, tiled=True), slice(length))


def flat(tree):
    """Make {name: array} of any tree. Names of nested arrays are joined, as in layer.kernel."""
    leaves = jax.tree.leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    if len(set(names)) < len(names):
        raise ValueError(f"two arrays have the same name: {sorted(names)}")
    return dict(zip(names, [leaf for _, leaf in leaves], strict=True))


def save(path, results):
    """Write {name: array}, if there is a path. Make its folder, in case you have changed it."""
    if path:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        np.savez(path, **results)


def check_results(more_names, state, next_state, *results):
    """Refuse, before compiling, what would fail later, or would be saved wrongly."""
    before, after = (jax.tree.map(lambda x: f"{x.dtype}{x.shape}", x) for x in (state, next_state))
    if before != after:
        raise TypeError(f"the state changes its shapes or types: {before} becomes {after}")
    arrays = [item for tree in results for item in flat(tree).items()]
    # The last two are parameters of np.savez.
    names = ["args", "compile_seconds", "train_seconds", "interrupted", "file", "allow_pickle"]
    names += [*more_names, *(name for name, _ in arrays)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rename one of the flags and results that have the name {name!r}")
    for name, array in arrays:
        if not isinstance(array.dtype, np.dtype) or array.dtype.kind not in "biufc":
            raise TypeError(f"{name!r} has the type {array.dtype}, which NumPy cannot save")


def evaluate_or_save(finish, state, num_runs, path, results):
    """Evaluate all runs. If that fails, or if Ctrl-C ends it, save the results and the state."""
    try:
        return gather(finish(state), num_runs)
    except BaseException:
        if jax.process_count() == 1:  # else, all processes would have to gather
            arrays = {f"state.{name}": x for name, x in flat(state).items()}
            arrays = {name: x for name, x in arrays.items() if isinstance(x.dtype, np.dtype)}
            save(path, {**results, **gather(arrays, num_runs)})
        raise


def try_report(learned, num_seeds):
    """Call `report` with zeros: a mistake in it shows now, not after training."""
    # Read-only, like the arrays that `gather` returns.
    zeros = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), learned)
    report(take(zeros, slice(num_seeds)))


def stack(lines, taken):
    """Stack the arrays of all lines: {name: (K, ...)}. A line may lack a name.

    What you have added to lines is kept in any case: a name that is taken gets a prefix, and arrays
    of different shapes get a name each.
    """
    stacked = {}
    for name in {name: None for line in lines for name in line}:
        arrays = [as_array(line[name]) for line in lines if name in line]
        # np.savez has parameters of the names file and allow_pickle.
        name = f"lines.{name}" if name in [*taken, "file", "allow_pickle"] else str(name)
        if len({array.shape for array in arrays}) == 1:
            stacked[name] = np.stack(arrays)
        else:
            stacked |= {f"{name}.{i}": array for i, array in enumerate(arrays)}
    return stacked


def as_array(value):
    """Convert to an array that NumPy can save: what holds no numbers and no text, to text."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # for example a key, or lists of different lengths
        return np.asarray(str(value))
    return np.asarray(str(value)) if array.dtype == object else array


def describe(line, seconds):
    """Describe an interval. Metrics are averaged over the runs in which they are not nan."""
    words = [f"step {line['timesteps'].mean():,.0f}"]
    for name, array in line.items():
        if name != "timesteps" and array.ndim == 1:  # one number for each run
            known = array[~np.isnan(array)]
            words.append(f"{name} {known.mean() if len(known) else np.nan:#.4g}")
            if 0 < len(known) < len(array):
                words.append(f"({len(known)} of {len(array)} runs)")
    return "  ".join([*words, f"{line['timesteps'].sum() / seconds:,.0f} steps/s"])


if __name__ == "__main__":
    sys.exit(130 if main()["interrupted"] else 0)  # 130 is the status after Ctrl-C
