# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0"]
# ///
"""Tabular Q-learning on a grid world: one agent or thousands, all of their training in one program.

An agent walks from the start to the goal; reaching it pays 1 and ends the episode. After each step (s, a, r, s')

    Q(s, a) <- Q(s, a) + alpha (target - Q(s, a)),    target = r + gamma max_a' Q(s', a'), or r where s' is the goal

(Watkins 1989; Sutton & Barto 2018, section 6.5), with epsilon-greedy actions, ties broken at random. The grid is
deterministic: Q*(s, a) = gamma^(d - 1) is known, where d is the length of the shortest path that begins with a.

    python gridworld_qlearning.py                                    # one agent, a million steps
    python gridworld_qlearning.py --num-seeds 30 --plot grid.png     # thirty agents, side by side in one program
Shapes: R agents, T steps, S = H * W cells, numbered row by row, A = 4 actions: right, down, left, up.
"""
import argparse, contextlib, json, math, os, resource, signal, sys, time
from functools import partial
from typing import NamedTuple


def number(kind, low, high, text):
    """An int or float (`kind`) from low to high, for argparse; 2e6 and 2_000_000 are whole numbers too."""
    with contextlib.suppress(ValueError):
        if low <= (value := float(text)) <= high and kind(value) == value:
            return kind(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole' if kind is int else 'a'} number in [{low:g}, {high:g}]")


def parse_args(argv=None):
    """Read and check the command line; what is wrong ends here, with one line and exit code 2."""
    parser = argparse.ArgumentParser(usage="%(prog)s [--flag value ...]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, count, share = parser.add_argument, partial(number, int, 1, 1e9), partial(number, float, 0, 1)
    place = dict(type=partial(number, int, 0, 1e9), nargs=2, metavar=("ROW", "COLUMN"))
    add("--seed", type=partial(number, int, 0, 2e9), default=0, help="seed of the first run; run i has seed + i")
    add("--num-seeds", type=count, default=1, help="independent agents, vmapped into one program")
    add("--grid-size", type=count, nargs=2, default=[8, 12], metavar=("ROWS", "COLUMNS"), help="size of the grid")
    add("--start", **place, help="where episodes begin (default: bottom right)")
    add("--goal", **place, default=[0, 0], help="where they end, with reward 1")
    add("--random-start", action="store_true", help="begin episodes anywhere but at the goal")
    add("--total-timesteps", type=count, default=1_000_000, help="steps per agent, in whole log intervals")
    add("--learning-rate", type=share, default=[0.1], nargs="+", help="alpha; several are run side by side")
    add("--gamma", type=share, default=0.9, help="discount factor")
    add("--epsilon", type=share, default=0.1, help="probability of a random action")
    add("--num-devices", type=partial(number, int, 1, 1024), default=1, help="devices that share the runs; CPU: cores")
    add("--num-processes", type=partial(number, int, 1, 1e5), default=1, help="processes, on any machines, each with --num-devices devices")
    add("--process-id", type=partial(number, int, 0, 1e5), help="which of them this is, from 0 (default: ask the cluster)")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens (default: ask the cluster)")
    add("--log-interval", type=count, default=100_000, help="steps per agent between progress lines, in thousands")
    add("--save", metavar="FILE.npz", help="write tables, learning curve and arguments, at each progress line")
    add("--evaluate", metavar="FILE.npz", help="do not train: show what --save wrote")
    add("--plot", metavar="FILE.png", help="draw values, greedy actions and the learning curve")
    add("--json", action="store_true", help="print the report as one line of JSON, progress to standard error")
    args = parser.parse_args(argv)
    (rows, columns), args.start = args.grid_size, args.start or [size - 1 for size in args.grid_size]
    args.runs, args.devices = args.num_seeds * len(args.learning_rate), args.num_devices * args.num_processes
    args.blocks = math.ceil(min(args.log_interval, args.total_timesteps) / BLOCK)  # per progress line
    if any(row >= rows or column >= columns for row, column in (args.start, args.goal)) or args.start == args.goal:
        parser.error(f"--start {args.start} and --goal {args.goal} must be two different cells of the {rows} x {columns} grid")
    if args.runs % args.devices or (args.process_id or 0) >= args.num_processes or (
            args.coordinator is not None and not args.coordinator.partition(":")[2].isdigit()):
        parser.error(f"all devices must divide the {args.runs} runs, --process-id be below --num-processes, --coordinator be HOST:PORT")
    if 4 * args.runs / args.num_processes * (8 * rows * columns + 4 * BLOCK) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        parser.error(f"{args.runs} tables of {rows} x {columns} cells need more memory than there is")
    for path, ending in (args.save, ".npz"), (args.plot, ".png"):
        with contextlib.suppress(OSError):
            if path is None or path[-4:] == ending and not os.path.isdir(path) and not os.remove(open(f"{path}.{os.getpid()}", "x").name):
                continue
        parser.error(f"cannot write {path!r}: it must be a file, end in {ending}, in a folder that can be written")
    return args


BLOCK = 1000  # steps whose random numbers are drawn at once: one by one they would cost most of the time
if __name__ == "__main__":  # before jax is imported, which takes seconds and then reads these settings
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing is learned yet
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    fast = " --xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"  # the loop over steps is one function
    os.environ |= dict(JAX_NUM_CPU_DEVICES=str((args := parse_args()).num_devices), XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + fast)
    if args.num_processes > 1:  # jax joins them into one program, and ends it where one of them is lost
        sys.stdout, _ = os.fdopen(os.dup(1), "w"), os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ours; jax's network layer prints, too
        sys.excepthook = lambda *error: os._exit(sys.stderr.write(f"processes cannot go on; saved so far: {args.save}; {error[1]}\n") > 0)
        import jax
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)

import jax, jax.experimental.multihost_utils as multihost, jax.numpy as jnp, numpy as np

SCRIPT = os.path.basename(__file__)


class GridWorld(NamedTuple):
    next_cell: jax.Array  # (S * A,) where action a leads from cell s: at A s + a
    starts: jax.Array  # (n,) the cells where an episode may begin
    goal: int


def make_grid_world(rows, columns, start, goal, random_start=False):
    """A grid of rows x columns; start and goal are (row, column). A move into a wall stays where it is."""
    row, column = np.divmod(np.arange(rows * columns)[:, None], columns)  # (S, 1)
    row, column = np.clip(row + [0, 1, 0, -1], 0, rows - 1), np.clip(column + [1, 0, -1, 0], 0, columns - 1)  # (S, A)
    start, goal = start[0] * columns + start[1], goal[0] * columns + goal[1]
    starts = np.delete(np.arange(rows * columns), goal) if random_start else np.array([start])
    return GridWorld(jnp.asarray(row * columns + column, jnp.int32).ravel(), jnp.asarray(starts, jnp.int32), goal)


def reset(world, bits):
    """The cell where an episode begins, chosen by 32 random bits."""
    return world.starts[bits % np.uint32(len(world.starts))]


def step(world, cell, action, bits):
    """One move: the cell to go on from (after a reset at the goal), the cell that was reached, reward, terminated."""
    next_cell = world.next_cell.at[4 * cell + action].get(mode="promise_in_bounds")
    terminated = next_cell == world.goal
    return jnp.where(terminated, reset(world, bits), next_cell), next_cell, jnp.where(terminated, 1.0, 0.0), terminated


class TrainState(NamedTuple):
    key: jax.Array
    learning_rate: jax.Array  # ()
    q_table: jax.Array  # (S * A,) flat: a gather of four neighbours, and a scatter of one number, are cheap
    cell: jax.Array  # ()
    episodes: jax.Array  # () finished so far


def action_values(q_table, cell):
    """Q(cell, .) (A,)."""
    return q_table.at[4 * cell + jnp.arange(4)].get(mode="promise_in_bounds")


def select_action(values, bits, epsilon):
    """Epsilon-greedy with random tie-breaks, by 32 random bits: the first 20 say whether to explore, the last 12 which action."""
    candidates = ((bits >> 12) < round(epsilon * 2**20)) | (values == jnp.max(values))  # (A,) all four to explore
    order = jnp.cumsum(candidates.astype(jnp.uint32))
    return jnp.sum(order <= (bits % 4096) * order[-1] // 4096)  # the candidates are equally likely, to 1 in 4096


def q_step(args, world, state, bits):
    """One step of the agent in its world, and the update that follows from it; bits (1 or 2,) are random uint32."""
    values = action_values(state.q_table, state.cell)
    action = select_action(values, bits[0], args.epsilon)
    cell, next_cell, reward, terminated = step(world, state.cell, action, bits[-1])
    target = reward + args.gamma * jnp.where(terminated, 0.0, jnp.max(action_values(state.q_table, next_cell)))
    value = values[action] + state.learning_rate * (target - values[action])
    q_table = state.q_table.at[4 * state.cell + action].set(value, mode="promise_in_bounds")
    return state._replace(q_table=q_table, cell=cell, episodes=state.episodes + terminated), None


def init_state(args, world, seed, learning_rate):
    """The state in which the agent with this seed starts, its table zero."""
    key, key_reset = jax.random.split(jax.random.key(seed))
    return TrainState(key, learning_rate, jnp.zeros(len(world.next_cell)), reset(world, jax.random.bits(key_reset)), jnp.int32(0))


def train_chunk(args, world, state):
    """Make all steps up to the next progress line; a second random word a step only where the start is random."""
    def block(state, key):
        return jax.lax.scan(partial(q_step, args, world), state, jax.random.bits(key, (BLOCK, 1 + args.random_start)))
    keys = jax.random.split(state.key, args.blocks + 1)
    return jax.lax.scan(block, state._replace(key=keys[0]), keys[1:])[0]


def greedy_path_lengths(args, q_table):
    """Steps from start to goal (R,) along the greedy actions of tables (R, H, W, A); NaN where these never get there."""
    world = make_grid_world(*args.grid_size, args.start, args.goal)
    greedy = q_table.reshape(len(q_table), -1, 4).argmax(axis=-1)  # (R, S)
    cell, lengths = np.full(len(q_table), world.starts[0]), np.full(len(q_table), np.nan)
    for length in range(1, greedy.shape[1]):
        cell = np.asarray(world.next_cell)[4 * cell + greedy[np.arange(len(cell)), cell]]
        lengths[np.isnan(lengths) & (cell == world.goal)] = length
    return lengths


def over_runs(function, num_devices, **jit_options):
    """Compile `function` of one run for all runs: vmapped, and sharded over the devices."""
    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=jax.P("runs"), out_specs=jax.P("runs"), check_vma=False)
    return jax.jit(sharded, **jit_options)


def train(args, say, interrupted):
    """Train every agent; returns what --save writes, run axis first, and if Ctrl-C cut it short."""
    began = time.perf_counter()
    seed = np.tile(args.seed + np.arange(args.num_seeds, dtype=np.uint32), len(args.learning_rate))
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)
    world = make_grid_world(*args.grid_size, args.start, args.goal, args.random_start)
    state = over_runs(partial(init_state, args, world), args.devices)(seed, learning_rate)
    chunk = over_runs(partial(train_chunk, args, world), args.devices, donate_argnums=0).lower(state).compile()
    say(f"compiled in {(start := time.perf_counter()) - began:.1f} s")
    curve, timesteps, episodes, ctrl_c = {}, 0, np.zeros(len(seed), int), np.zeros(1)
    while timesteps < args.total_timesteps and not ctrl_c.any():
        state, before, timesteps = jax.block_until_ready(chunk(state)), episodes, timesteps + args.blocks * BLOCK
        q_table, episodes, ctrl_c = multihost.process_allgather((state.q_table, state.episodes, np.array([len(interrupted)])), tiled=True)
        curve[timesteps] = args.blocks * BLOCK / np.where(episodes > before, episodes - before, np.nan)
        seconds, steps = time.perf_counter() - start, timesteps * len(seed)
        speed = f"{steps / seconds / 1e6:.1f} M steps/s"
        say(f"step {timesteps:>11,}  steps per episode {spread(curve[timesteps])}  episodes {episodes.sum():>9,}  {speed}")
        result = dict(seed=seed, learning_rate=learning_rate, q_table=q_table.reshape(len(seed), *args.grid_size, 4), timesteps=steps,
            curve_timesteps=np.array(list(curve)), curve_steps_per_episode=np.array(list(curve.values())).T,
            seconds_to_compile=start - began, seconds_to_run=seconds, steps_per_second=steps / seconds)
        if args.save and jax.process_index() == 0:
            write_file(args.save, partial(np.savez, args=json.dumps(vars(args)), **result))
    say(f"{steps:,} steps in {seconds:.2f} s after compiling, {speed}")
    return result, ctrl_c.any()


