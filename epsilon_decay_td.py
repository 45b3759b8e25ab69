# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""Q-learning with decaying exploration on CartPole-v1: replay_td.py, but epsilon falls.

    epsilon = max(end_e, start_e epsilon_decay^t)    in vector step t = 0, 1, ...
    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / OBS_SCALE - c_i|^2 / (2 sigma^2)),    random c_i
    target  = r + gamma max_a' Q'(s', a'),    or r if s' is terminal

A ring keeps the last C transitions. After each vector step B of them are drawn (Lin 1992) for one
Adam step on the mean squared TD error: neighbours in time are alike, those drawn are not. Q' has
the running average of the weights, w' <- w' + tau (w - w') (Lillicrap et al. 2016, section 3), so
that the target does not run after every single update of the weights. No gradient flows
through the target (semi-gradient Q-learning; Sutton & Barto 2018, section 11.1), and only a
terminal state cuts the bootstrap, not a time limit (Pardo et al. 2018). The learning rate falls
to 0 over the run, so that learning settles and the last weights are the result.

    python epsilon_decay_td.py                                    # one run
    python epsilon_decay_td.py --num-seeds 20 --plot curve.png    # twenty, in one compiled program

Shapes: R runs, U updates, C ring, N environments, B transitions, F features, A actions.
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

# jax reads these when it is imported: each core is a device; the arrays, small here, are not split
# among threads; vectors are as wide as they can be; a lower level of optimisation and the older
# code generator compile in a third of the time.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(os.cpu_count()))
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_disable_hlo_passes=cpu-parallel-task-assigner --xla_cpu_prefer_vector_width=512"
    " --xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false",
)
import jax

if "--distributed" in sys.argv:  # before gymnax is imported, since that makes arrays
    jax.distributed.initialize()

import gymnax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather

ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
env_reset = jax.vmap(ENV.reset)  # of keys (N,)
env_step = jax.vmap(ENV.step)  # of keys, states, actions (N,)
OBS_SCALE = np.array([2.4, 3.0, 0.2, 3.0], np.float32)  # m, m/s, rad, rad/s: about the largest


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
    add("--total-timesteps", type=number(int, 1, 1e9), default=500_000, help="steps of a run")
    add("--num-envs", type=count, default=16, help="environments in lockstep")
    add("--buffer-size", type=count, default=100_000, help="transitions that are kept")
    add("--learning-starts", type=count, default=1_000, help="transitions before the first update")
    add("--batch-size", type=count, default=32, help="transitions per update")
    add("--tau", type=share, default=0.005, help="step of the averaged weights in the target")
    add("--learning-rate", type=share, default=[0.01], nargs="+", help="at first; runs with each")
    add("--gamma", type=share, default=0.99, help="discount factor")
    add("--start-e", type=share, default=1.0, help="probability of a random action, at first")
    add("--end-e", type=share, default=0.01, help="probability of a random action, at last")
    add("--epsilon-decay", type=share, default=0.999, help="factor per vector step")
    add("--num-centers", type=count, default=500, help="radial basis features")
    add("--sigma", type=number(float, 1e-3, 1e3), default=0.5, help="width of the features")
    add("--eval-episodes", type=count, default=100, help="greedy episodes at the end")
    add("--log-interval", type=count, default=20_000, help="environment steps per progress line")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", metavar="FILE.npz", help="write weights, learning curve and arguments")
    add("--plot", metavar="FILE.png", help="draw the learning curve")
    args = parser.parse_args(argv)
    if args.buffer_size < args.num_envs:
        parser.error("--buffer-size must be at least --num-envs")
    for path in [args.save, args.plot]:
        if path and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"no such folder: {path}")
    updates = math.ceil(args.total_timesteps / args.num_envs)
    num_lines = min(updates, math.ceil(args.total_timesteps / args.log_interval))
    args.log_updates = math.ceil(updates / num_lines)
    args.total_updates = num_lines * args.log_updates
    return args


class Transition(NamedTuple):
    """What one environment step leaves to learn from."""

    obs: jax.Array  # (4,)
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # (4,) the true successor, also where the episode ended
    terminated: jax.Array  # false at a time limit


