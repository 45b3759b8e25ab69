# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""REINFORCE on N episodes at a time, of different lengths, padded and masked.

Each iteration plays N episodes with the policy pi as it is, then makes one Adam step along

    1/N sum_i sum_t mask_ti (G_ti - b_ti) grad log pi(A_ti | S_ti),    G_ti = R_ti + gamma G_t+1,i

(Williams 1992; Sutton & Barto 2018, section 13.4; the factor gamma^t is left out, as is common).
The mask is 1 up to the last step of episode i, 0 in the padding behind it. The baseline b_ti is the
mean of the other episodes' returns to go, 0 for those that have ended, so the gradient is unbiased:
that of a finite horizon, since an episode ends at its time limit, without a bootstrap.
(--sync truncation ends all episodes with the first: biased.)

    python reinforce_parallel.py                                    # CartPole-v1
    python reinforce_parallel.py --env-id Pendulum-v1 --num-envs 128 --gif pendulum.gif

Shapes: R runs, T steps, N environments, D observation, H hidden units, A actions or dimensions.
"""

import argparse
import json
import math
import os
import queue
import signal
import sys
import time
from functools import cache, partial
from typing import NamedTuple

# jax reads these when it is imported: each core is a device; the arrays, small here, are not split
# among threads; vectors are as wide as they can be; less optimisation compiles twice as fast.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_disable_hlo_passes=cpu-parallel-task-assigner --xla_cpu_prefer_vector_width=512"
    " --xla_backend_optimization_level=1",
)
import jax

if "--distributed" in sys.argv:  # before gymnax is imported, since that makes arrays
    jax.distributed.initialize()

import gymnax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather

make = cache(gymnax.make)


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
    add("--num-seeds", type=count, default=1, help="runs in one program, on all cores or devices")
    add("--env-id", choices=gymnax.registered_envs, default="CartPole-v1", help="of gymnax")
    add("--num-iterations", type=count, default=100, help="updates of a run")
    add("--num-envs", type=number(int, 2, 1e6), default=16, help="episodes per update")
    add("--learning-rate", type=share, default=[0.01], nargs="+", help="at first; runs with each")
    add("--gamma", type=share, default=0.99, help="discount factor")
    add("--hidden-size", type=count, default=64, help="tanh units of the policy network")
    add(
        "--sync",
        choices=["padding", "truncation"],
        default="padding",
        help="play on, or end with first",
    )
    add("--eval-episodes", type=count, default=100, help="greedy episodes at the end")
    add("--log-interval", type=count, default=5, help="iterations per progress line")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", metavar="FILE.npz", help="write parameters, learning curve and arguments")
    add("--plot", metavar="FILE.png", help="draw the learning curve")
    add("--gif", metavar="FILE.gif", help="draw 200 steps of a greedy episode, if gymnax can")
    args = parser.parse_args(argv)
    if args.env_id == "MNISTBandit-bsuite":
        parser.error("MNISTBandit-bsuite would download its data")
    for path in [args.save, args.plot, args.gif]:
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"no such folder: {path}")
    num_lines = math.ceil(args.num_iterations / args.log_interval)
    args.log_updates = math.ceil(args.num_iterations / num_lines)
    args.total_updates = num_lines * args.log_updates
    return args


class Batch(NamedTuple):
    """Episodes side by side, padded to the time limit."""

    obs: jax.Array  # (T, N, D) flattened
    action: jax.Array  # (T, N), or (T, N, A) if continuous
    reward: jax.Array  # (T, N)
    mask: jax.Array  # (T, N) true where the step is real


class TrainState(NamedTuple):
    """All that changes during a run."""

    key: jax.Array
    learning_rate: jax.Array  # at first
    params: dict  # w0 (D, H), b0 (H,), w1 (H, A), b1 (A,); log_std (A,) if actions are continuous
    opt_state: optax.OptState


def optimizer(args, learning_rate):
    """Adam, its learning rate falling linearly to 0."""
    return optax.adam(optax.linear_schedule(learning_rate, 0.0, args.total_updates))


def init_state(args, seed, learning_rate):
    """The state in which the run with this seed starts."""
    env, env_params = make(args.env_id)
    space = env.action_space(env_params)
    inputs = math.prod(env.observation_space(env_params).shape)
    outputs = space.n if hasattr(space, "n") else math.prod(space.shape)
    key, key_hidden, key_out = jax.random.split(jax.random.key(seed), 3)
    params = {
        "w0": jax.random.normal(key_hidden, (inputs, args.hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(args.hidden_size),
        "w1": 0.01 * jax.random.normal(key_out, (args.hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }
    if not hasattr(space, "n"):
        params["log_std"] = jnp.zeros(outputs)
    return TrainState(key, learning_rate, params, optimizer(args, learning_rate).init(params))


def policy(params, obs):
    """Logits (..., A) of observations (..., D); means if actions are continuous."""
    return jnp.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def sample(params, obs, noise):
    """Actions (...) chosen with Gumbel or normal noise (..., A): the greedy ones if it is 0."""
    if "log_std" in params:
        return policy(params, obs) + jnp.exp(params["log_std"]) * noise
    return jnp.argmax(policy(params, obs) + noise, axis=-1)


def log_prob(params, obs, action):
    """log pi(action | obs) (...) of a categorical or a diagonal Gaussian distribution."""
    if "log_std" in params:
        std = jnp.exp(params["log_std"])
        return jax.scipy.stats.norm.logpdf(action, policy(params, obs), std).sum(axis=-1)
    log_probs = jax.nn.log_softmax(policy(params, obs))
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


def to_bounds(space, action):
    """What the environment gets: [-1, 1] stretched to its bounds, clipped; discrete as it is."""
    if hasattr(space, "n"):
        return action
    return space.low + (space.high - space.low) * (jnp.clip(action, -1, 1) + 1) / 2


def vector_step(args, params, carry, random):
    """One step of N environments; gymnax resets those that are done, the mask ends there."""
    obs, env_state, mask = carry
    noise, keys = random
    env, env_params = make(args.env_id)
    obs = obs.reshape(len(obs), -1).astype(float)  # (N, D)
    action = sample(params, obs, noise)
    next_obs, next_state, reward, terminated, truncated, _ = jax.vmap(env.step)(
        keys, env_state, to_bounds(env.action_space(env_params), action)
    )
    carry = next_obs, next_state, mask & ~(terminated | truncated)
    return carry, (Batch(obs, action, reward.astype(float), mask), env_state)


def play(args, params, key, num_envs, noise_scale):
    """An episode in each of N environments, and their states; greedy if noise_scale is 0."""
    env, env_params = make(args.env_id)
    key_reset, key_noise, key_step = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(key_reset, num_envs))
    shape = (int(env_params.max_steps_in_episode), num_envs)  # (T, N)
    draw = jax.random.normal if "log_std" in params else jax.random.gumbel
    noise = noise_scale * draw(key_noise, (*shape, *params["b1"].shape))  # (T, N, A)
    carry = obs, env_state, jnp.ones(num_envs, bool)
    random = noise, jax.random.split(key_step, shape)
    return jax.lax.scan(partial(vector_step, args, params), carry, random)[1]


def advantages(args, batch):
    """Returns to go less the mean of the other episodes' (T, N), 0 in the padding."""

    def step(later, reward):
        return_to_go = reward + args.gamma * later
        return return_to_go, return_to_go

    rewards = batch.mask * batch.reward
    _, returns = jax.lax.scan(step, jnp.zeros_like(rewards[0]), rewards, reverse=True)
    returns = returns - returns[:, :1]  # so that equal returns give exact zeros
    others = (returns.sum(axis=1, keepdims=True) - returns) / (returns.shape[1] - 1)
    return batch.mask * (returns - others)


