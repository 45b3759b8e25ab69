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

The algorithm comes first, for one run. The flags, and what runs it on all devices, come after it.
"""

import argparse
import json
import math
import os
import sys
import time
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


@cache
def make(env_id):
    """Make an environment and its parameters. To change either, change it here."""
    env, env_params = gymnax.make(env_id)
    # NumPy arrays, because a program made by .compile() cannot hold JAX arrays as constants.
    return env, jax.tree.map(np.asarray, env_params)


def optimizer(args, learning_rate):
    """Make Adam. Its learning rate falls linearly to 0, from a value that differs between runs."""
    return optax.adam(optax.linear_schedule(learning_rate, 0.0, args.total_updates))


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


def network(params, obs):
    """Logits (..., A) in observations (..., D), or means if actions are continuous."""
    return jnp.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def sample(params, obs, noise):
    """Actions (...) for Gumbel or normal noise (..., A); noise 0 gives the greedy actions."""
    if "log_std" in params:
        return network(params, obs) + jnp.exp(params["log_std"]) * noise
    return jnp.argmax(network(params, obs) + noise, axis=-1)  # as in jax.random.categorical


def log_prob(params, obs, action):
    """log pi(action | obs) (...) of a categorical or a diagonal Gaussian distribution."""
    if "log_std" in params:
        std = jnp.exp(params["log_std"])
        return jax.scipy.stats.norm.logpdf(action, network(params, obs), std).sum(axis=-1)
    log_probs = jax.nn.log_softmax(network(params, obs))
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


def to_bounds(space, action):
    """Clip continuous actions to [-1, 1] and map them to the environment's bounds."""
    if is_discrete(space):
        return action
    return space.low + (space.high - space.low) * (jnp.clip(action, -1, 1) + 1) / 2


def play_step(args, params, carry, draws):
    """Step N environments. gymnax resets those that are done; the mask is 0 from there on."""
    env, env_params = make(args.env_id)
    obs, env_state, mask = carry
    noise, keys = draws  # (N, A), (N,)
    obs = obs.reshape(len(obs), -1).astype(float)  # (N, D)
    action = sample(params, obs, noise)
    step = jax.vmap(partial(env.step, params=env_params))
    bounded = to_bounds(env.action_space(env_params), action)
    new_obs, new_state, reward, terminated, truncated, _ = step(keys, env_state, bounded)
    carry = new_obs, new_state, mask & ~(terminated | truncated)
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
    _, (batch, env_states) = jax.lax.scan(partial(play_step, args, params), carry, draws)
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


def policy_loss(params, batch, advantage):
    """Surrogate loss: its gradient is minus the policy gradient estimate."""
    return -jnp.mean(jnp.sum(advantage * log_prob(params, batch.obs, batch.action), axis=0))


def train_step(args, state, _):
    """Play N episodes, then make one Adam step. Also return what progress lines show."""
    key, key_play = jax.random.split(state.key)
    batch, _ = play(args, state.params, key_play, args.num_envs, noise_scale=1.0)
    if args.sync == "truncation":
        batch = batch._replace(mask=batch.mask & jnp.all(batch.mask, axis=1, keepdims=True))
    grad = jax.grad(policy_loss)(state.params, batch, advantages(args, batch))
    updates, opt_state = optimizer(args, state.learning_rate).update(grad, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    episode_return = jnp.sum(batch.mask * batch.reward, axis=0)  # (N,)
    state = state._replace(key=key, params=params, opt_state=opt_state)
    return state, {"returns": jnp.mean(episode_return), "timesteps": jnp.sum(batch.mask)}


def train_chunk(args, state):
    """Make U updates, up to the next progress line. Also return what the line shows, (U,) each."""
    return jax.lax.scan(partial(train_step, args), state, length=args.chunk_updates)


def evaluate(args, state):
    """Undiscounted returns (E,) of the greedy policy in E new episodes."""
    batch, _ = play(args, state.params, state.key, args.eval_episodes, noise_scale=0.0)
    return jnp.sum(batch.mask * batch.reward, axis=0)


# Twenty runs compile in 0.6 of the time and run as fast.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 1}

# On a CPU, the data of many runs would leave the cache. A GPU takes all runs at once.
RUNS_AT_ONCE = 16 if jax.default_backend() == "cpu" else 10**6


def spread(num_runs, all_devices):
    """Spread R runs evenly. Return how many devices, runs at once on each, and copies to add."""
    num_devices = jax.device_count() if all_devices else min(num_runs, jax.device_count())
    per_device = math.ceil(num_runs / num_devices)
    num_batches = math.ceil(per_device / RUNS_AT_ONCE)
    at_once = math.ceil(per_device / num_batches)
    return num_devices, at_once, num_devices * num_batches * at_once - num_runs


def over_runs(function, num_devices, at_once):
    """Compile a function of one run for R runs: each device takes a few at a time, vmapped."""

    def on_one_device(*runs):
        return jax.lax.map(lambda run: function(*run), runs, batch_size=at_once)

    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(on_one_device, in_specs=jax.P("runs"), out_specs=jax.P("runs"))
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS)


