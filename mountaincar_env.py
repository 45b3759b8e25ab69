# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "gymnax[visualize]==1.0.1", "six==1.17.0"]
# ///
"""How to write an environment in pure JAX: MountainCar-v0, and its rollout on all devices.

A car is too weak to drive straight up a hill. It must first swing back and forth to gain speed
(Moore 1990; Sutton & Barto 2018, example 10.1). Action a is 0 (push left), 1 (do not push) or
2 (push right). Every step has reward -1, until the car reaches the goal on top of the hill:

    velocity <- clip(velocity + (a - 1) force - gravity cos(3 position))
    position <- clip(position + velocity),    and velocity <- 0 at the left wall

    python mountaincar_env.py --policy rocking    # this policy reaches the goal
    python mountaincar_env.py                     # random actions do not

To write another environment, change EnvParams, EnvState, the class and `choose_action`.

Shapes: N = num_envs cars, K intervals, M = interval_episodes episodes of a car in each
interval, T steps (the time limit).

The environment comes first, for one car, then the flags, then the code that runs it on all devices.
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
# A command draws into files, with any backend. In a notebook, the user's backend stays.
if __name__ == "__main__" and "IPython" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"
# Compile the loop over steps into one function: rocking is 1.3 times as fast.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)
import jax

if "--distributed" in sys.argv:  # before gymnax is imported, because gymnax creates arrays
    jax.distributed.initialize()

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
    """cos(x) by Taylor's series around the nearest multiple of 2 pi: a rollout is twice as fast."""
    x = x - 2 * jnp.pi * jnp.round(x / (2 * jnp.pi))
    series = [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)]
    return jnp.polyval(np.array(series, x.dtype), x**2)


class MountainCar(environment.Environment):
    """A gymnax environment.

    A class needs num_actions, default_params (without it, gymnax's time limit is 1 step), step_env,
    reset_env and the two spaces; gymnax's own have name and is_terminated, too. A continuous action
    arrives with the shape of its space. `play` below calls step_env. Learners call `step` of the
    base class: it applies the time limit and resets an episode that ended.
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
        return self.observe(key, state, None, params), state  # with noise, split key

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
    flag("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    text = f"write every step, of at most {MAX_SAVED:g} (.npz)"
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
    """Choose an action, of the shape of its space. If random, it depends on a number in [0, 1)."""
    if run.policy == "rocking":
        return jnp.where(obs[1] < 0, 0, 2)
    return (ENV.num_actions * uniform).astype(int)


def play(run, key):
    """Play one episode. Return its totals and, for --save, its steps (T,), padded."""

    def step(carry, draws):
        obs, env_state, mask, totals = carry
        key, uniform = draws
        action = choose_action(run, obs, uniform)
        next_obs, env_state, reward, terminated, _ = ENV.step_env(key, env_state, action, PARAMS)
        real = {"timesteps": mask, "returns": jnp.where(mask, reward, 0.0)}
        totals = jax.tree.map(jnp.add, totals, real)
        kept = Step(obs, action, reward, next_obs, terminated, mask) if run.save else None
        return (next_obs, env_state, mask & ~terminated, totals), kept

    key_reset, key_action, key_step = jax.random.split(key, 3)
    time_limit = PARAMS.max_steps_in_episode
    uniform = jax.random.uniform(key_action, time_limit)  # (T,) faster than one draw in each step
    keys = jax.random.split(key_step, time_limit)  # not computed if the environment uses none
    obs, env_state = ENV.reset_env(key_reset, PARAMS)
    carry = obs, env_state, jnp.array(True), {"timesteps": 0, "returns": 0.0}
    (_, _, mask, totals), steps = jax.lax.scan(step, carry, (keys, uniform))
    return {**totals, "terminations": ~mask}, steps


def init_state(run):
    """State in which a car starts: its key."""
    return jax.random.key(run.seed)


def rollout(run, key):
    """Play M episodes. Return the next key, what a progress line shows, and what --save keeps."""

    def episode(key, _):
        key, key_play = jax.random.split(key)
        return key, play(run, key_play)

    key, (totals, steps) = jax.lax.scan(episode, key, length=run.interval_episodes)  # (M, ...)
    return key, jax.tree.map(jnp.sum, totals), steps


vectorize = jax.vmap  # the cars of a device
COMPILER_OPTIONS = {  # on a CPU
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.2 times as fast
}


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
    """Roll out and report. Return what --save writes; without --save, no steps. Ctrl-C ends it."""
    args = parse_args(argv)
    file = None if jax.process_index() == 0 else open(os.devnull, "w")  # one process prints for all
    show = partial(print, file=file, flush=True)
    per_device = math.ceil(args.num_envs / jax.device_count())
    num_devices = jax.device_count() if args.distributed else math.ceil(args.num_envs / per_device)
    # Copies of the first cars fill up the devices; `gather` cuts them off.
    seeds = args.seed + np.arange(args.num_envs)
    padded = {"seed": np.resize(seeds, num_devices * per_device)}
    on_devices = partial(over_runs, args=args, num_devices=num_devices)
    device_kind = jax.devices()[0].device_kind
    show(f"{args.num_envs:,} x {ENV.name} on {num_devices} x {device_kind}")

    began = time.perf_counter()
    state = on_devices(init_state)(padded)
    roll = on_devices(rollout).lower(padded, state).compile()
    compile_seconds = time.perf_counter() - began
    show(f"compiled in {compile_seconds:.1f} s")

    history, timesteps, seconds = [], 0, 0.0  # history: metrics and steps of each interval
    try:
        for i in range(args.num_intervals):
            began = time.perf_counter()
            state, totals, steps = roll(padded, state)
            totals = gather(totals, args.num_envs)  # (N,); waits for roll; Ctrl-C is raised here
            seconds += time.perf_counter() - began
            timesteps = timesteps + totals["timesteps"].sum(dtype=np.int64)  # so far
            metrics = {
                name: array.mean() / args.interval_episodes for name, array in totals.items()
            }
            metrics |= {"episodes": (i + 1) * args.interval_episodes, "timesteps": timesteps}
            history = [*history, (metrics, gather(steps, args.num_envs))]
            show(
                f"episode {metrics['episodes']:,}  terminated {metrics['terminations']:.1%}"
                f"  return {metrics['returns']:.1f}  {timesteps / seconds / 1e6:.0f} M steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        show(f"interrupted: the results are those of episode {history[-1][0]['episodes']:,}")

    metrics, steps = zip(*history, strict=True)
    results = {
        "args": json.dumps(vars(args)),
        "compile_seconds": compile_seconds,
        "rollout_seconds": seconds,
        "interrupted": len(history) < args.num_intervals,
        **{name: np.stack([line[name] for line in metrics]) for name in metrics[0]},  # (K,)
    }
    if args.save:
        steps = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *steps)
        results |= steps._asdict()  # (N, episodes, T, ...)
        if jax.process_index() == 0:
            np.savez(args.save, **results)
    return results


if __name__ == "__main__":
    sys.exit(130 if main()["interrupted"] else 0)