def loss(params, batch, advantage):
    """Its gradient is the negative of the policy gradient."""
    return -jnp.mean(jnp.sum(advantage * log_prob(params, batch.obs, batch.action), axis=0))


def train_step(args, state, _):
    """Play N episodes, make one Adam step; their mean return and number of real steps."""
    key, key_play = jax.random.split(state.key)
    batch, _ = play(args, state.params, key_play, args.num_envs, noise_scale=1.0)
    if args.sync == "truncation":
        batch = batch._replace(mask=batch.mask & jnp.all(batch.mask, axis=1, keepdims=True))
    grad = jax.grad(loss)(state.params, batch, advantages(args, batch))
    updates, opt_state = optimizer(args, state.learning_rate).update(grad, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    episode_return = jnp.sum(batch.mask * batch.reward, axis=0)  # (N,)
    state = state._replace(key=key, params=params, opt_state=opt_state)
    return state, (jnp.mean(episode_return), jnp.sum(batch.mask))


def train_chunk(args, state):
    """All updates up to the next progress line; their mean return and number of real steps."""
    state, report = jax.lax.scan(partial(train_step, args), state, length=args.log_updates)
    return state, (jnp.mean(report[0]), jnp.sum(report[1]))


def evaluate(args, state):
    """Returns (E,) of the greedy policy in E fresh episodes."""
    batch, _ = play(args, state.params, state.key, args.eval_episodes, noise_scale=0.0)
    return jnp.sum(batch.mask * batch.reward, axis=0)


def over_runs(function, num_devices, **jit_options):
    """Compile a function of one run for R runs: vmapped, and sharded over the devices."""
    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    runs = jax.P("runs")
    batched = jax.vmap(function)
    sharded = jax.shard_map(batched, mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False)
    return jax.jit(sharded, **jit_options)


def plot(path, learning_rate, timesteps, returns):
    """Draw returns (K, R) against timesteps (K,): mean and range over the runs of each rate."""
    import matplotlib.pyplot as plt

    plt.figure()
    for rate in np.unique(learning_rate):
        runs = returns[:, learning_rate == rate]
        plt.plot(timesteps, runs.mean(axis=1), label=f"learning rate {rate:g}")
        plt.fill_between(timesteps, runs.min(axis=1), runs.max(axis=1), alpha=0.2)
    plt.xlabel("environment steps")
    plt.ylabel("return of training episodes")
    plt.legend()
    plt.savefig(path)


def film(path, args, params):
    """Draw the first 200 steps of a greedy episode, without a screen."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
    from gymnax.visualize import Visualizer

    key = jax.random.fold_in(jax.random.key(args.seed), 1)
    batch, states = play(args, params, key, num_envs=1, noise_scale=0.0)
    steps = range(min(200, np.sum(batch.mask)))
    frames = [jax.tree.map(lambda array, t=t: array[t, 0], states) for t in steps]
    Visualizer(*make(args.env_id), frames, np.cumsum(batch.reward)).animate(path)


def main(argv=None):
    """Train, evaluate, report; the exit code."""
    args = parse_args(argv)
    make(args.env_id)  # now, since some environments cannot be made inside of jit
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = args.gif = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_devices = math.gcd(jax.device_count(), len(seed))
    if args.distributed and num_devices < jax.device_count():
        sys.exit(f"the number of runs must be a multiple of the {jax.device_count()} devices")
    print(f"{args.env_id}, {len(seed)} runs on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    state = over_runs(partial(init_state, args), num_devices)(seed, learning_rate)
    chunk = over_runs(partial(train_chunk, args), num_devices, donate_argnums=0)
    chunk = chunk.lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    interrupts = queue.SimpleQueue()
    signal.signal(signal.SIGINT, interrupts.put)  # Ctrl-C lets the chunk under way end
    began = time.perf_counter()
    steps, returns = [], []  # (K, R), (K, R)
    for iteration in range(args.log_updates, args.total_updates + 1, args.log_updates):
        state, report = chunk(state)
        mean_return, real_steps = process_allgather(report, tiled=True)
        returns.append(mean_return)
        steps.append(real_steps)
        train_seconds = time.perf_counter() - began
        speed = np.sum(steps) / train_seconds
        print(f"iteration {iteration:,}  return {mean_return.mean():.1f}  {speed:,.0f} steps/s")
        if process_allgather(not interrupts.empty()).any():  # in any process
            break

    timesteps = np.cumsum(steps, axis=0)
    greedy_return = over_runs(partial(evaluate, args), num_devices)(state)  # (R, E)
    greedy_return, params = process_allgather((greedy_return, state.params), tiled=True)
    for rate in args.learning_rate:
        means = greedy_return[learning_rate == rate].mean(axis=1)
        print(f"learning rate {rate:g}: greedy return {means.mean():.1f}, worst {means.min():.1f}")
    if args.save:
        np.savez(
            args.save,
            args=json.dumps(vars(args)),
            seed=seed,
            learning_rate=learning_rate,
            compile_seconds=compile_seconds,
            train_seconds=train_seconds,
            timesteps=timesteps,
            returns=returns,
            greedy_return=greedy_return,
            **params,
        )
    if args.plot:
        plot(args.plot, learning_rate, timesteps.mean(axis=1), np.array(returns))
    if args.gif:
        film(args.gif, args, {name: array[0] for name, array in params.items()})
    return 0 if interrupts.empty() else 130


if __name__ == "__main__":
    sys.exit(main())
