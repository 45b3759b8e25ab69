# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["jax==0.10.1", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0"]  # gymnax needs six
# ///
r"""Q-learning with decaying exploration: replay_td.py, but epsilon falls during the run.

    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / scale - c_i|^2 / (2 sigma^2))
    target  = r + gamma max_a' Q_avg(s', a'),    or r if s' is terminal
    epsilon = max(end_e, start_e epsilon_decay^t)    in vector step t = 0, 1, ...

The features phi are radial basis functions with random centers c_i (Sutton & Barto 2018, section
9.5.5). Each batch of B transitions gives one Adam step on half the mean squared TD error.

No gradient flows through the target (section 11.1). With function approximation, Q-learning may
diverge (section 11.3). Where only the time limit ends an episode, the value of s' still counts
(Pardo et al. 2018). The learning rate falls linearly to 0.

A ring buffer keeps the last C transitions (experience replay, Lin 1992). After each vector step
(one step of all N environments), a batch is drawn from it at random, since these transitions are
less correlated than successive ones (Mnih et al. 2015). Q_avg is Q with slowly averaged weights:
after each update, w_avg <- w_avg + tau (w - w_avg) (Lillicrap et al. 2016, section 3).

    python epsilon_decay_td.py                                                   # one run
    python epsilon_decay_td.py --end-e 0 0.25 --num-seeds 20 --plot curve.png    # forty runs
    python epsilon_decay_td.py --env-id Acrobot-v1 --num-centers 1000 --total-timesteps 5e5
    python epsilon_decay_td.py --env-id MountainCar-v0 --num-centers 1000 --total-timesteps 5e5 \
        --learning-rate 0.01 --sigma 0.15

Shapes: R runs, K intervals, N = num_envs environments, D observation dimensions, F = num_centers
features, A actions, C = buffer_size transitions in the buffer, B = batch_size of a batch.
"""

import argparse
import json
import math
import os
import time
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import NamedTuple

# Each logical CPU becomes a device of jax. This must be set before jax is imported.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnax.wrappers import LogWrapper

# What each observation is divided by, so that centers in [-1, 1] cover the states that matter.
# To use another environment, add its scale here. With more dimensions, centers are farther away:
# try a larger --sigma, or all features will be near 0.
OBS_SCALE = {
    "CartPole-v1": [2.4, 3.0, 0.2, 3.0],  # m, m/s, rad, rad/s: the limits, and typical speeds
    "Acrobot-v1": [1.0, 1.0, 1.0, 1.0, 6.0, 12.0],  # cos, sin (twice); rad/s: about half the limits
    "MountainCar-v0": [1.2, 0.07],  # position: the left wall; speed: the maximum
}


def count(text):
    """Read a flag: an integer of at least 1. It may be written 2e6."""
    value = float(text)
    if not 1 <= value <= 2**30 or value != int(value):
        raise ValueError
    return int(value)


