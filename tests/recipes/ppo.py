# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["jax==0.10.1", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0"]  # gymnax needs six
# ///
r"""PPO (proximal policy optimization): an actor and a critic learn from N parallel environments.

Each iteration plays T steps in N environments with the policy pi_old, and then learns from these
B = T * N transitions several times, in minibatches. A minibatch gives one Adam step on

    -mean(min(ratio A, clip(ratio, 1 - c, 1 + c) A)) + 1/2 mean((v(S) - G)^2) - e mean(entropy)
    ratio = pi(action | S) / pi_old(action | S),    G = A + v_old(S)

(Schulman et al. 2017), where the A of the first term are standardized: minus their mean, divided by
their standard deviation. The advantages A are sums of TD errors (GAE, Schulman et al. 2016),

    A_t = delta_t + gamma lambda A_t+1,    delta_t = R_t + gamma v_old(S_t+1) - v_old(S_t)

up to the end of the episode or of the T steps. v_old(S_t+1) is 0 if S_t+1 is terminal. Where only
the time limit ends an episode, it still counts (Pardo et al. 2018). Neither values nor gradients
are clipped.

    python ppo.py                                                         # one run
    python ppo.py --clip-coef 0.1 0.2 --num-seeds 20 --plot curve.png     # forty runs
    python ppo.py --env-id Acrobot-v1 --total-timesteps 3e5
    python ppo.py --env-id Pendulum-v1 --total-timesteps 1e6 --num-steps 200 \
        --learning-rate 0.01 --gamma 0.95

Shapes: R runs, K intervals, N = num_envs environments, T = num_steps steps, B = T * N transitions,
D observation dimensions (of a picture, all its numbers), H = hidden_size units, A actions, or
dimensions of a continuous action.
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
from gymnax.wrappers.purerl import GymnaxWrapper


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
    flag("--env-id", choices=gymnax.registered_envs, default="CartPole-v1", help="environment")
    flag("--seed", type=int, default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    flag("--total-timesteps", type=count, default=204_800, help="environment steps of a run")
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    flag("--num-steps", type=count, default=64, help="steps of each environment per iteration")
    flag("--update-epochs", type=count, default=4, help="times that each transition is used")
    flag("--num-minibatches", type=count, default=4, help="minibatches of an epoch")
    sweep("--learning-rate", type=positive, default=[0.003], help="initial value, falls to 0")
    sweep("--gamma", type=fraction, default=[0.99], help="discount factor")
    sweep("--gae-lambda", type=fraction, default=[0.95], help="weight of later TD errors")
    sweep("--clip-coef", type=positive, default=[0.2], help="limit c of the ratio's change")
    sweep("--ent-coef", type=fraction, default=[0.0], help="weight e of the entropy")
    flag("--hidden-size", type=count, default=64, help="tanh units of actor and of critic")
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
    if args.num_steps * args.num_envs == args.num_minibatches:
        parser.error("--num-minibatches: a minibatch needs two transitions to be standardized")
    # All intervals are equally long. In the last, updates beyond num_updates have a rate of 0.
    args.num_updates = math.ceil(args.total_timesteps / args.num_envs / args.num_steps)
    args.interval_updates = math.ceil(args.num_updates / args.num_intervals)
    args.num_intervals = math.ceil(args.num_updates / args.interval_updates)
    args.interval_timesteps = args.interval_updates * args.num_steps * args.num_envs
    return args


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
    return LogWrapper(env), env_params


# The algorithm, for one run. `run` holds its flags, `env` and `env_params`. Its seed and its values
# of swept flags are traced arrays: use them in arithmetic, not as a shape or in `if`.
# `compile_over_runs` vmaps these functions over many runs.


class Transition(NamedTuple):
    """One environment transition."""

    obs: jax.Array  # of any shape
    action: jax.Array  # (A,) if continuous
    log_prob: jax.Array  # of the action, when it was chosen
    value: jax.Array  # v_old(S)
    reward: jax.Array
    next_value: jax.Array  # v_old(S'), or 0 if S' is terminal
    ended: jax.Array  # true if the episode has ended, also by the time limit


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    params: dict  # "actor" and "critic": w0 (D, H), b0 (H,), w1 (H, outputs), b1 (outputs,)
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, ...)


def optimizer(run):
    """Adam, with a rate that falls linearly to 0. What it remembers is kept in `opt_state`."""
    gradient_steps = run.num_updates * run.update_epochs * run.num_minibatches
    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, gradient_steps))


def init_network(key, inputs, hidden_size, outputs):
    """Random weights, small ones at the outputs, and biases of 0."""
    key_hidden, key_output = jax.random.split(key)
    return {
        "w0": jax.random.normal(key_hidden, (inputs, hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(hidden_size),
        "w1": 0.01 * jax.random.normal(key_output, (hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }


def init_state(run):
    """Initial state of one run."""
    key, key_reset, key_actor, key_critic = jax.random.split(jax.random.key(run.seed), 4)
    keys = jax.random.split(key_reset, run.num_envs)
    obs, env_state = jax.vmap(partial(run.env.reset, params=run.env_params))(keys)
    space = run.env.action_space(run.env_params)
    outputs = space.n if isinstance(space, spaces.Discrete) else math.prod(space.shape)
    params = {
        "actor": init_network(key_actor, obs[0].size, run.hidden_size, outputs),
        "critic": init_network(key_critic, obs[0].size, run.hidden_size, 1),
    }
    if isinstance(space, spaces.Box):
        params["actor"]["log_std"] = jnp.zeros(outputs)
    return TrainState(
        key=key,
        params=params,
        opt_state=optimizer(run).init(params),
        env_state=env_state,
        obs=obs,
    )


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


def entropy(params, obs):
    """Entropy of the policy in an observation."""
    if "log_std" in params:
        return jnp.sum(params["log_std"] + math.log(2 * math.pi * math.e) / 2)
    log_probs = jax.nn.log_softmax(network(params, obs))  # (A,)
    return -jnp.sum(jnp.exp(log_probs) * log_probs)


def state_value(params, obs):
    """Value v of an observation."""
    return network(params, obs)[0]


def vector_step(run, state, _):
    """Step N environments. Also return the transitions, and sums over the episodes that ended."""
    actor, critic = state.params["actor"], state.params["critic"]
    key, key_action, key_step = jax.random.split(state.key, 3)
    action_keys = jax.random.split(key_action, run.num_envs)
    step_keys = jax.random.split(key_step, run.num_envs)
    action = jax.vmap(partial(sample_action, actor))(state.obs, action_keys)  # (N,) or (N, A)
    env_step = jax.vmap(partial(run.env.step, params=run.env_params))
    obs, env_state, reward, terminated, truncated, info = env_step(
        step_keys, state.env_state, action
    )
    values = jax.vmap(partial(state_value, critic))
    next_obs = info["final_observation"]  # `obs` may already belong to the next episode
    transitions = Transition(
        obs=state.obs,
        action=action,
        log_prob=jax.vmap(partial(log_prob, actor))(state.obs, action),
        value=values(state.obs),
        reward=reward,
        next_value=jnp.where(terminated, 0.0, values(next_obs)),
        ended=terminated | truncated,
    )
    # LogWrapper repeats the last return in every step: count it only where an episode ended.
    ended = info["returned_episode"]
    returns = jnp.sum(info["returned_episode_returns"], where=ended)
    sums = {"returns": returns, "episodes": jnp.sum(ended)}
    return state._replace(key=key, env_state=env_state, obs=obs), (transitions, sums)


def advantages(run, transitions):
    """Advantages A (T,) of successive transitions (T,) of one environment."""

    def step(later, transition):
        td_error = transition.reward + run.gamma * transition.next_value - transition.value
        later = jnp.where(transition.ended, 0.0, later)  # `later` is another episode's
        advantage = td_error + run.gamma * run.gae_lambda * later
        return advantage, advantage

    _, advantage = jax.lax.scan(step, 0.0, transitions, reverse=True)
    return advantage


def ppo_loss(run, params, batch, advantage):
    """The loss of a minibatch. Also return what a progress line shows."""
    actor, critic = params["actor"], params["critic"]
    log_ratio = jax.vmap(partial(log_prob, actor))(batch.obs, batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - run.clip_coef, 1 + run.clip_coef)
    standardized = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    policy_loss = -jnp.mean(jnp.minimum(ratio * standardized, clipped * standardized))
    targets = advantage + batch.value
    errors = targets - jax.vmap(partial(state_value, critic))(batch.obs)
    mean_entropy = jnp.mean(jax.vmap(partial(entropy, actor))(batch.obs))
    metrics = {
        "entropy": mean_entropy,
        # Of pi_old and pi before this step. An estimate that is never negative (Schulman 2020).
        "approx_kl": jnp.mean(ratio - 1 - log_ratio),
        "clip_fraction": jnp.mean(ratio != clipped),
    }
    return policy_loss + jnp.mean(errors**2) / 2 - run.ent_coef * mean_entropy, metrics


def train_step(run, state, _):
    """Collect B transitions with the current policy, then learn from them in minibatches."""
    one_step = partial(vector_step, run)
    state, (transitions, sums) = jax.lax.scan(one_step, state, length=run.num_steps)  # (T, N)
    # The advantages are computed outside of the loss, so no gradient flows through them.
    advantage = jax.vmap(partial(advantages, run), in_axes=1, out_axes=1)(transitions)  # (T, N)
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (transitions, advantage))  # (B,)

    def update(learned, chosen):
        params, opt_state = learned
        minibatch = jax.tree.map(lambda x: x[chosen], data)
        grad, metrics = jax.grad(partial(ppo_loss, run), has_aux=True)(params, *minibatch)
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


def greedy_return(run, params, key):
    """Undiscounted return of one greedy episode."""

    def step(carry, key):
        obs, env_state = carry
        action = best_action(params["actor"], obs)
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
    returns = jax.vmap(partial(greedy_return, run, state.params))(keys)
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