class TrainState(NamedTuple):
    """All that changes during a run."""

    key: jax.Array
    learning_rate: jax.Array  # at first
    centers: jax.Array  # (F, 4)
    weights: jax.Array  # (A, F)
    target_weights: jax.Array  # (A, F) their running average
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, 4)
    episode_return: jax.Array  # (N,) so far
    buffer: Transition  # (C,) a ring
    written: jax.Array  # transitions so far
    vector_steps: jax.Array  # so far


def optimizer(args, learning_rate):
    """Adam, its learning rate falling linearly to 0."""
    return optax.adam(optax.linear_schedule(learning_rate, 0.0, args.total_updates))


def init_state(args, seed, learning_rate):
    """The state in which the run with this seed starts."""
    key, key_reset, key_centers = jax.random.split(jax.random.key(seed), 3)
    obs, env_state = env_reset(jax.random.split(key_reset, args.num_envs))
    weights = jnp.zeros((ENV.num_actions, args.num_centers))
    zeros = jnp.zeros(args.buffer_size)
    zeros_obs = jnp.zeros((args.buffer_size, 4))
    return TrainState(
        key=key,
        learning_rate=learning_rate,
        centers=jax.random.uniform(key_centers, (args.num_centers, 4), minval=-1.0, maxval=1.0),
        weights=weights,
        target_weights=weights,
        opt_state=optimizer(args, learning_rate).init(weights),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(args.num_envs),
        buffer=Transition(zeros_obs, zeros.astype(int), zeros, zeros_obs, zeros.astype(bool)),
        written=jnp.array(0),
        vector_steps=jnp.array(0),
    )


def rbf_features(obs, centers, sigma):
    """Features (F, B) of observations (B, 4); a third faster than as (B, F)."""
    difference = centers[:, None, :] - obs / OBS_SCALE  # (F, B, 4)
    return jnp.exp(-jnp.sum(difference**2, axis=-1) / (2 * sigma**2))


def q_values(args, weights, centers, obs):
    """Values (A, B) of the actions in observations (B, 4)."""
    return weights @ rbf_features(obs, centers, args.sigma)


def epsilon(args, vector_steps):
    """Probability of a random action after so many vector steps."""
    return jnp.maximum(args.end_e, args.start_e * args.epsilon_decay**vector_steps)


def vector_step(args, state, random):
    """Step N environments epsilon-greedily; the return where an episode ended, else NaN (N,)."""
    keys, uniform, random_action = random  # (N,)
    greedy = jnp.argmax(q_values(args, state.weights, state.centers, state.obs), axis=0)
    explore = uniform < epsilon(args, state.vector_steps)
    action = jnp.where(explore, random_action, greedy)
    obs, env_state, reward, terminated, truncated, info = env_step(keys, state.env_state, action)
    transition = Transition(state.obs, action, reward, info["final_observation"], terminated)
    total = state.episode_return + reward
    done = terminated | truncated
    state = state._replace(env_state=env_state, obs=obs, episode_return=jnp.where(done, 0.0, total))
    return state, (transition, jnp.where(done, total, jnp.nan))


def td_loss(weights, target_weights, centers, batch, args):
    """Half the mean squared TD error of a batch of transitions (B,)."""
    next_q = jnp.max(q_values(args, target_weights, centers, batch.next_obs), axis=0)
    target = jax.lax.stop_gradient(batch.reward + args.gamma * (1 - batch.terminated) * next_q)
    taken = jax.nn.one_hot(batch.action, ENV.num_actions, axis=0)  # (A, B)
    q_taken = jnp.sum(taken * q_values(args, weights, centers, batch.obs), axis=0)
    return 0.5 * jnp.mean((q_taken - target) ** 2)