def fraction(text):
    """Read a flag: a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def positive(text):
    """Read a flag: a number above 0."""
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def check_file(parser, path, *endings):
    """Refuse a wrong ending or a folder that cannot be written, before anything is computed."""
    if path and not (path.endswith(endings) and os.access(os.path.dirname(path) or ".", os.W_OK)):
        parser.error(f"{path} must end in {' or '.join(endings)}, in a folder that can be written")


def parse_args(argv=None):
    """Read the flags. Those of `sweep` take several values (a list), and all combinations run."""
    style = argparse.ArgumentDefaultsHelpFormatter
    what = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=what, formatter_class=style, allow_abbrev=False)
    flag = parser.add_argument
    sweep = partial(flag, nargs="+")
    flag("--env-id", choices=list(OBS_SCALE), default="CartPole-v1", help="gymnax environment")
    flag("--seed", type=int, default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    flag("--total-timesteps", type=count, default=250_000, help="environment steps of a run")
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    flag("--buffer-size", type=count, default=250_000, help="transitions that the buffer holds")
    flag("--batch-size", type=count, default=32, help="transitions per update")
    sweep("--tau", type=fraction, default=[0.01], help="step size of the averaged weights")
    sweep("--learning-rate", type=positive, default=[0.04], help="initial value, falls to 0")
    sweep("--gamma", type=fraction, default=[0.99], help="discount factor")
    sweep("--start-e", type=fraction, default=[1.0], help="initial probability of a random action")
    sweep("--end-e", type=fraction, default=[0.15], help="lowest probability of a random action")
    sweep("--epsilon-decay", type=fraction, default=[0.9997], help="factor per vector step")
    flag("--num-centers", type=count, default=500, help="number of radial basis features")
    sweep("--sigma", type=positive, default=[0.5], help="width of the features")
    flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    flag("--save", metavar="FILE.npz", help="write weights, learning curves and flags")
    flag("--plot", metavar="FILE.png", help="draw the learning curves (.png, .pdf, .svg)")
    args = parser.parse_args(argv)
    check_file(parser, args.save, ".npz")
    check_file(parser, args.plot, ".png", ".pdf", ".svg")
    if args.seed < 0 or args.seed + args.num_seeds > 2**31:
        parser.error("--seed and the seeds that follow must be from 0 to 2**31 - 1")
    if args.buffer_size < args.num_envs:
        parser.error("--buffer-size must be at least --num-envs")
    # All intervals are equally long. In the last, updates beyond num_updates have a rate of 0.
    args.num_updates = math.ceil(args.total_timesteps / args.num_envs)
    args.interval_updates = math.ceil(args.num_updates / args.num_intervals)
    args.num_intervals = math.ceil(args.num_updates / args.interval_updates)
    args.interval_timesteps = args.interval_updates * args.num_envs
    return args


def make_env(args):
    """Make the environment, and its parameters. This is the place to change them."""
    env, env_params = gymnax.make(args.env_id)
    return LogWrapper(env), env_params


# The algorithm, for one run. `run` holds its flags, `env` and `env_params`. Its seed and its values
# of swept flags are traced arrays: use them in arithmetic, not as a shape or in `if`.
# `compile_over_runs` vmaps these functions over many runs.


class Transition(NamedTuple):
    """One environment transition."""

    obs: jax.Array  # (D,)
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # (D,) before the reset, if the episode ended
    terminated: jax.Array  # true if next_obs is terminal; false if only time has run out


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    centers: jax.Array  # (D, F) never trained
    weights: jax.Array  # (A, F)
    target_weights: jax.Array  # (A, F) running average of weights
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, D)
    timesteps: jax.Array  # environment steps so far
    buffer: Transition  # (C,) a ring


def optimizer(run):
    """Adam, with a rate that falls linearly to 0. What it remembers is kept in `opt_state`."""
    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))


def init_state(run):
    """Initial state of one run."""
    key, key_reset, key_centers = jax.random.split(jax.random.key(run.seed), 3)
    keys = jax.random.split(key_reset, run.num_envs)
    obs, env_state = jax.vmap(partial(run.env.reset, params=run.env_params))(keys)
    weights = jnp.zeros((run.env.action_space(run.env_params).n, run.num_centers))
    no_obs = jnp.zeros((run.buffer_size, *obs.shape[1:]), obs.dtype)
    return TrainState(
        key=key,
        centers=jax.random.uniform(key_centers, (obs[0].size, run.num_centers), minval=-1.0),
        weights=weights,
        target_weights=weights,
        opt_state=optimizer(run).init(weights),
        env_state=env_state,
        obs=obs,
        timesteps=jnp.array(0),
        buffer=Transition(
            obs=no_obs,
            action=jnp.zeros(run.buffer_size, int),
            reward=jnp.zeros(run.buffer_size),
            next_obs=no_obs,
            terminated=jnp.zeros(run.buffer_size, bool),
        ),
    )


def features(run, centers, obs):
    """Radial basis functions phi (F,) of an observation (D,)."""
    scale = jnp.array(OBS_SCALE[run.env_id]).reshape(obs.size)  # fails if lengths differ
    difference = (obs.reshape(-1) / scale)[:, None] - centers  # (D, F)
    return jnp.exp(-jnp.sum(difference**2, axis=0) / (2 * run.sigma**2))


def q_values(run, centers, weights, obs):
    """Values (A,) of all actions in an observation (D,)."""
    phi = features(run, centers, obs)
    # weights @ phi, one row at a time: 1.8 times as fast on a CPU, but many rows compile slowly.
    return jnp.stack([w_a @ phi for w_a in weights])


def select_action(epsilon, q, uniform):
    """Choose an action epsilon-greedily from values (A,), given two random numbers in [0, 1)."""
    coin, choice = uniform
    random_action = (len(q) * choice).astype(int)  # rounded down, so each is equally likely
    return jnp.where(coin < epsilon, random_action, jnp.argmax(q))


def exploration_rate(run, t):
    """Probability epsilon of a random action in vector step t."""
    return jnp.maximum(run.end_e, run.start_e * run.epsilon_decay**t)


def vector_step(run, state, epsilon):
    """Step N environments. Also return the transitions, and sums over the episodes that ended."""
    key, key_step, key_uniform = jax.random.split(state.key, 3)
    step_keys = jax.random.split(key_step, run.num_envs)
    uniform = jax.random.uniform(key_uniform, (run.num_envs, 2))
    q = jax.vmap(partial(q_values, run, state.centers, state.weights))(state.obs)  # (N, A)
    action = jax.vmap(partial(select_action, epsilon))(q, uniform)  # (N,)
    env_step = jax.vmap(partial(run.env.step, params=run.env_params))
    obs, env_state, reward, terminated, _, info = env_step(step_keys, state.env_state, action)
    transitions = Transition(
        obs=state.obs,
        action=action,
        reward=reward,
        next_obs=info["final_observation"],  # `obs` may already belong to the next episode
        terminated=terminated,
    )
    # LogWrapper repeats the last return in every step: count it only where an episode ended.
    ended = info["returned_episode"]
    returns = jnp.sum(info["returned_episode_returns"], where=ended)
    sums = {"returns": returns, "episodes": jnp.sum(ended)}
    return state._replace(key=key, env_state=env_state, obs=obs), (transitions, sums)


def td_target(run, centers, weights, transition):
    """Target of one transition: r + gamma max_a' Q(s', a'), or r if s' is terminal."""
    next_q = q_values(run, centers, weights, transition.next_obs)  # (A,)
    next_value = jnp.where(transition.terminated, 0.0, jnp.max(next_q))
    return transition.reward + run.gamma * next_value


def td_loss(run, centers, weights, batch, targets):
    """Half the mean squared TD error of a batch (B,). Also return what a progress line shows."""

    def value(obs, action):
        return q_values(run, centers, weights, obs)[action]

    values = jax.vmap(value)(batch.obs, batch.action)  # (B,)
    errors = targets - values
    metrics = {"td_error": jnp.mean(jnp.abs(errors)), "q_value": jnp.mean(values)}
    return jnp.mean(errors**2) / 2, metrics


def train_step(run, state, _):
    """Store the transitions of one vector step, then learn from a random batch of all stored."""
    slots = (state.timesteps + jnp.arange(run.num_envs)) % run.buffer_size
    epsilon = exploration_rate(run, state.timesteps // run.num_envs)  # vector steps so far
    state, (transitions, sums) = vector_step(run, state, epsilon)
    buffer = jax.tree.map(lambda old, new: old.at[slots].set(new), state.buffer, transitions)
    key, key_batch = jax.random.split(state.key)
    timesteps = state.timesteps + run.num_envs
    state = state._replace(key=key, buffer=buffer, timesteps=timesteps)
    num_stored = jnp.minimum(timesteps, run.buffer_size)
    chosen = jax.random.randint(key_batch, run.batch_size, 0, num_stored)
    batch = jax.tree.map(lambda column: column[chosen], buffer)  # (B,)
    # The targets are computed outside of the loss, so no gradient flows through them.
    targets = jax.vmap(partial(td_target, run, state.centers, state.target_weights))(batch)  # (B,)
    loss = partial(td_loss, run, state.centers)
    grad, metrics = jax.grad(loss, has_aux=True)(state.weights, batch, targets)
    updates, opt_state = optimizer(run).update(grad, state.opt_state, state.weights)
    weights = optax.apply_updates(state.weights, updates)
    target_weights = optax.incremental_update(weights, state.target_weights, run.tau)
    state = state._replace(weights=weights, target_weights=target_weights, opt_state=opt_state)
    return state, ({"epsilon": epsilon, **metrics}, sums)


def train_interval(run, state):
    """Make the updates up to the next progress line. Also return what it shows."""
    one_update = partial(train_step, run)
    state, (metrics, sums) = jax.lax.scan(one_update, state, length=run.interval_updates)
    means = jax.tree.map(jnp.mean, metrics)
    episodes = jnp.sum(sums["episodes"])
    returns = jnp.sum(sums["returns"]) / episodes  # nan if none ended
    return state, {"returns": returns, "episodes": episodes, **means}


def greedy_return(run, centers, weights, key):
    """Undiscounted return of one greedy episode."""

    def step(carry, key):
        obs, env_state = carry
        action = jnp.argmax(q_values(run, centers, weights, obs))
        obs, env_state, _, _, _, info = run.env.step(key, env_state, action, run.env_params)
        return (obs, env_state), info

    key_reset, key_steps = jax.random.split(key)
    keys = jax.random.split(key_steps, run.env_params.max_steps_in_episode)
    start = run.env.reset(key_reset, run.env_params)
    _, info = jax.lax.scan(step, start, keys)  # LogWrapper's statistics after each step
    ended = info["returned_episode"]
    first = info["returned_episode_returns"][jnp.argmax(ended)]
    return jnp.where(jnp.any(ended), first, jnp.nan)


def evaluate(run, state):
    """Results of a run: the returns of greedy episodes, and what was learned."""
    # `fold_in` makes a key that training never uses: a run may be evaluated, and then go on.
    keys = jax.random.split(jax.random.fold_in(state.key, 999), run.eval_episodes)
    returns = jax.vmap(partial(greedy_return, run, state.centers, state.weights))(keys)
    returns = jnp.where(jnp.all(jnp.isfinite(state.weights)), returns, jnp.nan)  # nan: diverged
    return {"greedy_return": returns, "centers": state.centers, "weights": state.weights}


# Many runs at once. What follows is not about learning.


def report(learned, rows):
    """Summary of one setting, whose runs are `rows`. ±: 1.96 standard errors, 95 % if many run."""
    means = learned["greedy_return"][rows].mean(axis=1)  # one for each run
    text = f"greedy return {means.mean():#.4g}"
    if len(means) > 1:
        error = means.std(ddof=1) / math.sqrt(len(means))
        text += f" ± {1.96 * error:.3g}  worst run {means.min():#.4g}"
    return text


def draw(args, settings, results):
    """Draw the returns (K, R) of training: runs thin, the median of each setting bold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4 + 0.2 * len(settings)), layout="constrained")
    axes = figure.subplots()
    x, y = results["curves"]["timesteps"], results["curves"]["returns"]
    for i, (label, rows) in enumerate(settings):
        axes.plot(x[:, rows], y[:, rows], f"C{i % 10}.-", linewidth=0.5, alpha=0.3)
        median = np.median(x[:, rows], axis=1), np.nanmedian(y[:, rows], axis=1)
        axes.plot(*median, f"C{i % 10}.-", linewidth=2, label=f"median, {label}")
    axes.set(xlabel="environment steps", ylabel="return of training episodes")
    figure.legend(loc="outside upper center", fontsize="small")
    figure.savefig(args.plot)


