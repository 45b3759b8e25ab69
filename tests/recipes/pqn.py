# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["jax==0.10.1", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0"]  # gymnax needs six
# ///
"""PQN: Q-learning with a normalized network and N parallel environments, without a replay buffer.

Each iteration plays T steps in N environments, and then learns from these B = T * N transitions
several times, in minibatches (Gallici et al. 2025). A minibatch gives one RAdam step on half the
mean squared difference between Q(S_t, A_t) and

    G_t = R_t + gamma ((1 - lambda) max_a Q(S_t+1, a) + lambda G_t+1)

If S_t+1 is terminal, G_t is R_t. After the last of the T steps, and where only the time limit ends
an episode (Pardo et al. 2018), lambda is 0. This is the Q(lambda) of Peng & Williams (1996): G is
not cut at random actions. Layer normalization keeps learning stable (Ba et al. 2016; here without
its learned scale and shift). Unlike in the authors' code, epsilon is constant, and observations are
divided by their largest absolute values so far. Gradients are clipped to a norm of 1.

    python pqn.py                                                       # one run
    python pqn.py --q-lambda 0 0.85 --num-seeds 20 --plot curve.png     # forty runs
    python pqn.py --env-id Acrobot-v1 --learning-rate 0.01 --epsilon 0.3

Shapes: R runs, K intervals, N = num_envs environments, T = num_steps steps, B = T * N transitions,
D observation dimensions (of a picture, all its numbers), H = hidden_size units, A actions.
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
from gymnax.environments import spaces
from gymnax.wrappers import LogWrapper


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


def make_env(args):
    """Make the environment, and its parameters. This is the place to change them."""
    env, env_params = gymnax.make(args.env_id)
    return LogWrapper(env), env_params


def parse_args(argv=None):
    """Read the flags. Those of `sweep` take several values (a list), and all combinations run."""
    style = argparse.ArgumentDefaultsHelpFormatter
    what = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=what, formatter_class=style, allow_abbrev=False)
    flag = parser.add_argument
    sweep = partial(flag, nargs="+")
    flag("--env-id", choices=gymnax.registered_envs, default="CartPole-v1", help="environment")
    flag("--seed", type=int, default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    flag("--total-timesteps", type=count, default=512_000, help="environment steps of a run")
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    flag("--num-steps", type=count, default=32, help="steps of each environment per iteration")
    flag("--update-epochs", type=count, default=4, help="times that each transition is used")
    flag("--num-minibatches", type=count, default=4, help="minibatches of an epoch")
    sweep("--learning-rate", type=positive, default=[0.006], help="initial value, falls to 0")
    sweep("--gamma", type=fraction, default=[0.99], help="discount factor")
    sweep("--q-lambda", type=fraction, default=[0.85], help="weight of later rewards")
    sweep("--epsilon", type=fraction, default=[0.1], help="probability of a random action")
    flag("--hidden-size", type=count, default=64, help="units of each of two hidden layers")
    flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    flag("--save", metavar="FILE.npz", help="write weights, learning curves and flags")
    flag("--plot", metavar="FILE.png", help="draw the learning curves (.png, .pdf, .svg)")
    args = parser.parse_args(argv)
    check_file(parser, args.save, ".npz")
    check_file(parser, args.plot, ".png", ".pdf", ".svg")
    if args.seed < 0 or args.seed + args.num_seeds > 2**31:
        parser.error("--seed and the seeds that follow must be from 0 to 2**31 - 1")
    if args.num_steps * args.num_envs % args.num_minibatches:
        parser.error("--num-steps * --num-envs must be a multiple of --num-minibatches")
    if args.hidden_size == 1:
        parser.error("--hidden-size must be at least 2: one unit is normalized to 0")
    env, env_params = make_env(args)
    if isinstance(env.action_space(env_params), spaces.Box):
        parser.error(f"--env-id: the actions of {args.env_id} are continuous")
    # All intervals are equally long. In the last, updates beyond num_updates have a rate of 0.
    args.num_updates = math.ceil(args.total_timesteps / args.num_envs / args.num_steps)
    args.interval_updates = math.ceil(args.num_updates / args.num_intervals)
    args.num_intervals = math.ceil(args.num_updates / args.interval_updates)
    args.interval_timesteps = args.interval_updates * args.num_steps * args.num_envs
    return args


# The algorithm, for one run. `run` holds its flags, `env` and `env_params`. Its seed and its values
# of swept flags are traced arrays: use them in arithmetic, not as a shape or in `if`.
# `compile_over_runs` vmaps these functions over many runs.


class Transition(NamedTuple):
    """One environment transition."""

    obs: jax.Array  # of any shape
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # before the reset, if the episode ended
    terminated: jax.Array  # true if next_obs is terminal; false if only time has run out
    truncated: jax.Array  # true if time has run out


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    bounds: jax.Array  # the largest absolute values in `obs` so far
    params: list  # of layers: w (inputs, outputs), b (outputs,)
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, ...)


def optimizer(run):
    """RAdam, with a rate that falls linearly to 0. What it remembers is kept in `opt_state`."""
    gradient_steps = run.num_updates * run.update_epochs * run.num_minibatches
    rate = optax.linear_schedule(run.learning_rate, 0.0, gradient_steps)
    # An eps that is larger than usual: where all errors are small, so are the steps.
    return optax.chain(optax.clip_by_global_norm(1.0), optax.radam(rate, eps=1e-3))


def init_layer(key, inputs, outputs):
    """A layer of the network: random weights (He et al. 2015), and biases of the same size.

    With biases of 0, the normalized units would depend on the direction of an observation alone:
    near zero, where a pole is balanced, tiny differences would change all of them.
    """
    weights = math.sqrt(2 / inputs) * jax.random.normal(key, (inputs + 1, outputs))
    return {"w": weights[:-1], "b": weights[-1]}


def init_state(run):
    """Initial state of one run."""
    key, key_reset, *layer_keys = jax.random.split(jax.random.key(run.seed), 5)
    keys = jax.random.split(key_reset, run.num_envs)
    obs, env_state = jax.vmap(partial(run.env.reset, params=run.env_params))(keys)
    num_actions = run.env.action_space(run.env_params).n
    params = [
        init_layer(layer_keys[0], obs[0].size, run.hidden_size),
        init_layer(layer_keys[1], run.hidden_size, run.hidden_size),
        init_layer(layer_keys[2], run.hidden_size, num_actions),
    ]
    return TrainState(
        key=key,
        bounds=jnp.max(jnp.abs(obs), axis=0),
        params=params,
        opt_state=optimizer(run).init(params),
        env_state=env_state,
        obs=obs,
    )


def q_values(bounds, params, obs):
    """Values (A,) of all actions in an observation of any shape."""
    *hidden, output = params
    x = jnp.ravel(obs / jnp.where(bounds > 0, bounds, 1.0))  # (D,)
    for layer in hidden:
        x = x @ layer["w"] + layer["b"]  # (H,)
        x = x - jnp.mean(x)
        x = jax.nn.relu(x / jnp.sqrt(jnp.mean(x**2) + 1e-5))
    return x @ output["w"] + output["b"]


def select_action(epsilon, q, uniform):
    """Choose an action epsilon-greedily from values (A,), given two random numbers in [0, 1)."""
    coin, choice = uniform
    random_action = (len(q) * choice).astype(int)  # rounded down, so each is equally likely
    return jnp.where(coin < epsilon, random_action, jnp.argmax(q))


def vector_step(run, state, _):
    """Step N environments. Also return the transitions, and sums over the episodes that ended."""
    key, key_step, key_uniform = jax.random.split(state.key, 3)
    step_keys = jax.random.split(key_step, run.num_envs)
    uniform = jax.random.uniform(key_uniform, (run.num_envs, 2))
    q = jax.vmap(partial(q_values, state.bounds, state.params))(state.obs)  # (N, A)
    action = jax.vmap(partial(select_action, run.epsilon))(q, uniform)  # (N,)
    env_step = jax.vmap(partial(run.env.step, params=run.env_params))
    obs, env_state, reward, terminated, truncated, info = env_step(
        step_keys, state.env_state, action
    )
    transitions = Transition(
        obs=state.obs,
        action=action,
        reward=reward,
        next_obs=info["final_observation"],  # `obs` may already belong to the next episode
        terminated=terminated,
        truncated=truncated,
    )
    # LogWrapper repeats the last return in every step: count it only where an episode ended.
    ended = info["returned_episode"]
    returns = jnp.sum(info["returned_episode_returns"], where=ended)
    sums = {"returns": returns, "episodes": jnp.sum(ended)}
    bounds = jnp.maximum(state.bounds, jnp.max(jnp.abs(obs), axis=0))
    state = state._replace(key=key, bounds=bounds, env_state=env_state, obs=obs)
    return state, (transitions, sums)


def lambda_returns(run, bounds, params, transitions):
    """Targets G (T,) of successive transitions (T,) of one environment."""
    next_q = jax.vmap(partial(q_values, bounds, params))(transitions.next_obs)  # (T, A)

    def step(later, inputs):
        transition, next_value = inputs
        later = jnp.where(transition.truncated, next_value, later)  # `later` is another episode's
        mixture = (1 - run.q_lambda) * next_value + run.q_lambda * later
        target = transition.reward + run.gamma * jnp.where(transition.terminated, 0.0, mixture)
        return target, target

    next_values = jnp.max(next_q, axis=1)  # (T,)
    _, targets = jax.lax.scan(step, next_values[-1], (transitions, next_values), reverse=True)
    return targets


def td_loss(bounds, params, batch, targets):
    """Half the mean squared error of a minibatch. Also return what a progress line shows."""

    def value(obs, action):
        return q_values(bounds, params, obs)[action]

    values = jax.vmap(value)(batch.obs, batch.action)
    errors = targets - values
    metrics = {"error": jnp.mean(jnp.abs(errors)), "q_value": jnp.mean(values)}
    return jnp.mean(errors**2) / 2, metrics


def train_step(run, state, _):
    """Collect B transitions with the current network, then learn from them in minibatches."""
    one_step = partial(vector_step, run)
    state, (transitions, sums) = jax.lax.scan(one_step, state, length=run.num_steps)  # (T, N)
    # The targets are computed outside of the loss, so no gradient flows through them.
    of_one = partial(lambda_returns, run, state.bounds, state.params)
    targets = jax.vmap(of_one, in_axes=1, out_axes=1)(transitions)  # (T, N)
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (transitions, targets))  # (B,)

    loss = partial(td_loss, state.bounds)

    def update(learned, chosen):
        params, opt_state = learned
        minibatch = jax.tree.map(lambda x: x[chosen], data)
        grad, metrics = jax.grad(loss, has_aux=True)(params, *minibatch)
        updates, opt_state = optimizer(run).update(grad, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    def epoch(learned, key):
        order = jax.random.permutation(key, run.num_steps * run.num_envs)
        return jax.lax.scan(update, learned, order.reshape(run.num_minibatches, -1))

    key, key_epochs = jax.random.split(state.key)
    keys = jax.random.split(key_epochs, run.update_epochs)
    (params, opt_state), metrics = jax.lax.scan(epoch, (state.params, state.opt_state), keys)
    state = state._replace(key=key, params=params, opt_state=opt_state)
    return state, (jax.tree.map(jnp.mean, metrics), jax.tree.map(jnp.sum, sums))


def train_interval(run, state):
    """Make the updates up to the next progress line. Also return what it shows."""
    one_update = partial(train_step, run)
    state, (metrics, sums) = jax.lax.scan(one_update, state, length=run.interval_updates)
    means = jax.tree.map(jnp.mean, metrics)
    episodes = jnp.sum(sums["episodes"])
    returns = jnp.sum(sums["returns"]) / episodes  # nan if none ended
    return state, {"returns": returns, "episodes": episodes, **means}


def greedy_return(run, bounds, params, key):
    """Undiscounted return of one greedy episode."""

    def step(carry, key):
        obs, env_state = carry
        action = jnp.argmax(q_values(bounds, params, obs))
        obs, env_state, _, _, _, info = run.env.step(key, env_state, action, run.env_params)
        return (obs, env_state), info

    key_reset, key_steps = jax.random.split(key)
    keys = jax.random.split(key_steps, int(run.env_params.max_steps_in_episode))
    start = run.env.reset(key_reset, run.env_params)
    _, info = jax.lax.scan(step, start, keys)  # LogWrapper's statistics after each step
    ended = info["returned_episode"]
    first = info["returned_episode_returns"][jnp.argmax(ended)]
    return jnp.where(jnp.any(ended), first, jnp.nan)


def evaluate(run, state):
    """Results of a run: the returns of greedy episodes, and what was learned."""
    # `fold_in` makes a key that training never uses: a run may be evaluated, and then go on.
    keys = jax.random.split(jax.random.fold_in(state.key, 999), run.eval_episodes)
    returns = jax.vmap(partial(greedy_return, run, state.bounds, state.params))(keys)
    finite = jnp.isfinite(optax.tree.norm(state.params))
    returns = jnp.where(finite, returns, jnp.nan)  # nan: diverged
    return {"greedy_return": returns, "bounds": state.bounds, "params": state.params}


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
