# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["jax==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0"]
# ///
r"""REINFORCE: N episodes are played at a time. As their lengths differ, they are padded and masked.

Each iteration plays N episodes with the current policy pi, then makes one Adam step with

    1/N sum_i sum_t mask_it (G_it - b_t) grad log pi(A_it | S_it),    G_it = R_it + gamma G_i,t+1

(Williams 1992; Sutton & Barto 2018, section 13.4). The mask is 1 up to the last step of episode i
and 0 in the padding after it. The padding costs time: in CartPole-v1, early episodes last about 20
of 500 steps. The baseline b_t is the mean of all N returns to go; an episode that has ended counts
as 0. The book's factor gamma^t is left out. Rewards after the time limit count as 0.

    python reinforce_parallel.py --gif pole.gif    # CartPole-v1
    python reinforce_parallel.py --env-id Acrobot-v1 --num-envs 256 --num-iterations 50 \
        --learning-rate 0.03
    python reinforce_parallel.py --env-id MountainCarContinuous-v0 --num-envs 64 \
        --num-iterations 200 --learning-rate 0.005 --gamma 1
    python reinforce_parallel.py --env-id Pendulum-v1 --num-envs 128 --num-iterations 500

Shapes: R runs, K intervals, N = num_envs episodes, T steps (the time limit), D observation
dimensions, H = hidden_size units, A actions, or dimensions of a continuous action.
"""

import argparse
import json
import math
import os
import time
from functools import partial
from importlib.metadata import version
from operator import itemgetter
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
from gymnax.wrappers.purerl import GymnaxWrapper

# The endings of the environments that gymnax can draw.
DRAWN = "v0", "v1", "MinAtar", "Catch-bsuite", "Rooms-misc", "Maze-misc", "Robot-misc", "Pong-misc"


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


class BoundedActions(GymnaxWrapper):
    """Clip continuous actions (A,) to [-1, 1], and scale them to the bounds of the environment."""

    def step(self, key, state, action, params=None):
        """Step the environment."""
        space = self._env.action_space(params)
        from_0_to_1 = (jnp.clip(action, -1, 1) + 1) / 2
        scaled = space.low + (space.high - space.low) * from_0_to_1.reshape(space.shape)
        return self._env.step(key, state, scaled, params)


def make_env(args):
    """Make the environment, and its parameters. This is the place to change them."""
    env, env_params = gymnax.make(args.env_id)
    if isinstance(env.action_space(env_params), spaces.Box):
        env = BoundedActions(env)
    return env, env_params


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
    flag("--num-iterations", type=count, default=100, help="updates")
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=count, default=16, help="episodes per update, at least 2")
    sweep("--learning-rate", type=positive, default=[0.01], help="initial value, falls to 0")
    sweep("--gamma", type=fraction, default=[0.99], help="discount factor")
    flag("--hidden-size", type=count, default=64, help="tanh units of the policy network")
    text = "pad episodes to the time limit, or cut all at the end of the shortest (biased)"
    flag("--sync", choices=["padding", "truncation"], default="padding", help=text)
    flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    flag("--save", metavar="FILE.npz", help="write weights, learning curves and flags")
    flag("--plot", metavar="FILE.png", help="draw the learning curves (.png, .pdf, .svg)")
    flag("--gif", metavar="FILE.gif", help="animate up to 200 steps of a greedy episode of run 0")
    args = parser.parse_args(argv)
    check_file(parser, args.save, ".npz")
    check_file(parser, args.plot, ".png", ".pdf", ".svg")
    check_file(parser, args.gif, ".gif")
    if args.gif and not args.env_id.endswith(DRAWN):
        parser.error(f"--gif: gymnax draws no {args.env_id}")
    if args.seed < 0 or args.seed + args.num_seeds > 2**31:
        parser.error("--seed and the seeds that follow must be from 0 to 2**31 - 1")
    if args.num_envs == 1:
        parser.error("--num-envs must be at least 2, since the baseline is a mean over episodes")
    time_limit = int(make_env(args)[1].max_steps_in_episode)
    if args.num_iterations * args.num_envs * time_limit > 2**30:
        parser.error(f"--num-iterations * --num-envs * {time_limit} steps must not exceed 2**30")
    args.num_updates = args.num_iterations  # one update each
    # All intervals are equally long. In the last, updates beyond num_updates have a rate of 0.
    args.interval_updates = math.ceil(args.num_updates / args.num_intervals)
    args.num_intervals = math.ceil(args.num_updates / args.interval_updates)
    return args