def gather(tree, num_runs):
    """Copy the arrays of all runs, in all processes, to the host. Cut the padding off."""
    return jax.tree.map(lambda array: array[:num_runs], process_allgather(tree, tiled=True))


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
        if not path.endswith(suffix) or not os.access(os.path.dirname(path) or ".", os.W_OK):
            raise ValueError
        return path

    parse.__name__ = f"{suffix} file in a writable folder"
    return parse


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
    add(
        "--num-iterations",
        type=count,
        default=100,
        help="updates per run, rounded up to whole progress lines",
    )
    add("--num-envs", type=number(int, 2, 1e6), default=16, help="episodes per update")
    text = "initial step size of Adam, falls to 0; several values: each one runs with each seed"
    add("--learning-rate", type=unit, default=[0.01], nargs="+", help=text)
    add("--gamma", type=unit, default=0.99, help="discount factor")
    add("--hidden-size", type=count, default=64, help="number of tanh units in the policy network")
    text = "pad episodes to the time limit, or cut all at the shortest (biased)"
    add("--sync", choices=["padding", "truncation"], default="padding", help=text)
    add("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    add("--log-interval", type=steps, default=5, help="iterations per progress line, at most")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add(
        "--save", type=file_name(".npz"), metavar="FILE", help="write parameters, curves, arguments"
    )
    add("--plot", type=file_name(".png"), metavar="FILE", help="draw the learning curves")
    text = "animate the first evaluation episode of run 0, at most 200 steps"
    add("--gif", type=file_name(".gif"), metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.env_id == "MNISTBandit-bsuite":
        parser.error("MNISTBandit-bsuite would download its data")
    if len(set(args.learning_rate)) < len(args.learning_rate):
        parser.error("argument --learning-rate: the same value twice")
    args.num_chunks = math.ceil(args.num_iterations / args.log_interval)
    args.chunk_updates = math.ceil(args.num_iterations / args.num_chunks)
    args.total_updates = args.num_chunks * args.chunk_updates
    return args


def plot(path, learning_rate, timesteps, returns):
    """Draw returns (K, R) over timesteps (K,) or (K, R): runs thin, each rate's median in bold."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.figure()
    timesteps = np.broadcast_to(timesteps.T, returns.T.shape).T  # (K, R)
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


def main(argv=None):
    """Train, evaluate and report. Return what --save writes."""
    args = parse_args(argv)
    make(args.env_id)  # here, since some environments cannot be made inside of jit
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = args.gif = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_runs = len(seed)
    num_devices, at_once, copies = spread(num_runs, args.distributed)
    compiled = partial(over_runs, num_devices=num_devices, at_once=at_once)
    how_many = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"{args.env_id}, {how_many} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    runs = [np.pad(values, (0, copies), "edge") for values in (seed, learning_rate)]
    state = compiled(partial(init_state, args))(*runs)
    train = compiled(partial(train_chunk, args)).lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    iterations = args.chunk_updates * np.arange(1, args.num_chunks + 1)  # (K,)
    lines, train_seconds = [], 0.0
    try:
        for iteration in iterations:
            began = time.perf_counter()
            next_state, metrics = train(state)
            metrics = gather(metrics, num_runs)  # waits for the chunk; Ctrl-C is raised here
            timesteps = metrics["timesteps"].sum(axis=1, dtype=np.int64)
            lines.append({"timesteps": timesteps, "returns": metrics["returns"].mean(axis=1)})
            state = next_state
            train_seconds += time.perf_counter() - began
            speed = sum(line["timesteps"].sum() for line in lines) / train_seconds
            mean_return = lines[-1]["returns"].mean()
            print(f"iteration {iteration:,}  return {mean_return:.1f}  {speed:,.0f} steps/s")
    except KeyboardInterrupt:
        if args.distributed or not lines:
            raise
        print("interrupted: the results are those of the last line")

    greedy_return = compiled(partial(evaluate, args))(state)  # (R, E)
    arrays = greedy_return, state.params, jax.random.key_data(state.key)
    greedy_return, params, key_data = gather(arrays, num_runs)
    for rate in args.learning_rate:
        means = greedy_return[learning_rate == rate].mean(axis=1)
        mean, worst = means.mean(), means.min()
        print(f"learning rate {rate:g}: greedy return {mean:.1f}, worst run {worst:.1f}")
    results = {
        "args": json.dumps(vars(args)),
        "seed": seed,
        "learning_rate": learning_rate,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(lines) < args.num_chunks,
        "timesteps": np.cumsum([line["timesteps"] for line in lines], axis=0),  # (K, R)
        "returns": np.stack([line["returns"] for line in lines]),  # (K, R)
        "greedy_return": greedy_return,
        **params,
    }
    if args.save:
        np.savez(args.save, **results)
    if args.plot:
        plot(args.plot, learning_rate, results["timesteps"], results["returns"])
    if args.gif:
        params = {name: array[0] for name, array in params.items()}
        animate(args, args.gif, params, jax.random.wrap_key_data(key_data[0]))
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
