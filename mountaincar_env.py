# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0"]
# ///
"""An environment in pure JAX, MountainCar-v0, and its rollout over every core, device and machine: one program.

A car too weak for the hill must swing back first (Moore 1990; Sutton & Barto 2018, example 10.1). By action a, 0, 1 or 2,

    velocity <- clip(velocity + (a - 1) force - gravity cos(3 position)),    position <- clip(position + velocity)

`reset` and `step` are pure functions of one environment, with gymnax's interface. N counts environments, T steps.

    python mountaincar_env.py --num-devices 2                                   # 10^9 random steps
    python mountaincar_env.py --policy rocking --plot cars.png --gif car.gif    # a policy that gets there
"""
import argparse, contextlib, json, math, os, resource, shutil, signal, sys, threading, time
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
    add, count = parser.add_argument, partial(number, int, 1, 1e12)
    add("--seed", type=partial(number, int, 0, 2e9), default=0, help="everything random derives from it")
    add("--num-envs", type=partial(number, int, 1, 1e9), default=4096, help="environments, vmapped into one program")
    add("--total-timesteps", type=count, default=1_000_000_000, help="steps of all environments, in whole log intervals")
    add("--policy", choices=["random", "rocking"], default="random", help="any action, or: push the way the car moves")
    add("--num-devices", type=partial(number, int, 1, 1024), default=1, help="devices that share the work; CPU: cores")
    add("--log-interval", type=count, default=200_000_000, help=f"steps between progress lines, {BLOCK} per environment or a multiple")
    add("--num-processes", type=partial(number, int, 1, 1e5), default=1, help="processes, on any machines, each with --num-devices devices")
    add("--process-id", type=partial(number, int, 0, 1e5), help="which of them this is, from 0 (default: ask the cluster)")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens (default: ask the cluster)")
    add("--timeout", type=partial(number, int, 1, 1e5), default=60, help="seconds to wait for a process that is missing")
    add("--save", metavar="FILE.npz", help="keep every step and write it: arrays of shape (T, N)")
    add("--plot", metavar="FILE.png", help="draw ten episodes, velocity against position")
    add("--gif", metavar="FILE.gif", help="draw one episode as a film")
    add("--json", action="store_true", help="print the report as one line of JSON, progress to standard error")
    args = parser.parse_args(argv)
    if (args.process_id or 0) >= args.num_processes or args.num_envs % (args.num_devices * args.num_processes) or (
            args.coordinator is not None and not args.coordinator.partition(":")[2].isdigit()):
        parser.error("--num-envs must be a multiple of all devices, --process-id below --num-processes, --coordinator HOST:PORT")
    for path, ending in (args.plot, ".png"), (args.gif, ".gif"), (args.save, ".npz"):
        with contextlib.suppress(OSError):
            if path is None or path[-4:] == ending and not os.path.isdir(path) and not os.remove(open(f"{path}.{os.getpid()}", "x").name):
                continue
        parser.error(f"cannot write {path!r}: it must be a file, end in {ending}, in a folder that can be written")
    args.blocks = math.ceil(min(args.log_interval, args.total_timesteps, 1e7 * args.num_envs) / (BLOCK * args.num_envs))
    size = 30 * (args.total_timesteps + args.blocks * BLOCK * args.num_envs) if args.save else 0  # bytes, at most
    memory = args.num_envs * (400 + 8 * args.blocks) + 3 * size  # states, keys and random words; what is saved, and copies
    free = shutil.disk_usage(os.path.dirname(args.save or "") or ".").free
    if memory > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") or size > free:
        parser.error(f"this needs {memory / 2**30:.1f} GiB of memory and {size / 2**30:.1f} GiB of disk, more than there is")
    return args


def within(seconds, function, *args, **options):
    """Call a function that waits for the other processes; where one is missing or lost, this one ends, with exit code 1."""
    give_up = lambda error: os._exit(print(f"{SCRIPT}: another process is missing:", error, file=sys.stderr, flush=True) or 1)
    (timer := threading.Timer(seconds, give_up, [f"waited for {seconds} s"])).start()
    try:
        return function(*args, **options)
    except Exception as error:
        give_up(str(error).partition("\n")[0])
    finally:
        timer.cancel()