# The algorithm, for one run. `run` holds its flags, `env` and `env_params`. Its seed and its values
# of swept flags are traced arrays: use them in arithmetic, not as a shape or in `if`.
# `compile_over_runs` vmaps these functions over many runs.


class Step(NamedTuple):
    """One step of an episode, or of the padding after it."""

    obs: jax.Array  # of any shape
    action: jax.Array  # (A,) if continuous
    reward: jax.Array
    mask: jax.Array  # true if the step is real, false in the padding
    env_state: gymnax.EnvState  # before the step; only `animate` needs it


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    params: dict  # w0 (D, H), b0 (H,), w1 (H, A), b1 (A,); log_std (A,) if actions are continuous
    opt_state: optax.OptState
    timesteps: jax.Array  # environment steps so far


def optimizer(run):
    """Adam, with a rate that falls linearly to 0. What it remembers is kept in `opt_state`."""
    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))


def init_state(run):
    """Initial state of one run."""
    space = run.env.action_space(run.env_params)
    inputs = math.prod(run.env.observation_space(run.env_params).shape)
    outputs = space.n if isinstance(space, spaces.Discrete) else math.prod(space.shape)
    key, key_hidden, key_output = jax.random.split(jax.random.key(run.seed), 3)
    params = {
        "w0": jax.random.normal(key_hidden, (inputs, run.hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(run.hidden_size),
        "w1": 0.01 * jax.random.normal(key_output, (run.hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }
    if isinstance(space, spaces.Box):
        params["log_std"] = jnp.zeros(outputs)
    return TrainState(key, params, optimizer(run).init(params), timesteps=jnp.array(0))


def network(params, obs):
    """Outputs of a network with one hidden layer: for actions, logits (A,) or means (A,)."""
    x = jnp.ravel(obs).astype(float)  # (D,)
    hidden = jnp.tanh(x @ params["w0"] + params["b0"])  # (H,)
    return hidden @ params["w1"] + params["b1"]


def sample_action(params, obs, key):
    """Random action. A continuous one is unbounded: BoundedActions clips it afterwards."""
    output = network(params, obs)
    if "log_std" in params:
        return output + jnp.exp(params["log_std"]) * jax.random.normal(key, output.shape)
    return jax.random.categorical(key, output)


def best_action(params, obs):
    """Most probable action."""
    output = network(params, obs)
    return output if "log_std" in params else jnp.argmax(output)


def log_prob(params, obs, action):
    """Logarithm of the probability of an action, or of its density if actions are continuous."""
    output = network(params, obs)
    if "log_std" in params:
        return jnp.sum(jax.scipy.stats.norm.logpdf(action, output, jnp.exp(params["log_std"])))
    return jax.nn.log_softmax(output)[action]


def play(run, params, key, greedy=False):
    """Play one episode. Return its steps (T,), padded up to the time limit."""

    def step(carry, _):
        key, obs, env_state, mask = carry
        key, key_action, key_step = jax.random.split(key, 3)
        action = best_action(params, obs) if greedy else sample_action(params, obs, key_action)
        next_obs, next_state, reward, terminated, truncated, _ = run.env.step(
            key_step, env_state, action, run.env_params
        )
        # After the end, gymnax has begun the next episode. Its steps are the padding.
        next_carry = key, next_obs, next_state, mask & ~(terminated | truncated)
        return next_carry, Step(obs, action, jnp.where(mask, reward, 0.0), mask, env_state)

    key, key_reset = jax.random.split(key)
    obs, env_state = run.env.reset(key_reset, run.env_params)
    carry = key, obs, env_state, jnp.array(True)
    _, steps = jax.lax.scan(step, carry, length=int(run.env_params.max_steps_in_episode))
    return steps


def cut_to_shortest(episodes):
    """Cut all episodes (N, T) at the end of the shortest. This biases the gradient.

    Where all rewards are equal, as in CartPole-v1, all advantages are 0: nothing is learned.
    """
    mask = jnp.broadcast_to(jnp.all(episodes.mask, axis=0), episodes.mask.shape)
    return episodes._replace(mask=mask, reward=jnp.where(mask, episodes.reward, 0.0))


def returns_to_go(run, rewards):
    """Discounted returns (T,) from each step of one episode on, given its rewards (T,)."""

    def step(later, reward):
        return_to_go = reward + run.gamma * later
        return return_to_go, return_to_go

    _, returns = jax.lax.scan(step, 0.0, rewards, reverse=True)
    return returns


def advantages(run, episodes):
    """Each return to go (N, T) minus the mean of all.

    The mean includes the episode's own return. So the expected gradient is (N - 1) / N times that
    without a baseline; Adam's steps do not depend on such a factor.
    """
    returns = jax.vmap(partial(returns_to_go, run))(episodes.reward)
    # This makes equal returns exactly 0. Adam would turn rounding errors into whole steps.
    relative = returns - returns[0]
    return relative - jnp.mean(relative, axis=0)


def policy_loss(params, episodes, advantage):
    """Surrogate loss: its gradient is minus the policy gradient estimate."""
    over_steps = jax.vmap(jax.vmap(partial(log_prob, params)))
    log_probs = over_steps(episodes.obs, episodes.action)  # (N, T)
    return -jnp.mean(jnp.sum(jnp.where(episodes.mask, advantage * log_probs, 0.0), axis=1))


def train_step(run, state, _):
    """Play N episodes, then make one Adam step. Also return what a progress line shows."""
    key, key_play = jax.random.split(state.key)
    keys = jax.random.split(key_play, run.num_envs)
    episodes = jax.vmap(partial(play, run, state.params))(keys)  # (N, T)
    returns = jnp.mean(jnp.sum(episodes.reward, axis=1))  # of whole episodes
    timesteps = state.timesteps + jnp.sum(episodes.mask)
    episodes = cut_to_shortest(episodes) if run.sync == "truncation" else episodes
    # The advantages are computed outside of the loss, so no gradient flows through them.
    advantage = advantages(run, episodes)  # (N, T)
    grad = jax.grad(policy_loss)(state.params, episodes, advantage)
    updates, opt_state = optimizer(run).update(grad, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(key, params, opt_state, timesteps), {"returns": returns}


def train_interval(run, state):
    """Make the updates up to the next progress line. Also return what it shows."""
    state, metrics = jax.lax.scan(partial(train_step, run), state, length=run.interval_updates)
    episodes = jnp.array(run.interval_updates * run.num_envs)
    return state, {**jax.tree.map(jnp.mean, metrics), "episodes": episodes}


def evaluate(run, state):
    """Results of a run: the returns of greedy episodes, and what was learned."""
    # `fold_in` makes a key that training never uses: a run may be evaluated, and then go on.
    keys = jax.random.split(jax.random.fold_in(state.key, 999), run.eval_episodes)
    episodes = jax.vmap(partial(play, run, state.params, greedy=True))(keys)  # (eval_episodes, T)
    returns = jnp.sum(episodes.reward, axis=1)
    finite = jnp.isfinite(optax.tree.norm(state.params))
    return {"greedy_return": jnp.where(finite, returns, jnp.nan), "params": state.params}


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


def animate(args, learned):
    """Play a greedy episode of run 0, and draw up to 200 of its steps, without a screen."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
    from gymnax.visualize import Visualizer

    env, env_params = make_env(args)
    run = SimpleNamespace(env=env, env_params=env_params)
    params = jax.tree.map(itemgetter(0), learned["params"])
    key = jax.random.fold_in(jax.random.key(args.seed), 999)  # training never uses this key
    steps = play(run, params, key, greedy=True)
    length = min(200, steps.mask.sum())
    states = [jax.tree.map(itemgetter(t), steps.env_state) for t in range(length)]
    Visualizer(env, env_params, states, steps.reward.cumsum()).animate(args.gif)


AT_ONCE = 32  # runs vmapped together on a core of a CPU; more at once are slower
COMPILER_OPTIONS = {
    "cpu": {"xla_backend_optimization_level": 1},  # compiles in 0.6 of the time of level 3
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
    for _ in range(args.num_intervals):
        state, metrics = train(padded, state)
        timesteps, metrics = gather((state.timesteps, metrics), num_runs)  # waits for `train`
        seconds = time.perf_counter() - began
        history.append({"timesteps": timesteps, "seconds": seconds, **metrics})  # add a logger here
        words = []
        for name in metrics:
            means = [setting_mean(metrics, name, rows) for _, rows in settings]
            words.append(f"{name} {low_to_high(means)}")
        steps = low_to_high([timesteps[rows].mean() for _, rows in settings], ",.0f")
        speed = f"{timesteps.sum() / seconds:,.0f} steps/s in total"
        print(f"step {steps}", *words, speed, sep="  ", flush=True)

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
    if args.gif:
        animate(args, learned)
    return results


if __name__ == "__main__":
    main()
