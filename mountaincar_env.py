# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""An environment in pure JAX, MountainCar-v0, and its rollout over all cores and devices.

A car too weak for the hill must swing back first (Moore 1990; Sutton & Barto 2018, example 10.1).
Action a is 0 (push left), 1 (not at all) or 2 (right), every reward -1 until the goal is reached:

    velocity <- clip(velocity + (a - 1) force - gravity cos(3 position))
    position <- clip(position + velocity),    and at the left wall the velocity becomes 0

    python mountaincar_env.py                                     # 10^9 random steps
    python mountaincar_env.py --policy rocking --plot cars.png    # a policy that gets there

Shapes: T steps, N environments, n of them on each device.
"""

import argparse
import json
import math
import os
import queue
import signal
import sys
import time
from functools import partial
from typing import NamedTuple

# jax reads these when it is imported: each core is a device; a loop over steps is compiled into one
# function instead of one per operation (8x faster), with vectors as wide as they can be (1.3x).
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
    " --xla_cpu_prefer_vector_width=512",
)
import jax

if "--distributed" in sys.argv:  # before gymnax is imported, since that makes arrays
    jax.distributed.initialize()

import jax.numpy as jnp
import numpy as np
from gymnax.environments.classic_control import mountain_car
from jax.experimental.multihost_utils import process_allgather

MAX_SAVED = 1e8  # steps: 2.2 GB
BLOCK = 100  # steps for which random words are drawn at once: faster than in each


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
    add("--seed", type=number(int, 0, 2e9), default=0, help="everything random derives from it")
    add("--total-timesteps", type=number(int, 1, 1e12), default=10**9, help="of all environments")
    add("--num-envs", type=number(int, 1, 1e6), default=4096, help="environments in lockstep")
    add("--policy", choices=["random", "rocking"], default="random", help="or push as it moves")
    add("--log-interval", type=number(int, 1, 1e9), default=2 * 10**8, help="steps per line")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", metavar="FILE.npz", help="write every step of every environment")
    add("--plot", metavar="FILE.png", help="draw ten cars for 200 steps, velocity against position")
    args = parser.parse_args(argv)
    for path in [args.save, args.plot]:
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"no such folder: {path}")
    # a chunk: the blocks of steps up to the next progress line
    interval = min(args.log_interval, args.total_timesteps)
    args.chunk_blocks = math.ceil(interval / (BLOCK * args.num_envs))
    args.chunk_timesteps = args.chunk_blocks * BLOCK * args.num_envs
    args.num_chunks = math.ceil(args.total_timesteps / args.chunk_timesteps)
    if args.save and args.num_chunks * args.chunk_timesteps > MAX_SAVED:
        parser.error(f"--save keeps every step: at most {MAX_SAVED:g}, in whole log intervals")
    return args


class EnvParams(NamedTuple):
    """Sutton & Barto's constants, and Gymnasium's (G); a length is in the unit of the position."""

    min_position: float = -1.2  # length; a wall
    max_position: float = 0.6  # length; the track ends, beyond the goal (G)
    max_speed: float = 0.07  # length / step
    goal_position: float = 0.5  # length
    goal_velocity: float = 0.0  # length / step; the least with which to arrive (G)
    force: float = 0.001  # length / step^2; of the engine
    gravity: float = 0.0025  # length / step^2; times the slope, cos(3 position)
    max_steps_in_episode: int = 200  # steps; the time limit (G)


class EnvState(NamedTuple):
    """A car, or many of them; position and velocity are the observation (..., 2)."""

    position: jax.Array  # length
    velocity: jax.Array  # length / step
    time: jax.Array  # steps since the episode began


def cosine(x):
    """cos(x) by Taylor's series: XLA's own is not vectorised on a CPU (a rollout is 4x slower)."""
    half = x / 2 - jnp.pi * jnp.round(x / (2 * jnp.pi))  # in [-pi / 2, pi / 2]
    series = [(-1) ** k / math.factorial(2 * k) for k in range(5, -1, -1)]  # enough in float32
    return 2 * jnp.polyval(np.array(series, x.dtype), half**2) ** 2 - 1  # by cos(half)


def begin(fraction):
    """The state in which an episode begins: at rest, from -0.6 to -0.4 for a fraction in [0, 1)."""
    return EnvState(-0.6 + 0.2 * fraction, 0 * fraction, jnp.zeros_like(fraction, jnp.int32))


def advance(state, action, fresh, params):
    """One step; where an episode ends, the next begins in the state `fresh`. Returns as `step`."""
    pull = params.gravity * cosine(3 * state.position)
    velocity = state.velocity + (action - 1) * params.force - pull
    velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
    position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
    velocity = jnp.where((position == params.min_position) & (velocity < 0), 0.0, velocity)
    reached = EnvState(position, velocity, state.time + 1)
    terminated = (position >= params.goal_position) & (velocity >= params.goal_velocity)
    truncated = reached.time >= params.max_steps_in_episode
    state = jax.tree.map(partial(jnp.where, terminated | truncated), fresh, reached)
    final = jnp.stack(reached[:2], axis=-1)
    info = {"final_observation": final, "terminated": terminated, "truncated": truncated}
    obs = jnp.stack(state[:2], axis=-1)
    return obs, state, jnp.full_like(position, -1.0), terminated, truncated, info


class MountainCar(mountain_car.MountainCar):
    """`MountainCar(), EnvParams()` stand for gymnax.make(...); spaces and `reset` are gymnax's."""

    default_params = EnvParams()

    def reset_env(self, key, params):
        """Begin an episode: the observation (2,) and the state. `reset` calls it."""
        state = begin(jax.random.uniform(key))
        return jnp.stack(state[:2], axis=-1), state

    @partial(jax.jit, static_argnames="self")
    def step(self, key, state, action, params=None):
        """Observation, state, reward, terminated, truncated, info; resets where an episode ends."""
        if params is None:
            params = self.default_params
        return advance(state, action, begin(jax.random.uniform(key)), params)