AT_ONCE = 32  # runs vmapped together on a core of a CPU; more at once are slower
COMPILER_OPTIONS = {
    "cpu": {
        "xla_backend_optimization_level": 1,  # compiles in 0.7 of the time of level 3, runs as fast
        "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.1 to 1.3 times as fast
        # From jax 0.11 on: no library calls for small matrices, 1.5 times as fast.
        "xla_disable_hlo_passes": "dot-library-rewriter",
    },
    "gpu": {"xla_gpu_autotune_level": 0},  # otherwise, results differ between commands
}


def make_runs(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and the (label, rows) of each setting.
    """
    swept = {name: values for name, values in vars(args).items() if isinstance(values, list)}
    varied = [name for name in swept if len(swept[name]) > 1]
    swept["seed"] = range(args.seed, args.seed + args.num_seeds)
    arrays = np.meshgrid(*swept.values(), indexing="ij")  # the seed varies fastest
    runs = {name: array.ravel() for name, array in zip(swept, arrays, strict=True)}
    settings = []
    for i in range(0, len(runs["seed"]), args.num_seeds):
        label = ", ".join(f"{name} {runs[name][i]}" for name in varied)
        settings.append((label or "all runs", slice(i, i + args.num_seeds)))
    return runs, settings


def compile_over_runs(function, *inputs, fixed, devices, donate=()):
    """Compile function(run, *arrays) of one run into a function of (runs, *arrays) of all."""

    def one_run(arrays):
        own, *others = arrays  # its own seed and values of swept flags
        return function(SimpleNamespace(**(fixed | own)), *others)

    def one_device(*arrays):
        if devices[0].platform == "cpu":
            return jax.lax.map(one_run, arrays, batch_size=AT_ONCE)
        return jax.vmap(one_run)(arrays)

    mesh = jax.sharding.Mesh(devices, "runs")
    axis = jax.sharding.PartitionSpec("runs")  # the first axis of each array is divided
    # check_vma would reject loops whose carry starts as a constant.
    sharded = jax.shard_map(one_device, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS.get(devices[0].platform)
    jitted = jax.jit(sharded, compiler_options=options, donate_argnums=donate)
    return jitted.lower(*inputs).compile()


def setting_mean(metrics, name, rows):
    """Mean of a metric over the runs of one setting. Returns are averaged over all episodes."""
    values, episodes = metrics[name][rows], metrics["episodes"][rows]
    if name != "returns":
        return values.mean()
    ended = episodes > 0
    return np.average(values[ended], weights=episodes[ended]) if any(ended) else np.nan


def low_to_high(numbers, form="#.4g"):
    """Text of the lowest and the highest number, or of one if they look the same. nan is last."""
    ends = [f"{number:{form}}" for number in np.sort(numbers)[[0, -1]]]
    return " to ".join(dict.fromkeys(ends))


def gather(tree, num_runs):
    """Copy arrays from all devices to the host, without the repeated runs."""
    return jax.tree.map(lambda array: np.asarray(array)[:num_runs], tree)


def flat(tree):
    """Make {name: array} of any tree. Names are joined, as in curves.timesteps."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def main(argv=None):
    """Train, evaluate and report. Return what --save writes, as nested dictionaries."""
    args = parse_args(argv)  # if None, from the command line; in a notebook, call main([])
    versions = {name: version(name) for name in ("jax", "jaxlib", "optax", "gymnax")}
    env, env_params = make_env(args)
    runs, settings = make_runs(args)
    num_runs = len(runs["seed"])
    devices = jax.devices()[:num_runs]
    # The first runs are repeated until each device has equally many.
    length = math.ceil(num_runs / len(devices)) * len(devices)
    padded = {name: np.resize(array, length) for name, array in runs.items()}

    # Everything is compiled before training, so that errors surface now.
    began = time.perf_counter()
    fixed = vars(args) | {"env": env, "env_params": env_params}
    over_runs = partial(compile_over_runs, fixed=fixed, devices=devices)
    state = over_runs(init_state, padded)(padded)
    train = over_runs(train_interval, padded, state, donate=1)  # it may reuse the state's memory
    finish = over_runs(evaluate, padded, state)
    hardware = f"{len(devices)} x {devices[0].device_kind}"
    seconds = time.perf_counter() - began
    print(f"runs: {num_runs}  devices: {hardware}  compiled in {seconds:.1f} s")
    shown = "means over all runs" if len(settings) == 1 else "lowest to highest mean of a setting"
    print(f"{shown} (returns: over all episodes)", flush=True)

    history = []
    began = time.perf_counter()
    for i in range(1, args.num_intervals + 1):
        state, metrics = train(padded, state)
        metrics = gather(metrics, num_runs)  # waits for `train`
        seconds = time.perf_counter() - began
        timesteps = np.full(num_runs, i * args.interval_timesteps)
        history.append({"timesteps": timesteps, "seconds": seconds, **metrics})  # add a logger here
        words = []
        for name in metrics:
            means = [setting_mean(metrics, name, rows) for _, rows in settings]
            words.append(f"{name} {low_to_high(means)}")
        speed = f"{timesteps.sum() / seconds:,.0f} steps/s in total"
        print(f"step {timesteps[0]:,}", *words, speed, sep="  ", flush=True)

    learned = gather(finish(padded, state), num_runs)  # (R, ...) each
    curves = jax.tree.map(lambda *values: np.stack(values), *history)  # (K, R) each; seconds (K,)
    results = {
        "args": json.dumps(vars(args)),
        "versions": json.dumps(versions),
        "runs": runs | {"setting": np.repeat([label for label, _ in settings], args.num_seeds)},
        "curves": curves,
        "learned": learned,
    }
    if args.save:
        np.savez(args.save, **flat(results))
    for label, rows in settings:
        print(f"{label}: {report(learned, rows)}")
    if args.plot:
        draw(args, settings, results)
    return results


if __name__ == "__main__":
    main()
