# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "gymnax[visualize]==1.0.1", "six==1.17.0"]
# ///
"""How to write an environment in pure JAX: MountainCar-v0, and its rollout on all devices.

A car is too weak to drive straight up a hill. It must first swing back and forth to gain speed
(Moore 1990; Sutton & Barto 2018, example 10.1). Action a is 0 (push left), 1 (do not push) or
2 (push right). Every step has reward -1, until the car reaches the goal on top of the hill. This is
a step:

    velocity <- velocity + (a - 1) force - gravity cos(3 position),    at most max_speed either way
    position <- position + velocity,    from wall to wall, and velocity <- 0 at the left wall

    python mountaincar_env.py --policy rocking    # this policy reaches the goal
    python mountaincar_env.py                     # random actions do not

To write another environment, change EnvParams, EnvState, the class and `choose_action`.

Shapes: N = num_envs cars, K intervals, M = interval_episodes episodes of a car in each
interval, T steps (the time limit).

Read down to the end of `main`: first comes the environment, for one car, then the flags, then the
rollout of one car, then `main`, which runs it. What follows `main` is not about environments.
"""

import argparse
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
# Compile the loop over steps into one function: 1.4 to 1.9 times as fast.
LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
os.environ["XLA_FLAGS"] = LOOPS + " " + os.environ.get("XLA_FLAGS", "")  # the user's flags win
import jax

if __name__ == "__main__" and "--distributed" in sys.argv:
    jax.distributed.initialize()  # before gymnax is imported, because gymnax creates arrays

import jax.numpy as jnp
import numpy as np
from flax import struct  # gymnax depends on it
from gymnax.environments import environment, spaces
from jax.experimental.multihost_utils import process_allgather

MAX_SAVED = 1e8  # steps; they are in memory twice while they are joined


@struct.dataclass
class EnvParams(environment.EnvParams):
    """Constants of Sutton & Barto, or Gymnasium's (G). The unit of length is that of position."""

    min_position: float = -1.2  # length; a wall
    max_position: float = 0.6  # length; the end of the track, beyond the goal (G)
    max_speed: float = 0.07  # length / step
    goal_position: float = 0.5  # length
    goal_velocity: float = 0.0  # length / step; a slower car does not terminate (G)
    force: float = 0.001  # length / step^2; of the engine
    gravity: float = 0.0025  # length / step^2; times cos(3 position), the slope
    max_steps_in_episode: int = 200  # steps; the time limit (G)


@struct.dataclass
class EnvState(environment.EnvState):
    """The state of a car. The base class adds `time`: steps since the start."""

    position: jax.Array  # length
    velocity: jax.Array  # length / step


def cosine(x):
    """cos(x) by Taylor's series around the nearest multiple of 2 pi, with an error below 1e-6.

    With it, a rollout is twice as fast as with jnp.cos, which is the ordinary choice.
    """
    x = x - 2 * jnp.pi * jnp.round(x / (2 * jnp.pi))
    series = [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)]
    return jnp.polyval(np.array(series, x.dtype), x**2)


class MountainCar(environment.Environment):
    """A gymnax environment.

    A class needs num_actions, default_params (without it, gymnax's time limit is 1 step), step_env,
    reset_env and the two spaces; `name` and is_terminated are customary. A continuous action
    arrives with the shape of its space: Box(low, high, ()) gives a number, Box(low, high, (1,)) an
    array. `play` below calls step_env up to max_steps_in_episode times. Learners call `step` of the
    base class: it applies the time limit, so step_env must add 1 to `time`, and it resets an
    episode that ended.
    """

    name = "MountainCar-v0"
    num_actions = 3
    default_params = EnvParams()

    def step_env(self, key, state, action, params):
        """Step once. Return observation, state, reward, terminated and info."""
        slope = cosine(3 * state.position)
        velocity = state.velocity + (action - 1) * params.force - params.gravity * slope
        velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
        position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
        hits_wall = (position == params.min_position) & (velocity < 0)
        velocity = jnp.where(hits_wall, 0.0, velocity)
        state = EnvState(position=position, velocity=velocity, time=state.time + 1)
        obs = self.observe(key, state, action, params)
        return obs, state, jnp.array(-1.0), self.is_terminated(state, params), {}

    def reset_env(self, key, params):
        """Start an episode: at rest in [-0.6, -0.4). Return observation and state."""
        position = jax.random.uniform(key, minval=-0.6, maxval=-0.4)
        state = EnvState(position=position, velocity=jnp.array(0.0), time=jnp.array(0))
        # If observations were random, `key` would have to be split: it has been used.
        return self.observe(key, state, None, params), state

    def observe(self, key, state, action, params):
        """Return the observation (2,) of a state that `action` led to (None at the start)."""
        return jnp.stack([state.position, state.velocity])

    def is_terminated(self, state, params):
        """Return whether the car is at the goal and does not roll back."""
        return (state.position >= params.goal_position) & (state.velocity >= params.goal_velocity)

    def action_space(self, params=None):
        """Return the space of actions: 0, 1 and 2."""
        return spaces.Discrete(self.num_actions)

    def observation_space(self, params):
        """Return the space of observations."""
        low = jnp.array([params.min_position, -params.max_speed])
        high = jnp.array([params.max_position, params.max_speed])
        return spaces.Box(low, high, (2,))


