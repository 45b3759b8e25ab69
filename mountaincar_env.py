# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["jax==0.10.1", "gymnax==1.0.1", "six==1.17.0"]  # gymnax needs six
# ///
"""How to write an environment in pure JAX: MountainCar-v0, and its rollout on all devices.

A car is too weak to drive straight up a hill. It must first swing back and forth to gain speed
(Moore 1990; Sutton & Barto 2018, example 10.1). Action a is 0 (push left), 1 (do not push) or
2 (push right). Every step has reward -1, until the car reaches the goal on top of the hill. A step:

    velocity <- velocity + (a - 1) force - gravity cos(3 position),    at most max_speed either way
    position <- position + velocity,    within the track, and velocity <- 0 at the left wall

    python mountaincar_env.py --policy rocking    # this policy reaches the goal
    python mountaincar_env.py                     # random actions do not

Shapes: E = num_episodes episodes, T steps (the time limit).
"""

import argparse
import json
import math
import os
import time
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

if __name__ == "__main__":  # not for those who import the environment
    # Each logical CPU becomes a device of jax. This must be set before jax is imported.
    CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
    # Compile the loop over steps into one function: 1.4 to 1.9 times as fast.
    LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
    os.environ["XLA_FLAGS"] = LOOPS + " " + os.environ.get("XLA_FLAGS", "")  # the user's flags win
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct  # gymnax depends on it
from gymnax.environments import environment, spaces


@struct.dataclass
class EnvParams(environment.EnvParams):
    """Constants of Sutton & Barto, or Gymnasium's (G)."""

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
    """cos(x) by Taylor's series around the nearest multiple of 2 pi; accurate to 1e-6 on the track.

    It makes this script 2.4 to 5.5 times as fast on a CPU. In an environment of your own, use
    jnp.cos until you see that it takes most of the time, as it does here.
    """
    x = x - 2 * jnp.pi * jnp.round(x / (2 * jnp.pi))
    series = [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)]
    return jnp.polyval(np.array(series, x.dtype), x**2)