def vector_step(args, carry, random):
    """Step n environments, by 16 random bits each; and what --save keeps of it."""
    state, totals = carry
    product = 3 * random  # action * 2^16 + a remainder, from which the next episode begins
    action = (product >> 16).astype(jnp.int32)
    if args.policy == "rocking":
        action = jnp.where(state.velocity < 0, 0, 2)
    fresh = begin((product & 0xFFFF) / jnp.float32(2**16))
    _, next_state, _, terminated, truncated, info = advance(state, action, fresh, EnvParams())
    done = terminated | truncated
    totals += jnp.stack([done, terminated, done * (state.time + 1)])
    obs = jnp.stack(state[:2], axis=-1)
    return (next_state, totals), {"obs": obs, "action": action, **info}


def rollout(args, chunk_index, state):
    """All steps up to the next progress line; on all devices, what came of the episodes."""
    num_envs = len(state.position)

    def block(carry, key):
        words = jax.random.bits(key, (BLOCK // 2, num_envs))  # two steps' each: 1.3x faster
        random = jnp.concatenate([words >> 16, words & 0xFFFF])  # (BLOCK, n)
        carry, transitions = jax.lax.scan(partial(vector_step, args), carry, random)
        return carry, (transitions if args.save else None)

    key = jax.random.key(args.seed, impl="rbg")  # faster in bulk than threefry
    key = jax.random.fold_in(jax.random.fold_in(key, chunk_index), jax.lax.axis_index("envs"))
    carry = state, jnp.zeros((3, num_envs), jnp.int32)  # 1e9 steps, all that a chunk has, fit
    (state, totals), kept = jax.lax.scan(block, carry, jax.random.split(key, args.chunk_blocks))
    episodes, goals, steps = jax.lax.psum(totals.sum(axis=1), "envs")
    report = episodes, goals / episodes, -steps / episodes  # every reward is -1
    return state, report, jax.tree.map(jnp.concatenate, kept)


def plot(path, args):
    """Draw ten cars for as many steps as an episode may take, velocity against position."""
    import matplotlib.pyplot as plt

    plt.figure()
    key_begin, key_bits = jax.random.split(jax.random.fold_in(jax.random.key(args.seed), 1))
    carry = begin(jax.random.uniform(key_begin, 10)), jnp.zeros((3, 10), jnp.int32)
    random = jax.random.bits(key_bits, (EnvParams().max_steps_in_episode, 10)) >> 16
    _, transitions = jax.lax.scan(partial(vector_step, args), carry, random)
    plt.plot(*np.moveaxis(transitions["obs"], -1, 0), ".", markersize=3)
    plt.axvline(EnvParams().goal_position, color="gray", linestyle=":")
    plt.xlabel(f"position ({args.policy} policy; dotted: the goal)")
    plt.ylabel("velocity, per step")
    plt.savefig(path)


def main(argv=None):
    """Roll out, report; the exit code."""
    args = parse_args(argv)
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
    num_devices = math.gcd(jax.device_count(), args.num_envs)
    if args.distributed and num_devices < jax.device_count():
        sys.exit(f"--num-envs must be a multiple of the {jax.device_count()} devices")
    print(f"MountainCar-v0, {args.num_envs} envs on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    mesh = jax.make_mesh((num_devices,), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    in_specs = jax.P(), jax.P("envs")
    out_specs = jax.P("envs"), jax.P(), jax.P(None, "envs")
    sharded = jax.shard_map(
        partial(rollout, args), mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    state = begin(jax.random.uniform(jax.random.key(args.seed), args.num_envs))
    state = jax.tree.map(np.array, state)  # not an array of this process alone
    chunk = jax.jit(sharded, donate_argnums=1).lower(0, state).compile()
    print(f"compiled in {time.perf_counter() - began:.1f} s")

    interrupts = queue.SimpleQueue()
    signal.signal(signal.SIGINT, interrupts.put)  # Ctrl-C lets the chunk under way end
    began = time.perf_counter()
    kept = []
    for i in range(args.num_chunks):
        state, report, transitions = chunk(i, state)
        kept.append(process_allgather(transitions, tiled=True))
        episodes, goal_share, mean_return = map(np.array, report)
        timesteps = (i + 1) * args.chunk_timesteps
        speed = timesteps / (time.perf_counter() - began) / 1e6
        print(
            f"step {timesteps:,}  episodes {episodes:,}  at the goal {goal_share:.1%}"
            f"  return {mean_return:.1f}  {speed:.0f} M steps/s"
        )
        if process_allgather(not interrupts.empty()).any():  # in any process
            break
    if args.save and jax.process_index() == 0:
        trajectory = {name: np.concatenate([part[name] for part in kept]) for name in kept[0]}
        np.savez(args.save, args=json.dumps(vars(args)), **trajectory)  # (T, N, ...)
    if args.plot and jax.process_index() == 0:
        plot(args.plot, args)
    return 0 if interrupts.empty() else 130


if __name__ == "__main__":
    sys.exit(main())
