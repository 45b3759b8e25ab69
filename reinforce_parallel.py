# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""REINFORCE on N episodes at a time, of different lengths, padded and masked.

Each iteration plays N episodes with the current policy pi, then gives Adam the gradient estimate

    1/N sum_i sum_t mask_ti (G_ti - b_ti) grad log pi(A_ti | S_ti),    G_ti = R_ti + gamma G_t+1,i

(Williams 1992; Sutton & Barto 2018, section 13.4). The mask is 1 up to the last step of episode i
and 0 in the padding after it. The baseline b_ti is the mean of the other episodes' returns to go;
an episode that has ended counts as 0. The baseline adds no bias: the expected value is that of
sum_t G_t grad log pi(A_t | S_t). The factor gamma^t is left out, as is common: if gamma < 1, this
is not the gradient of any objective (Nota & Thomas 2020). Returns stop at the time limit.
--sync truncation cuts all episodes where the shortest one ends. This makes the estimate biased.

    python reinforce_parallel.py                                    # CartPole-v1
    python reinforce_parallel.py --env-id Pendulum-v1 --num-envs 128 --gif pendulum.gif

Shapes: R runs, K progress lines, U updates, T steps, N environments, E evaluation episodes,
D observation dimensions, H hidden units, A actions, or action dimensions if actions are continuous.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

# jax reads this when it is imported: each CPU core that this process may use becomes a device.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
import jax

if "--distributed" in sys.argv:  # before gymnax is imported, because gymnax creates arrays
    jax.distributed.initialize()

import gymnax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather

COMPILER_OPTIONS = {
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: up to a tenth faster
    "xla_backend_optimization_level": 1,  # twenty runs compile in half the time, run as fast
    # Do not split small arrays among threads: ten runs of Pendulum-v1 are 1.1 times as fast.
    "xla_disable_hlo_passes": "cpu-parallel-task-assigner",
}


@cache
def make(env_id):
    """Make an environment and its parameters. To change either, change it here."""
    env, env_params = gymnax.make(env_id)
    # NumPy arrays, because a program made by .compile() cannot hold JAX arrays as constants.
    return env, jax.tree.map(np.asarray, env_params)


def number(kind, low, high):
    """Make an argparse type: an int or a float in [low, high]. An int may be written 2e6."""

    def parse(text):
        value = float(text)
        if not low <= value <= high or value != kind(value):
            raise ValueError
        return kind(value)

    parse.__name__ = f"{kind.__name__} in [{low:g}, {high:g}]"  # argparse shows it in its error
    return parse


def output_file(path):
    """Check for argparse that a file can be opened for writing."""
    try:
        open(path, "ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path!r}: {error.strerror}") from error
    return path


def parse_args(argv=None):
    """Read and check the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument
    count = number(int, 1, 1e6)
    steps = number(int, 1, 1e9)
    unit = number(float, 0, 1)
    text = "gymnax environment"
    add("--env-id", choices=gymnax.registered_envs, default="CartPole-v1", help=text)
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of run 0; run i uses seed + i")
    add("--num-seeds", type=count, default=1, help="runs per learning rate, spread over devices")
    add("--num-iterations", type=count, default=100, help="updates per run")
    add("--num-envs", type=number(int, 2, 1e6), default=16, help="episodes per update")
    text = "initial step size of Adam, falls to 0; several values: each one runs with each seed"
    add("--learning-rate", type=unit, default=[0.01], nargs="+", help=text)
    add("--gamma", type=unit, default=0.99, help="discount factor")
    add("--hidden-size", type=count, default=64, help="number of tanh units in the policy network")
    text = "pad episodes to the longest, or cut all at the shortest (biased)"
    add("--sync", choices=["padding", "truncation"], default="padding", help=text)
    add("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    add("--log-interval", type=steps, default=5, help="iterations per progress line")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=output_file, metavar="FILE.npz", help="write parameters, curves, arguments")
    add("--plot", type=output_file, metavar="FILE.png", help="draw the learning curve of each run")
    text = "animate the first evaluation episode of run 0, at most 200 steps"
    add("--gif", type=output_file, metavar="FILE.gif", help=text)
    args = parser.parse_args(argv)
    if args.env_id == "MNISTBandit-bsuite":
        parser.error("MNISTBandit-bsuite would download its data")
    args.learning_updates = args.num_iterations
    return args


class Batch(NamedTuple):
    """Episodes side by side, padded to the time limit."""

    obs: jax.Array  # (T, N, D) flattened
    action: jax.Array  # (T, N), or (T, N, A) if continuous
    reward: jax.Array  # (T, N)
    mask: jax.Array  # (T, N) true where the step is real


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    learning_rate: jax.Array  # initial value
    params: dict  # w0 (D, H), b0 (H,), w1 (H, A), b1 (A,); log_std (A,) if actions are continuous
    opt_state: optax.OptState


def optimizer(args, learning_rate):
    """Make Adam. Its learning rate falls linearly to 0, from a value that differs between runs."""
    return optax.adam(optax.linear_schedule(learning_rate, 0.0, args.learning_updates))


def is_discrete(space):
    """Tell whether actions are numbers 0, ..., A - 1; if not, they are real vectors."""
    return isinstance(space, gymnax.environments.spaces.Discrete)


def init_state(args, seed, learning_rate):
    """Return the state in which the run with this seed starts."""
    env, env_params = make(args.env_id)
    space = env.action_space(env_params)
    inputs = math.prod(env.observation_space(env_params).shape)
    outputs = space.n if is_discrete(space) else math.prod(space.shape)
    key, key_hidden, key_output = jax.random.split(jax.random.key(seed), 3)
    params = {
        "w0": jax.random.normal(key_hidden, (inputs, args.hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(args.hidden_size),
        "w1": 0.01 * jax.random.normal(key_output, (args.hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }
    if not is_discrete(space):
        params["log_std"] = jnp.zeros(outputs)
    return TrainState(key, learning_rate, params, optimizer(args, learning_rate).init(params))


def policy(params, obs):
    """Logits (..., A) in observations (..., D), or means if actions are continuous."""
    return jnp.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def sample(params, obs, noise):
    """Actions (...) for Gumbel or normal noise (..., A); noise 0 gives the greedy actions."""
    if "log_std" in params:
        return policy(params, obs) + jnp.exp(params["log_std"]) * noise
    return jnp.argmax(policy(params, obs) + noise, axis=-1)  # as in jax.random.categorical


def log_prob(params, obs, action):
    """log pi(action | obs) (...) of a categorical or a diagonal Gaussian distribution."""
    if "log_std" in params:
        std = jnp.exp(params["log_std"])
        return jax.scipy.stats.norm.logpdf(action, policy(params, obs), std).sum(axis=-1)
    log_probs = jax.nn.log_softmax(policy(params, obs))
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


def to_bounds(space, action):
    """Clip continuous actions to [-1, 1] and map them to the environment's bounds."""
    if is_discrete(space):
        return action
    return space.low + (space.high - space.low) * (jnp.clip(action, -1, 1) + 1) / 2