class MountainCar(environment.Environment):
    """A gymnax environment.

    A class needs default_params (without it, the time limit is 1 step), step_env, reset_env and the
    two spaces. `step` of the base class applies the time limit and resets an episode that ended: so
    step_env must add 1 to `time`, and must not report the time limit as terminated.
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
MAX_SAVED = 500_000  # episodes; all their steps take 3 GB of memory


class Step(NamedTuple):
    """One step of an episode, or of the padding after it."""

    obs: jax.Array  # (2,)
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # (2,)
    terminated: jax.Array  # true if next_obs is terminal
    mask: jax.Array  # true if the step is real, false in the padding


def choose_action(args, obs, uniform):
    """Choose an action, given a random number in [0, 1). This is the place for your policy."""
    if args.policy == "rocking":  # push in the direction of motion
        return jnp.where(obs[1] < 0, 0, 2)
    return (ENV.num_actions * uniform).astype(int)


def play(args, key):
    """Play one episode. Return its totals and, for --save, its steps (T,), padded.

    It calls `step_env` T times, and not `step`, which would reset the car at the time limit.
    """

    def step(carry, draws):
        obs, env_state, mask, totals = carry
        key, uniform = draws
        action = choose_action(args, obs, uniform)
        # Nothing is reset: after the goal, the car drives on, and that is the padding.
        next_obs, env_state, reward, terminated, _ = ENV.step_env(key, env_state, action, PARAMS)
        reward = jnp.where(mask, reward, 0.0)
        totals = {"timesteps": totals["timesteps"] + mask, "returns": totals["returns"] + reward}
        kept = Step(obs, action, reward, next_obs, terminated & mask, mask) if args.save else None
        return (next_obs, env_state, mask & ~terminated, totals), kept

    key_reset, key_action, key_step = jax.random.split(key, 3)
    time_limit = int(PARAMS.max_steps_in_episode)
    uniform = jax.random.uniform(key_action, time_limit)  # (T,) faster than one draw in each step
    keys = jax.random.split(key_step, time_limit)  # XLA drops them if unused
    obs, env_state = ENV.reset_env(key_reset, PARAMS)
    carry = obs, env_state, jnp.array(True), {"timesteps": 0, "returns": 0.0}
    (_, _, mask, totals), steps = jax.lax.scan(step, carry, (keys, uniform))
    return {**totals, "terminated": ~mask}, steps


def count(text):
    """Read a flag: an integer of at least 1. It may be written 2e6."""
    value = float(text)
    if not 1 <= value <= 2**30 or value != int(value):
        raise ValueError
    return int(value)


def check_file(parser, path, *endings):
    """Refuse a wrong ending or a folder that cannot be written, before anything is computed."""
    if path and not (path.endswith(endings) and os.access(os.path.dirname(path) or ".", os.W_OK)):
        parser.error(f"{path} must end in {' or '.join(endings)}, in a folder that can be written")


def parse_args(argv=None):
    """Read the flags."""
    style = argparse.ArgumentDefaultsHelpFormatter
    what = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=what, formatter_class=style, allow_abbrev=False)
    flag = parser.add_argument
    flag("--seed", type=int, default=0, help="seed of all episodes")
    flag("--num-episodes", type=count, default=2_000_000, help="episodes to play, at least")
    flag("--num-envs", type=count, default=256, help="cars at once on each device; 1e5 suit a GPU")
    flag("--policy", choices=["random", "rocking"], default="random", help="how cars are driven")
    flag("--save", metavar="FILE.npz", help="write all steps")
    args = parser.parse_args(argv)
    check_file(parser, args.save, ".npz")
    if not 0 <= args.seed < 2**31:
        parser.error("--seed must be from 0 to 2**31 - 1")
    if args.save and args.num_episodes > MAX_SAVED:
        parser.error(f"--save: at most {MAX_SAVED:,} --num-episodes fit into memory")
    return args


def main(argv=None):
    """Play all episodes. Return what --save writes."""
    args = parse_args(argv)  # if None, from the command line; in a notebook, call main([])
    versions = {name: version(name) for name in ("jax", "jaxlib", "gymnax")}
    devices = jax.devices()
    args.num_episodes = math.ceil(args.num_episodes / len(devices)) * len(devices)  # equal shares
    keys = jax.random.split(jax.random.key(args.seed), args.num_episodes)  # (E,)

    def one_device(keys):  # one batch of cars after the other
        return jax.lax.map(partial(play, args), keys, batch_size=args.num_envs)

    mesh = jax.sharding.Mesh(devices, "episodes")
    axis = jax.sharding.PartitionSpec("episodes")  # the first axis of each array is divided
    # check_vma would reject loops whose carry starts as a constant.
    roll = jax.shard_map(one_device, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = {"xla_cpu_prefer_vector_width": 512}  # the widest vectors: 1.3 times as fast
    began = time.perf_counter()
    roll = jax.jit(roll, compiler_options=options).lower(keys).compile()
    hardware = f"{len(devices)} x {devices[0].device_kind}"
    print(f"devices: {hardware}  compiled in {time.perf_counter() - began:.1f} s", flush=True)

    began = time.perf_counter()
    totals, steps = jax.device_get(roll(keys))  # (E,) each; (E, T) each, or None
    seconds = time.perf_counter() - began
    words = [f"{name} {values.mean():#.4g}" for name, values in totals.items()]
    speed = f"{totals['timesteps'].sum() / seconds:,.0f} steps/s in total"
    print(f"means over {args.num_episodes:,} episodes:", *words, speed, sep="  ")
    results = {"args": json.dumps(vars(args)), "versions": json.dumps(versions), **totals}
    if args.save:
        results |= {f"steps.{name}": array for name, array in steps._asdict().items()}
        np.savez(args.save, **results)
    return results


if __name__ == "__main__":
    main()