SCRIPT = os.path.basename(__file__)
BLOCK = (WORDS := 25) * (ACTIONS := 8)  # steps for which random words are drawn at once; actions that a word decides
if __name__ == "__main__":  # before jax is imported, which takes seconds and then reads these settings
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing is learned yet
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = parse_args()
    os.environ["JAX_NUM_CPU_DEVICES"] = str(args.num_devices)
    fast = "--xla_cpu_prefer_vector_width=512 --xla_disable_hlo_passes=cpu-parallel-task-assigner "  # not split over cores
    fast += "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000 "  # a loop is one function
    os.environ["XLA_FLAGS"] = fast + os.environ.get("XLA_FLAGS", "")
    if args.num_processes > 1:
        sys.stdout, _ = os.fdopen(os.dup(1), "w"), os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ours; jax's network layer prints, too
        import jax
        where = args.coordinator, args.num_processes, args.process_id
        within(args.timeout, jax.distributed.initialize, *where, initialization_timeout=2 * args.timeout)

import gymnax, jax, jax.experimental.multihost_utils as multihost, jax.numpy as jnp, numpy as np


class EnvParams(NamedTuple):
    """The unit of length is the position's, that of time a step. From Sutton & Barto (2018), example 10.1, or (G) Gymnasium."""
    min_position: float = -1.2  # length; a wall
    max_position: float = 0.6  # length; where the track ends, beyond the goal (G)
    max_speed: float = 0.07  # length / step
    goal_position: float = 0.5  # length
    goal_velocity: float = 0.0  # length / step; the least with which to arrive (G)
    force: float = 0.001  # length / step^2; of the engine
    gravity: float = 0.0025  # length / step^2; times the slope, cos(3 position)
    max_steps_in_episode: int = 200  # steps; the time limit (G)


class EnvState(NamedTuple):
    position: jax.Array  # ()
    velocity: jax.Array  # ()
    time: jax.Array  # () steps since the start of the episode


def cosine(x):
    """cos(x) = 2 cos(x / 2)^2 - 1, cos(x / 2) by its Taylor series: XLA's own is not vectorized on a CPU, three times slower."""
    half = x / 2 - jnp.pi * jnp.round(x / (2 * jnp.pi))  # in [-pi / 2, pi / 2]: pi is a period of the square
    terms = range(7 if x.dtype == jnp.float32 else 12)  # as many as change a digit
    return 2 * jnp.polyval(np.array([(-1) ** k / math.factorial(2 * k) for k in terms[::-1]], x.dtype), half**2) ** 2 - 1


def start(fraction):
    """The state in which an episode begins, for a fraction drawn from [0, 1): at rest, at -0.6 to -0.4 (Sutton & Barto)."""
    return EnvState(-0.6 + 0.2 * fraction, jnp.zeros_like(fraction), jnp.int32(0))


def step_from(begin, state, action, params):
    """One step; where it ends the episode, the next begins in the state `begin`. Returns the six values of `step`."""
    velocity = state.velocity + (action - 1) * params.force - params.gravity * cosine(3 * state.position)
    velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
    position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
    velocity = jnp.where((position == params.min_position) & (velocity < 0), 0.0, velocity)  # the wall stops the car
    reached = EnvState(position, velocity, state.time + 1)
    terminated = (position >= params.goal_position) & (velocity >= params.goal_velocity)
    truncated = reached.time >= params.max_steps_in_episode
    next_state = jax.tree.map(partial(jnp.where, terminated | truncated), begin, reached)
    info = dict(terminated=terminated, truncated=truncated, final_observation=jnp.stack(reached[:2], -1), discount=1.0 - terminated)
    return jnp.stack(next_state[:2], -1), next_state, jnp.full_like(position, -1.0), terminated, truncated, info


def reset(key, params=EnvParams()):
    """Begin an episode; returns the observation (2,), position and velocity, and the state."""
    state = start(jax.random.uniform(key))
    return jnp.stack(state[:2], -1), state


