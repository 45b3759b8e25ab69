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

To write another environment, change EnvParams, EnvState, `start`, `dynamics`, the class and
`choose_action`. The environment comes first. What rolls it out on all devices comes after it.

Shapes: K log intervals, T steps, N environments, n of them on each device.
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
# Compile the loop over steps into one function, not one per operation: 2.6 times as fast.
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

BLOCK = 100  # steps for which random numbers are drawn at once: faster than in each step
MAX_SAVED = 1e8  # steps; they are in memory twice while they are joined


@struct.dataclass
class EnvParams(environment.EnvParams):
    """Sutton & Barto's constants, and Gymnasium's (G); lengths have the unit of the position."""

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
    """The state of a car, or of many. The base class adds `time`: steps since the start."""

    position: jax.Array  # length
    velocity: jax.Array  # length / step


def cosine(x):
    """cos(x) by Taylor's series: on a CPU, a rollout is 6 times as fast as with jnp.cos."""
    half = x / 2 - jnp.pi * jnp.round(x / (2 * jnp.pi))  # in [-pi / 2, pi / 2]
    series = [(-1) ** k / math.factorial(2 * k) for k in range(5, -1, -1)]  # enough in float32
    return 2 * jnp.polyval(np.array(series, x.dtype), half**2) ** 2 - 1  # 2 cos(half)^2 - 1


def start(uniform):
    """Return a start state for a uniform number in [0, 1): at rest, position in [-0.6, -0.4)."""
    time = jnp.zeros_like(uniform, jnp.int32)
    return EnvState(position=-0.6 + 0.2 * uniform, velocity=jnp.zeros_like(uniform), time=time)


def dynamics(state, action, params):
    """Return the state after one step."""
    slope = cosine(3 * state.position)
    velocity = state.velocity + (action - 1) * params.force - params.gravity * slope
    velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
    position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
    hits_wall = (position == params.min_position) & (velocity < 0)
    velocity = jnp.where(hits_wall, 0.0, velocity)
    return EnvState(position=position, velocity=velocity, time=state.time + 1)


class MountainCar(environment.Environment):
    """A gymnax environment.

    The base class provides `reset` and `step`. `step` calls `step_env`, applies the time limit and
    resets an episode that ended; info["final_observation"] is the observation before the reset.
    """

    name = "MountainCar-v0"
    num_actions = 3
    default_params = EnvParams()

    def step_env(self, key, state, action, params):
        """Step once. Return observation, state, reward, terminated and info.

        A random environment would split the key and pass one part on to `dynamics`.
        """
        state = dynamics(state, action, params)
        obs = self.observe(key, state, action, params)
        return obs, state, jnp.array(-1.0), self.is_terminated(state, params), {}

    def reset_env(self, key, params):
        """Start an episode. Return observation and state."""
        key_start, key_observe = jax.random.split(key)
        state = start(jax.random.uniform(key_start))
        return self.observe(key_observe, state, None, params), state

    def observe(self, key, state, action, params):
        """Return the observation (2,) of a state, to which the action led (None at the start)."""
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


class Sums(NamedTuple):
    """What each car did since the last progress line."""

    episodes: jax.Array  # (n,) number that ended
    goals: jax.Array  # (n,) number that ended at the goal
    returns: jax.Array  # (n,) of those that ended, added up


class RolloutState(NamedTuple):
    """The state of n cars on one device."""

    key: jax.Array  # (1,)
    env_state: EnvState  # (n,)
    episode_return: jax.Array  # (n,) so far
    sums: Sums


def init_state(args, device):
    """Return the state in which the n cars of a device start; device (1,) is its number."""
    key = jax.random.key(args.seed, impl="rbg")  # draws many numbers faster than the default
    key, key_start = jax.random.split(jax.random.fold_in(key, device[0]))
    env_state = start(jax.random.uniform(key_start, args.device_envs))
    zeros, counts = jnp.zeros(args.device_envs), jnp.zeros(args.device_envs, jnp.int32)
    return RolloutState(key[None], env_state, zeros, Sums(counts, counts, zeros))


def choose_action(args, env_state, uniform):
    """Return actions (n,), and uniform numbers that do not depend on them, for `start`."""
    # Three times a uniform number: the integer part is a random action, the rest is uniform again.
    # One number for both: 1.4 times as fast as two.
    tripled = 3 * uniform
    action = tripled.astype(jnp.int32)
    rest = tripled - action
    if args.policy == "rocking":
        action = jnp.where(env_state.velocity < 0, 0, 2)
    return action, rest


def vector_step(args, state, draws):
    """Step n cars. Also return what --save keeps of the step."""
    env, params = MountainCar(), EnvParams()
    key, uniform = draws  # one key; (n,) in [0, 1)
    action, uniform = choose_action(args, state.env_state, uniform)
    # Keys are not computed unless the environment uses them.
    keys_step, keys_observe = jax.random.split(key, (2, args.device_envs))
    step = jax.vmap(partial(env.step_env, params=params))
    final_obs, env_state, reward, terminated, _ = step(keys_step, state.env_state, action)
    truncated = env.is_truncated(env_state, params)
    done = terminated | truncated
    observe = jax.vmap(partial(env.observe, action=None, params=params))
    kept = {"obs": observe(keys_observe, state.env_state), "action": action}
    kept |= {"final_observation": final_obs, "terminated": terminated, "truncated": truncated}
    total = state.episode_return + reward
    episodes, goals, returns = state.sums
    if_done = Sums(episodes + 1, goals + terminated, returns + total)
    state = state._replace(
        env_state=jax.tree.map(partial(jnp.where, done), start(uniform), env_state),
        episode_return=jnp.where(done, 0.0, total),
        sums=jax.tree.map(partial(jnp.where, done), if_done, state.sums),
    )
    return state, kept if args.save else None