def load(args):
    """Read what --save wrote, and set the arguments that go with it; raises whatever another file leads to."""
    result = dict(np.load(args.evaluate, allow_pickle=False))
    saved, args.runs = json.loads(str(result["args"])), len(result["curve_steps_per_episode"])
    vars(args).update({name: saved[name] for name in ("grid_size", "start", "goal", "gamma")})
    result["q_table"] = result["q_table"].reshape(args.runs, *args.grid_size, 4)
    return result


def write_file(path, write):
    """Let `write` fill a temporary file beside `path`, then move it there: the file is whole or not there at all."""
    write(temporary := f"{path[:-4]}.{os.getpid()}{path[-4:]}")
    os.replace(temporary, path)


def spread(values, digits=1):
    """The mean of the known values, as text; of several also the least and the greatest; "-" for none."""
    known = np.asarray(values)[~np.isnan(values)]
    bounds = f" [{known.min():,.{digits}f}, {known.max():,.{digits}f}]" if len(known) > 1 else ""
    return f"{known.mean():,.{digits}f}{bounds}" if len(known) else "-"


def plot(args, result, signs):
    """Draw max_a Q with the greedy actions, and steps per episode against steps: the mean over agents and the band of all."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    figure.colorbar(left.imshow(result["q_table"].mean(axis=0).max(axis=-1)), ax=left, label="max_a Q of the mean over agents")
    for (row, column), sign in np.ndenumerate(signs):
        left.text(column, row, sign, ha="center", va="center", color="white")
    curves = np.ma.masked_invalid(result["curve_steps_per_episode"])
    right.plot(result["curve_timesteps"], curves.mean(axis=0))
    right.fill_between(result["curve_timesteps"], curves.min(axis=0), curves.max(axis=0), alpha=0.2)
    right.set(xlabel="steps per agent", ylabel="steps per episode")
    write_file(args.plot, partial(figure.savefig, dpi=120))


def main(argv=None):
    """Train or load, show, report; exit code 130 after Ctrl-C."""
    args = parse_args(argv)
    interrupted = []  # by Ctrl-C: the chunk under way ends, the report follows; a second Ctrl-C ends the program
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    if args.evaluate is not None:  # what goes wrong from here on is due to that file
        sys.excepthook = lambda *error: sys.stderr.write(f"{args.evaluate!r} is not what --save of this script wrote: {error[1]!r}\n")
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True) if jax.process_index() == 0 else lambda text: None
    device, saved = jax.devices()[0].device_kind, load(args) if args.evaluate is not None else None
    say(f"{SCRIPT}: grid {args.grid_size}, agents: {args.runs}, device: {args.devices} x {device}")
    result, stopped = (saved, False) if saved else train(args, say, interrupted)
    mean = result["q_table"].mean(axis=0)
    signs = np.where(mean.max(axis=-1) > 0, np.array(list(">v<^"))[mean.argmax(axis=-1)], ".")  # . where all values are 0
    signs[*args.goal] = "G"
    for values, row in zip(mean.max(axis=-1), signs):
        say("  " + " ".join(f"{value:.3f}" for value in values) + "    " + " ".join(row))
    shortest = abs(args.start[0] - args.goal[0]) + abs(args.start[1] - args.goal[1])
    lengths, values = greedy_path_lengths(args, result["q_table"]), result["q_table"].max(axis=-1)[:, *args.start]
    table = dict(seed=result["seed"], learning_rate=result["learning_rate"], path_length=lengths, start_value=values)
    for rate in np.unique(result["learning_rate"]):
        of = result["learning_rate"] == rate
        say(f"learning rate {rate:g}: greedy path {spread(lengths[of])} steps, the shortest {shortest}: {(lengths[of] == shortest).sum()} "
            f"of {of.sum()} agents; value of the start {spread(values[of], 5)}, exactly {args.gamma ** (shortest - 1):.5f}")
    if args.plot and jax.process_index() == 0:
        plot(args, result, signs)
    if args.json and jax.process_index() == 0:
        print(json.dumps(dict(script=SCRIPT, env="GridWorld", args=vars(args), device=device, num_devices=args.devices,
            versions=dict(python=sys.version.split()[0], jax=jax.__version__), shortest_path=shortest,
            **{name: float(result[name]) for name in ("seconds_to_compile", "seconds_to_run", "timesteps", "steps_per_second")},
            peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            runs=[{name: None if x != x else x for name, x in zip(table, row)} for row in zip(*map(np.ndarray.tolist, table.values()))])))
    sys.exit(130 if interrupted or stopped else 0)


if __name__ == "__main__":
    main()