def vector_step(args, params, carry, draws):
    """Step N environments. gymnax resets those that are done; the mask is 0 from there on."""
    env, env_params = make(args.env_id)
    obs, env_state, mask = carry
    noise, keys = draws  # (N, A), (N,)
    obs = obs.reshape(len(obs), -1).astype(float)  # (N, D)
    action = sample(params, obs, noise)
    step = jax.vmap(partial(env.step, params=env_params))
    bounded = to_bounds(env.action_space(env_params), action)
    next_obs, next_state, reward, terminated, truncated, _ = step(keys, env_state, bounded)
    carry = next_obs, next_state, mask & ~(terminated | truncated)
    return carry, (Batch(obs, action, reward.astype(float), mask), env_state)


def play(args, params, key, num_envs, noise_scale):
    """Play N episodes, greedily if noise_scale is 0. Return a batch and all states (T, N)."""
    env, env_params = make(args.env_id)
    key_reset, key_noise, key_step = jax.random.split(key, 3)
    keys = jax.random.split(key_reset, num_envs)
    obs, env_state = jax.vmap(partial(env.reset, params=env_params))(keys)
    shape = (int(env_params.max_steps_in_episode), num_envs)  # (T, N)
    draw = jax.random.normal if "log_std" in params else jax.random.gumbel
    draws = (  # for all steps at once: faster than inside the loop
        noise_scale * draw(key_noise, (*shape, *params["b1"].shape)),  # (T, N, A)
        jax.random.split(key_step, shape),
    )
    carry = obs, env_state, jnp.ones(num_envs, bool)
    _, (batch, env_states) = jax.lax.scan(partial(vector_step, args, params), carry, draws)
    return batch, env_states


def advantages(args, batch):
    """Each return to go (T, N) minus the mean of the other episodes'; 0 in the padding."""

    def step(later, reward):
        return_to_go = reward + args.gamma * later
        return return_to_go, return_to_go

    rewards = batch.mask * batch.reward
    _, returns = jax.lax.scan(step, jnp.zeros_like(rewards[0]), rewards, reverse=True)
    # Equal returns must give exactly 0: Adam would scale rounding errors up to full steps.
    returns = returns - returns[:, :1]
    others = (returns.sum(axis=1, keepdims=True) - returns) / (returns.shape[1] - 1)
    return batch.mask * (returns - others)


def loss(params, batch, advantage):
    """Surrogate loss: its gradient is minus the policy gradient estimate."""
    return -jnp.mean(jnp.sum(advantage * log_prob(params, batch.obs, batch.action), axis=0))


def train_step(args, state, _):
    """Play N episodes, then make one Adam step. Also return mean return and real step count."""
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


def train_chunk(args, num_updates, state):
    """Train up to the next progress line. Also return mean returns, real step counts (U,)."""
    return jax.lax.scan(partial(train_step, args), state, length=num_updates)