def train_step(args, state, random):
    """Write the transitions of a vector step into the ring, learn from a batch drawn from it."""
    batch_uniform, *step_random = random  # (B,); (N,) each
    state, (transitions, returns) = vector_step(args, state, step_random)
    slots = (state.written + jnp.arange(args.num_envs)) % args.buffer_size
    buffer = jax.tree.map(lambda ring, new: ring.at[slots].set(new), state.buffer, transitions)
    written = state.written + args.num_envs
    drawn = (batch_uniform * jnp.minimum(written, args.buffer_size)).astype(int)  # (B,)
    batch = jax.tree.map(lambda ring: ring[drawn], buffer)
    grad = jax.grad(td_loss)(state.weights, state.target_weights, state.centers, batch, args)
    updates, opt_state = optimizer(args, state.learning_rate).update(grad, state.opt_state)
    weights = optax.apply_updates(state.weights, updates)
    learned = partial(jnp.where, written >= args.learning_starts)
    weights = learned(weights, state.weights)
    opt_state = jax.tree.map(learned, opt_state, state.opt_state)
    state = state._replace(
        weights=weights,
        target_weights=optax.incremental_update(weights, state.target_weights, args.tau),
        opt_state=opt_state,
        buffer=buffer,
        written=written,
        vector_steps=state.vector_steps + 1,
    )
    return state, returns


def train_chunk(args, state):
    """All updates up to the next progress line; mean return of the episodes that ended, or NaN."""
    key, key_batch, key_step, key_uniform, key_action = jax.random.split(state.key, 5)
    shape = (args.log_updates, args.num_envs)  # (U, N)
    random = (  # for all steps at once: faster than inside the loop
        jax.random.uniform(key_batch, (args.log_updates, args.batch_size)),
        jax.random.split(key_step, shape),
        jax.random.uniform(key_uniform, shape),
        jax.random.randint(key_action, shape, 0, ENV.num_actions),
    )
    state, returns = jax.lax.scan(partial(train_step, args), state._replace(key=key), random)
    return state, jnp.nanmean(returns)


def evaluate(args, state):
    """Returns (E,) of the greedy policy in E fresh episodes."""
    key_reset, key_step = jax.random.split(state.key)
    obs, env_state = env_reset(jax.random.split(key_reset, args.eval_episodes))
    total = jnp.zeros(args.eval_episodes)
    state = state._replace(env_state=env_state, obs=obs, episode_return=total)
    shape = (ENV_PARAMS.max_steps_in_episode, args.eval_episodes)  # (T, E)
    uniform = jnp.ones(shape)  # 1 is never below epsilon: no random actions
    random = (jax.random.split(key_step, shape), uniform, jnp.zeros(shape, int))
    _, (_, returns) = jax.lax.scan(partial(vector_step, args), state, random)
    first = jnp.argmax(~jnp.isnan(returns), axis=0)  # when the first episode ended
    return returns[first, jnp.arange(args.eval_episodes)]


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


def main(argv=None):
    """Train, evaluate, report; the exit code."""
    args = parse_args(argv)
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_devices = math.gcd(jax.device_count(), len(seed))
    if args.distributed and num_devices < jax.device_count():
        sys.exit(f"the number of runs must be a multiple of the {jax.device_count()} devices")
    print(f"CartPole-v1, {len(seed)} runs on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    state = over_runs(partial(init_state, args), num_devices)(seed, learning_rate)
    chunk = over_runs(partial(train_chunk, args), num_devices, donate_argnums=0)
    chunk = chunk.lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    interrupts = queue.SimpleQueue()
    signal.signal(signal.SIGINT, interrupts.put)  # Ctrl-C lets the chunk under way end
    began = time.perf_counter()
    timesteps, returns = [], []  # (K,), (K, R)
    for updates in range(args.log_updates, args.total_updates + 1, args.log_updates):
        state, mean_return = chunk(state)
        returns.append(process_allgather(mean_return, tiled=True))
        timesteps.append(updates * args.num_envs)
        train_seconds = time.perf_counter() - began
        speed = timesteps[-1] * len(seed) / train_seconds
        print(f"step {timesteps[-1]:,}  return {returns[-1].mean():.1f}  {speed:,.0f} steps/s")
        if process_allgather(not interrupts.empty()).any():  # in any process
            break

    greedy_return = over_runs(partial(evaluate, args), num_devices)(state)  # (R, E)
    arrays = greedy_return, state.centers, state.weights
    greedy_return, centers, weights = process_allgather(arrays, tiled=True)
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
            centers=centers,
            weights=weights.mT,  # (R, F, A)
        )
    if args.plot:
        plot(args.plot, learning_rate, timesteps, np.array(returns))
    return 0 if interrupts.empty() else 130


if __name__ == "__main__":
    sys.exit(main())
