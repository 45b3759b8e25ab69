"""Train agents of rejax on CartPole-v1, for the section `race` of benchmark.py.

    python tests/rejax_peer.py ALGORITHM NUM_AGENTS [--save FILE.npz]

It runs in an environment of its own (benchmark.py makes it), since rejax needs another gymnax. The
configurations are those of rejax's authors for this task: configs/gymnax/cartpole.yaml of its
repository. Agents are divided between the cores. Without --save, nothing is evaluated, so that
seconds are of training.
"""

import argparse
import math
import os
import time

os.environ["JAX_NUM_CPU_DEVICES"] = str(len(os.sched_getaffinity(0)))
import jax
import jax.numpy as jnp
import numpy as np
import rejax
from jax.sharding import PartitionSpec as P
from rejax.evaluate import evaluate

CONFIGS = {
    "ppo": {
        "agent_kwargs": {"activation": "tanh"},
        "num_envs": 5,
        "num_steps": 100,
        "num_epochs": 5,
        "num_minibatches": 5,
        "learning_rate": 0.00075,
        "max_grad_norm": 0.5,
        "total_timesteps": 100_000,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_eps": 0.2,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
    },
    "dqn": {
        "agent": "DuelingQNetwork",
        "agent_kwargs": {"activation": "swish"},
        "num_envs": 10,
        "buffer_size": 50_000,
        "fill_buffer": 5_000,
        "batch_size": 100,
        "max_grad_norm": 10,
        "learning_rate": 0.001,
        "num_epochs": 5,
        "total_timesteps": 100_000,
        "polyak": 0.98,
        "eps_start": 1,
        "eps_end": 0.05,
        "exploration_fraction": 0.5,
        "gamma": 0.99,
        "ddqn": True,
        "normalize_observations": False,
    },
    "pqn": {
        "num_envs": 16,
        "num_steps": 128,
        "num_minibatches": 16,
        "max_grad_norm": 10,
        "learning_rate": 0.0003,
        "num_epochs": 5,
        "total_timesteps": 524_288,
        "eps_start": 1,
        "eps_end": 0.05,
        "exploration_fraction": 0.5,
        "gamma": 0.99,
        "td_lambda": 0.9,
        "normalize_observations": False,
    },
}
INTERVALS = {"ppo": 5_000, "dqn": 5_000, "pqn": 16_384}  # steps from one evaluation to the next


def greedy_episodes(agent, state, key):
    """Lengths and returns of 128 greedy episodes. (rejax's own evaluation explores a little.)"""
    if not args.save:
        return jnp.zeros(1), jnp.zeros(1)

    def act(obs, _):
        if args.algorithm == "ppo":
            policy = agent.actor.apply(state.actor_ts.params, obs[None], method="_action_dist")
            return jnp.argmax(policy.logits)
        return jnp.argmax(agent.agent.apply(state.q_ts.params, obs[None]))

    limit = agent.env_params.max_steps_in_episode
    return evaluate(act, key, agent.env, agent.env_params, 128, limit)


parser = argparse.ArgumentParser()
parser.add_argument("algorithm", choices=CONFIGS)
parser.add_argument("num_agents", type=int)
parser.add_argument("--save")
args = parser.parse_args()

config = CONFIGS[args.algorithm]
interval = INTERVALS[args.algorithm] if args.save else config["total_timesteps"]
agent = (
    rejax.get_algo(args.algorithm)
    .create(env="CartPole-v1", eval_freq=interval, skip_initial_evaluation=not args.save, **config)
    .replace(eval_callback=greedy_episodes)
)
keys = jax.random.split(jax.random.PRNGKey(271000), args.num_agents)
devices = jax.devices()[: math.gcd(jax.device_count(), args.num_agents)]  # equal shares
mesh = jax.sharding.Mesh(devices, "cores")
train = jax.vmap(agent.train)
train = jax.shard_map(train, mesh=mesh, in_specs=P("cores"), out_specs=P("cores"), check_vma=False)
train = jax.jit(train).lower(keys).compile()
print("compiled", flush=True)
began = time.perf_counter()
_, (_, returns) = jax.block_until_ready(train(keys))  # (agents, evaluations, episodes)
print(f"trained in {time.perf_counter() - began:.1f} s", flush=True)
if args.save:
    means = np.asarray(returns).mean(axis=2).T  # (evaluations, agents)
    steps = np.minimum(np.arange(len(means)) * interval, config["total_timesteps"])
    np.savez(args.save, returns=means, steps=steps)