def block(args, state, _):
    """Take BLOCK steps. Their random numbers are drawn at once: fast, and in little memory."""
    key, key_uniform, key_step = jax.random.split(state.key[0], 3)
    # 16 random bits a number: with jax 0.11, this is 1.4 times as fast as jax.random.uniform.
    uniform = jax.random.bits(key_uniform, (BLOCK, args.device_envs), jnp.uint16) / 2**16
    draws = jax.random.split(key_step, BLOCK), uniform
    return jax.lax.scan(partial(vector_step, args), state._replace(key=key[None]), draws)


def rollout(args, state):
    """Step n cars up to the next progress line. Also return what --save keeps, (n, T, ...) each."""
    state = state._replace(sums=jax.tree.map(jnp.zeros_like, state.sums))
    state, kept = jax.lax.scan(partial(block, args), state, length=args.interval_blocks)
    return state, jax.tree.map(lambda array: jnp.concatenate(array).swapaxes(0, 1), kept)


COMPILER_OPTIONS = {  # on a CPU
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.3 to 1.5 times as fast
}


def over_devices(function, num_devices):
    """Compile a function of the cars of one device for all N cars."""
    mesh = jax.make_mesh((num_devices,), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    # No check_vma: cars do not communicate, and the check rejects constant states to start from.
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(function, in_specs=jax.P("envs"), out_specs=jax.P("envs"))
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS if on_cpu else None)


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


def file_name(suffix):
    """Make an argparse type: the name of a file that can be written and has this suffix."""

    def parse(path):
        folder, name = os.path.split(path)
        place = path if os.path.exists(path) else os.path.join(folder, ".")
        can_write = os.access(place, os.W_OK) and not os.path.isdir(path)
        if not can_write or os.path.splitext(name)[1] != suffix:
            raise argparse.ArgumentTypeError(f"{path!r} is not a {suffix} file that can be written")
        return path

    return parse


def parse_args(argv=None):
    """Read and check the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument
    steps = number(int, 1, 1e9)
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of all random numbers")
    text = "environment steps of all cars, rounded up to whole log intervals"
    add("--total-timesteps", type=number(int, 1, 1e12), default=10**9, help=text)
    add("--num-envs", type=number(int, 1, 1e6), default=4096, help="cars stepped in lockstep")
    text = "rocking pushes in the direction of motion"
    add("--policy", choices=["random", "rocking"], default="random", help=text)
    text = "approximate number of environment steps of all cars between progress lines"
    add("--log-interval", type=steps, default=2 * 10**8, help=text)
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    text = f"write every step, 22 bytes each, of at most {MAX_SAVED:g}"
    add("--save", type=file_name(".npz"), metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    block_timesteps = BLOCK * args.num_envs
    min_blocks = math.ceil(args.total_timesteps / block_timesteps)
    args.num_intervals = math.ceil(min_blocks / math.ceil(args.log_interval / block_timesteps))
    args.interval_blocks = math.ceil(min_blocks / args.num_intervals)
    args.interval_timesteps = args.interval_blocks * block_timesteps
    if args.save and args.num_intervals * args.interval_timesteps > MAX_SAVED:
        parser.error(f"--save writes at most {MAX_SAVED:g} steps: --total-timesteps is too large")
    return args


def main(argv=None):
    """Roll out and report. Return what --save writes; the steps are in it only with --save."""
    args = parse_args(argv)
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
    num_devices = jax.device_count()
    args.device_envs = math.ceil(args.num_envs / num_devices)  # surplus cars fill the last devices
    if not args.distributed:  # then no more devices than needed
        num_devices = math.ceil(args.num_envs / args.device_envs)
    device_kind = jax.devices()[0].device_kind
    print(f"{args.num_envs:,} x {MountainCar.name} on {num_devices} x {device_kind}")

    began = time.perf_counter()
    state = over_devices(partial(init_state, args), num_devices)(np.arange(num_devices))
    roll = over_devices(partial(rollout, args), num_devices).lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    timesteps = args.interval_timesteps * np.arange(1, args.num_intervals + 1)  # (K,)
    history, trajectory, seconds = [], [], 0.0
    try:
        for timestep in timesteps:
            began = time.perf_counter()
            state, kept = roll(state)
            sums = gather(state.sums, args.num_envs)  # waits for it; Ctrl-C is raised here
            seconds += time.perf_counter() - began
            # If no episode ended, the means are nan. NumPy would also print a warning.
            episodes, goals, returns = (jnp.sum(array) for array in sums)
            means = {"goals": goals / episodes, "returns": returns / episodes}
            trajectory.append(gather(kept, args.num_envs))
            history.append({"episodes": episodes, **means})
            print(
                f"step {timestep:,}  episodes {episodes:,}  at the goal {means['goals']:.1%}"
                f"  return {means['returns']:.1f}  {timestep / seconds / 1e6:.0f} M steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        print("interrupted: the results are those of the last line")

    results = {
        "args": json.dumps(vars(args)),
        "compile_seconds": compile_seconds,
        "rollout_seconds": seconds,
        "interrupted": len(history) < args.num_intervals,
        "timesteps": timesteps[: len(history)],
        **jax.tree.map(lambda *values: np.stack(values), *history),  # (K,)
    }
    if args.save:
        arrays = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *trajectory)
        results |= {name: array.swapaxes(0, 1) for name, array in arrays.items()}  # (T, N, ...)
        if jax.process_index() == 0:
            np.savez(args.save, allow_pickle=False, **results)
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