ENV = MountainCar()
PARAMS = ENV.default_params


def parse_args(argv=None):
    """Read and check the flags."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    flag, count = parser.add_argument, number(int, 1, 1e6)
    flag("--seed", type=number(int, 0, 2e9), default=0, help="seed of car 0; car i uses seed + i")
    text = "episodes of each car, rounded up to equal intervals"
    flag("--num-episodes", type=count, default=500, help=text)
    flag("--num-intervals", type=count, default=5, help="progress lines, at most")
    flag("--num-envs", type=count, default=4096, help="cars stepped in lockstep")
    text = "rocking pushes in the direction of motion"
    flag("--policy", choices=["random", "rocking"], default="random", help=text)
    text = "join the processes of a Slurm or Open MPI 4 job"
    flag("--distributed", action="store_true", help=text)
    text = f"write all steps, if they are at most {MAX_SAVED:g} (.npz)"
    flag("--save", type=output(".npz"), metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    args.interval_episodes = math.ceil(args.num_episodes / args.num_intervals)
    args.num_intervals = math.ceil(args.num_episodes / args.interval_episodes)
    num_steps = PARAMS.max_steps_in_episode * args.num_intervals * args.interval_episodes
    if args.save and args.num_envs * num_steps > MAX_SAVED:
        parser.error(f"--save: at most {MAX_SAVED:g} steps; lower --num-envs or --num-episodes")
    return args


class Step(NamedTuple):
    """One step of an episode, or of the padding after it."""

    obs: jax.Array  # (2,)
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # (2,)
    terminated: jax.Array  # true if next_obs is terminal
    mask: jax.Array  # true if the step is real, false in the padding


def choose_action(run, obs, uniform):
    """Choose an action, of the shape of its space. `uniform` is a random number in [0, 1)."""
    if run.policy == "rocking":
        return jnp.where(obs[1] < 0, 0, 2)
    return (ENV.num_actions * uniform).astype(int)


def play(run, key):
    """Play one episode. Return its totals and, for --save, its steps (T,), padded."""

    def step(carry, draws):
        obs, env_state, mask, totals = carry
        key, uniform = draws
        action = choose_action(run, obs, uniform)
        # Nothing is reset: after the goal, the car drives on, and that is the padding.
        next_obs, env_state, reward, terminated, _ = ENV.step_env(key, env_state, action, PARAMS)
        real = {"timesteps": mask, "returns": jnp.where(mask, reward, 0.0)}
        totals = jax.tree.map(jnp.add, totals, real)
        # Without --save, nothing is kept.
        kept = Step(obs, action, reward, next_obs, terminated, mask) if run.save else None
        return (next_obs, env_state, mask & jnp.logical_not(terminated), totals), kept

    key_reset, key_action, key_step = jax.random.split(key, 3)
    time_limit = int(PARAMS.max_steps_in_episode)
    uniform = jax.random.uniform(key_action, time_limit)  # (T,) faster than one draw in each step
    keys = jax.random.split(key_step, time_limit)  # XLA drops them if unused
    obs, env_state = ENV.reset_env(key_reset, PARAMS)
    carry = obs, env_state, jnp.array(True), {"timesteps": 0, "returns": 0.0}
    (_, env_state, mask, totals), steps = jax.lax.scan(step, carry, (keys, uniform))
    totals["terminations"] = ~mask
    totals["truncations"] = mask & ENV.is_truncated(env_state, PARAMS)
    return totals, steps


def init_state(run):
    """State in which a car starts: its key."""
    return jax.random.key(run.seed)


def rollout(run, key):
    """Play M episodes. Return the next key, what a progress line shows, and what --save keeps."""

    def episode(key, _):
        key, key_play = jax.random.split(key)
        return key, play(run, key_play)

    key, (totals, steps) = jax.lax.scan(episode, key, length=run.interval_episodes)  # (M, ...)
    return key, jax.tree.map(partial(jnp.sum, axis=0), totals), steps


def main(argv=None):
    """Roll out and report. Return what --save writes; without --save, no steps.

    Ctrl-C ends the rollout early, and keeps the intervals that are finished.
    """
    args = parse_args(argv)  # if None, those of the command line; in a notebook, call main([])
    flags_json = json.dumps(vars(args), default=as_json)
    seeds = {"seed": args.seed + np.arange(args.num_envs)}
    devices, at_once, padded = divide(args, seeds)  # padded with copies, which `gather` cuts off
    over_runs = partial(vectorize, args=args, devices=devices, at_once=at_once)
    writes = jax.process_index() == 0  # in a job, only process 0 prints and writes
    show = partial(print, flush=True) if writes else lambda *_: None
    show(f"{args.num_envs:,} x {ENV.name} on {len(devices)} x {devices[0].device_kind}")

    began = time.perf_counter()
    state = over_runs(init_state)(padded)
    roll = over_runs(rollout).lower(padded, state)
    check_results(["rollout_seconds", "episodes"], state, *roll.out_info)
    roll = roll.compile()
    compile_seconds = time.perf_counter() - began
    show(f"compiled in {compile_seconds:.1f} s")

    # history: metrics and steps of each interval
    history, timesteps, seconds, stopped = [], 0, 0.0, None
    try:
        for i in range(args.num_intervals):
            began = time.perf_counter()
            state, totals, steps = roll(padded, state)
            totals = gather(totals, args.num_envs)  # (N,); waits for roll; Ctrl-C is raised here
            seconds += time.perf_counter() - began
            if np.any(totals["terminations"] + totals["truncations"] != args.interval_episodes):
                raise ValueError(
                    "an episode did not end: step_env must add 1 to state.time,"
                    " and max_steps_in_episode must be a whole number"
                )
            timesteps = timesteps + totals["timesteps"].sum(dtype=np.int64)  # so far
            means = {name: x.mean(axis=0) / args.interval_episodes for name, x in totals.items()}
            episodes = (i + 1) * args.interval_episodes
            metrics = {**means, "episodes": episodes, "timesteps": timesteps}
            history.append((metrics, gather(steps, args.num_envs)))
            show(
                f"episode {episodes:,}  terminated {metrics['terminations']:.1%}"
                f"  return {metrics['returns']:.1f}  {timesteps / seconds / 1e6:.0f} M steps/s"
            )
    except BaseException as error:  # Ctrl-C, or an error of your own in this loop
        if args.distributed or not history:
            raise
        stopped = error
        episodes = history[-1][0]["episodes"]
        show(f"interrupted by {error!r}: the results are those up to episode {episodes:,}")

    metrics, steps = zip(*history, strict=True)
    results = {
        "args": flags_json,
        "compile_seconds": compile_seconds,
        "rollout_seconds": seconds,
        "interrupted": stopped is not None,
        **{name: np.stack([line[name] for line in metrics]) for name in metrics[0]},  # (K,)
    }
    if args.save:
        steps = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *steps)
        results = {**results, **flat(steps)}  # (N, episodes, T, ...) each
    if writes and args.save:
        save(args.save, results)
    if stopped is not None and not isinstance(stopped, KeyboardInterrupt):
        raise stopped  # what was rolled out is saved by now
    return results


RUNS_AT_ONCE = 256  # cars vmapped together on a core of a CPU; more would overflow its cache
COMPILER_OPTIONS = {
    "cpu": {
        "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.3 times as fast
    },
}


# From here on, nothing is about environments: the helpers of `parse_args` and `main`, as in the
# learners.


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


if __name__ == "__main__":
    sys.exit(130 if main()["interrupted"] else 0)  # 130 is the status after Ctrl-C