def step(key, state, action, params=EnvParams()):
    """One step, and after the last of an episode a reset by `key`: obs, state, reward, terminated, truncated, info."""
    return step_from(reset(key, params)[1], state, action, params)


class MountainCar:
    """What gymnax.make("MountainCar-v0") returns first: use `env, env_params = MountainCar(), EnvParams()` in its place."""
    name, num_actions, default_params = "MountainCar-v0", 3, EnvParams()
    reset, step = staticmethod(jax.jit(reset)), staticmethod(jax.jit(step))
    action_space = staticmethod(lambda params=None: gymnax.environments.spaces.Discrete(3))  # push left, not at all, right
    observation_space = staticmethod(lambda params=EnvParams(): gymnax.environments.spaces.Box(
        jnp.array([params.min_position, -params.max_speed]), jnp.array([params.max_position, params.max_speed]), (2,), jnp.float32))


def env_step(args, begin, carry, _):
    """Act and step; returns what --save keeps, and the return of an episode that ended, else NaN."""
    state, episode_return, word = carry
    digit = (word > np.uint32(2**32 // 3)).astype(jnp.int32) + (word > np.uint32(2**33 // 3))  # the first to base 3, of word / 2^32
    action = digit if args.policy == "random" else jnp.where(state.velocity < 0, 0, 2)
    _, next_state, reward, terminated, truncated, info = step_from(begin, state, action, EnvParams())
    done, episode_return = terminated | truncated, episode_return + reward
    kept = info | dict(obs=jnp.stack(state[:2], -1), action=action, reward=reward)
    return (next_state, jnp.where(done, 0.0, episode_return), word * 3), (kept, jnp.where(done, episode_return, jnp.nan))


def rollout(args, key, state, episode_return):
    """Make all steps up to the next progress line; returns also the totals (4,) and, with --save, arrays (T, ...)."""
    def eight_steps(carry, word):
        state, episode_return, totals = carry
        begin = start(((word * 3**ACTIONS) >> 8) * 2.0**-24)  # from the rest of the word: in eight steps no second episode ends
        (state, episode_return, _), (kept, returns) = jax.lax.scan(
            partial(env_step, args, begin), (state, episode_return, word), length=ACTIONS)
        ended, returns = ~jnp.isnan(returns), jnp.nan_to_num(returns).astype(jnp.int32)  # whole numbers: their sums are exact
        new = jnp.stack([x.sum(dtype=jnp.int32) for x in (ended, kept["terminated"], returns, returns**2)])
        return (state, episode_return, totals + new), kept if args.save else None
    def block(carry, key):
        return jax.lax.scan(eight_steps, carry, jax.random.bits(key, (WORDS,), "uint32"))
    keys = jax.random.split(key, args.blocks + 1)
    (state, episode_return, totals), kept = jax.lax.scan(block, (state, episode_return, jnp.zeros(4, jnp.int32)), keys[1:])
    return (keys[0], state, episode_return), totals, jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), kept)


def init(args, index):
    """Key, state and return of the episode so far (0) with which environment number `index` starts."""
    key, key_reset = jax.random.split(jax.random.fold_in(jax.random.key(args.seed), index))
    return key, reset(key_reset)[1], jnp.zeros(())


def write_file(path, write):
    """Let `write` fill a temporary file beside `path`, then move it there: the file is whole or not there at all."""
    write(temporary := f"{path[:-4]}.{os.getpid()}{path[-4:]}")
    os.replace(temporary, path)