def evaluate(args, state):
    """Undiscounted returns (E,) of the greedy policy in E new episodes."""
    batch, _ = play(args, state.params, state.key, args.eval_episodes, noise_scale=0.0)
    return jnp.sum(batch.mask * batch.reward, axis=0)


def over_runs(function, num_devices, **jit_options):
    """Compile a function of one run for R runs: vmapped, and sharded over the devices."""
    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    runs = jax.P("runs")
    batched = jax.vmap(function)
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    sharded = jax.shard_map(batched, mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False)
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS, **jit_options)


def gather(tree, num_runs):
    """Copy the arrays of all runs, in all processes, to the host. Cut the surplus runs off."""
    # In a thread: Python handles Ctrl-C while it waits for a thread, but not inside of jax.
    host = ThreadPoolExecutor(1).submit(process_allgather, tree, tiled=True).result()
    return jax.tree.map(lambda array: array[:num_runs], host)


def catch_signals():
    """Collect Ctrl-C and SIGTERM in a list. The same signal again ends the process."""
    caught = []

    def handler(signum, frame):
        caught.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return caught


def plot(path, learning_rate, timesteps, returns):
    """Draw returns (K, R) over timesteps (K, R): each run thin, each rate's median in bold."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.figure()
    for i, rate in enumerate(np.unique(learning_rate)):
        x, y = timesteps[:, learning_rate == rate], returns[:, learning_rate == rate]
        plt.plot(x, y, f"C{i}", linewidth=0.5)
        x, y = np.median(x, axis=1), jnp.nanmedian(y, axis=1)  # NumPy's would warn if all are nan
        plt.plot(x, y, f"C{i}", linewidth=2, label=f"median, learning rate {rate:g}")
    plt.gca().xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    plt.xlabel("environment steps")
    plt.ylabel("return of training episodes")
    plt.legend()
    plt.savefig(path)


def animate(args, path, params, key):
    """Draw the first evaluation episode of a run, at most 200 steps, without a screen."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
    from gymnax.visualize import Visualizer

    batch, env_states = play(args, params, key, args.eval_episodes, noise_scale=0.0)
    steps = range(min(200, np.sum(batch.mask[:, 0])))
    frames = [jax.tree.map(lambda array, t=t: array[t, 0], env_states) for t in steps]
    Visualizer(*make(args.env_id), frames, np.cumsum(batch.reward[:, 0])).animate(path)


def main(argv=None, signals=()):
    """Train until done, or until `signals` is not empty. Evaluate, report, return the exit code."""
    args = parse_args(argv)
    make(args.env_id)  # here, since some environments cannot be made inside of jit
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = args.gif = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_runs = len(seed)
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if args.distributed else math.ceil(num_runs / per_device)
    padding = (0, num_devices * per_device - num_runs)  # copies of the last run fill the devices
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"{args.env_id}, {runs} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    init = over_runs(partial(init_state, args), num_devices)
    state = init(np.pad(seed, padding, "edge"), np.pad(learning_rate, padding, "edge"))
    ends = [*range(args.log_interval, args.num_iterations, args.log_interval), args.num_iterations]
    chunks = np.diff(ends, prepend=0)  # updates for each progress line
    programs = {}
    for updates in set(chunks):
        chunk = over_runs(partial(train_chunk, args, updates), num_devices, donate_argnums=0)
        programs[updates] = chunk.lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    began = time.perf_counter()
    steps, returns = [], []  # (K, R), (K, R)
    for updates, iteration in zip(chunks, ends, strict=True):
        state, report = programs[updates](state)
        mean_return, real_steps = gather(report, num_runs)  # (R, U)
        returns.append(mean_return.mean(axis=1))
        steps.append(real_steps.sum(axis=1, dtype=np.int64))
        train_seconds = time.perf_counter() - began
        speed = np.sum(steps) / train_seconds
        print(f"iteration {iteration:,}  return {returns[-1].mean():.1f}  {speed:,.0f} steps/s")
        if process_allgather(bool(signals)).any():  # in any process
            break

    greedy_return = over_runs(partial(evaluate, args), num_devices)(state)  # (R, E)
    arrays = greedy_return, state.params, jax.random.key_data(state.key)
    greedy_return, params, key_data = gather(arrays, num_runs)
    for rate in args.learning_rate:
        means = greedy_return[learning_rate == rate].mean(axis=1)
        print(f"learning rate {rate:g}: greedy return {means.mean():.1f}, worst {means.min():.1f}")
    timesteps, returns = np.cumsum(steps, axis=0), np.array(returns)  # (K, R)
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
        plot(args.plot, learning_rate, timesteps, returns)
    if args.gif:
        params = {name: array[0] for name, array in params.items()}
        animate(args, args.gif, params, jax.random.wrap_key_data(key_data[0]))
    return 130 if signals else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(main(signals=catch_signals()))