def draw(args):
    """Draw --plot, velocity against position in ten episodes, and --gif, the first of them as gymnax renders it."""
    one_block = argparse.Namespace(**vars(args) | dict(save=True, blocks=1))  # as long as an episode can be
    kept = jax.jit(jax.vmap(lambda index: rollout(one_block, *init(args, index))[2]))(jnp.arange(10))  # (10, T, ...)
    lengths = 1 + jnp.argmax(kept["terminated"] | kept["truncated"], axis=1)
    paths = [np.append(obs[:1], reached[:n], axis=0) for obs, reached, n in zip(kept["obs"], kept["final_observation"], lengths)]
    if args.plot:
        from matplotlib.figure import Figure
        axes = Figure(figsize=(7, 4), layout="constrained").subplots()
        axes.plot(*[axis for path in paths for axis in path.T], linewidth=1)
        axes.axvline(EnvParams().goal_position, color="gray", linestyle=":")
        axes.set(title=f"{SCRIPT}, {args.policy} policy: ten episodes, and the goal", xlabel="position", ylabel="velocity, per step")
        write_file(args.plot, partial(axes.figure.savefig, dpi=150))
    if args.gif:
        os.environ |= dict(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", MPLBACKEND="agg")
        from gymnax.visualize import Visualizer
        states, returns = [EnvState(*obs, t) for t, obs in enumerate(paths[0])], -np.arange(len(paths[0]))
        write_file(args.gif, Visualizer(MountainCar(), EnvParams(), states, returns).animate)


def main(argv=None):
    """Roll out, save, draw, report; exit code 130 after Ctrl-C."""
    args = parse_args(argv)
    interrupted = []  # by Ctrl-C: the chunk under way ends, the report follows; a second Ctrl-C ends the program
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    first, num_devices, device = jax.process_index() == 0, args.num_devices * jax.process_count(), jax.devices()[0].device_kind
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True) if first else lambda text: None
    say(f"{SCRIPT}: MountainCar-v0, environments: {args.num_envs}, policy: {args.policy}, device: {num_devices} x {device}")
    began, mesh = time.perf_counter(), jax.make_mesh((num_devices,), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    over_envs = partial(jax.shard_map, mesh=mesh, in_specs=jax.P("envs"), out_specs=jax.P("envs"), check_vma=False)
    carry = jax.jit(over_envs(jax.vmap(partial(init, args))))(np.arange(args.num_envs))
    chunk = jax.jit(over_envs(jax.vmap(partial(rollout, args))), donate_argnums=(0, 1, 2)).lower(*carry).compile()
    compiled = time.perf_counter()
    say(f"compiled in {compiled - began:.1f} s")
    totals, timesteps, chunks, stop = np.zeros(4, int), 0, [], np.zeros(1)
    while timesteps < args.total_timesteps and not stop.any():  # a Ctrl-C in one process stops all
        carry, *out = jax.block_until_ready(chunk(*carry))
        new, kept, stop = within(args.timeout, multihost.process_allgather, (*out, np.array([len(interrupted)])), tiled=True)
        totals, timesteps = totals + new.sum(axis=0, dtype=int), timesteps + args.blocks * BLOCK * args.num_envs
        chunks, seconds = [*chunks, kept], time.perf_counter() - compiled
        goals, mean, square = totals[1:] / max(totals[0], 1)
        row = dict(seed=args.seed, episodes=int(totals[0]), goal_share=goals, return_mean=mean, return_std=math.sqrt(square - mean**2))
        say(f"step {timesteps:>14,}  episodes {row['episodes']:>11,}  return {mean:.1f} +- {row['return_std']:.1f}  "
            f"at the goal {goals:.1%}  {timesteps / seconds / 1e6:.1f} M steps/s")
    if first and args.save:
        arrays = {name: np.concatenate([kept[name] for kept in chunks], axis=1).swapaxes(0, 1) for name in kept}  # (T, N, ...)
        write_file(args.save, partial(np.savez, args=json.dumps(vars(args)), **arrays))
    if first and (args.plot or args.gif):
        draw(args)
    if first and args.json:
        print(json.dumps(dict(
            script=SCRIPT, env="MountainCar-v0", args=vars(args), device=device, num_devices=num_devices, timesteps=timesteps, runs=[row],
            versions=dict(python=sys.version.split()[0], jax=jax.__version__), seconds_to_compile=compiled - began, seconds_to_run=seconds,
            steps_per_second=timesteps / seconds, peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
    sys.exit(130 if interrupted or stop.any() else 0)


if __name__ == "__main__":
    main()
