# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["jax==0.10.1", "optax==0.2.8", "gymnax==1.0.1", "six==1.17.0"]  # gymnax needs six
# ///
"""Train replay_td.py on an environment of your own: a car that must stop in the middle of a road.

Copy this file beside replay_td.py, and run it. All flags of replay_td.py may follow.

    python own_environment.py --seed 271000 --num-seeds 40

Results: the greedy return of these runs is -10.7 on average, and -19.5 for the worst run. The best
possible is -8.6.

Traps:
- An observation needs an entry of OBS_SCALE: what each of its numbers is divided by. With fewer
  dimensions, centers are nearer, and a smaller --sigma tells states apart: 0.2 for the two
  here. For one, begin with 0.1.
- Scale rewards to about 1, or raise --learning-rate with them: Adam's steps do not depend on the
  size of rewards. If a step costs 100 instead of 1, the runs above need 77 steps on average instead
  of 11. With --learning-rate 10 as well, they need 10 again.
- Register a function (a lambda), not the class: if you edit the class in a notebook, a registered
  class silently stays the old one. Register in a cell of its own, since a name can be registered
  only once.
- The time limit belongs in `max_steps_in_episode`. An environment that reports it as terminated is
  silently learned with wrong targets: the states at the limit would be worth 0.
- A wrapper that changes observations must also change info["final_observation"], which has the last
  observation of an episode. Otherwise, targets are computed from observations of another kind.
- reinforce_parallel.py needs `observation_space`, and the other learners do not.
- With ppo.py in the place of replay_td.py, OBS_SCALE, --sigma and --tau go out. After 100,000 steps
  with the default rate, 40 runs have -11.4 on average, and one of them does not learn (-96).
"""

import sys

import replay_td  # before what imports jax: it tells jax to use all cores

replay_td.OBS_SCALE["OwnCar-v0"] = [1.0, 0.2]  # position: the walls; speed: about its maximum

import gymnax
import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class EnvState(environment.EnvState):
    """The state of a car. The base class adds `time`: steps since the start."""

    position: jax.Array
    velocity: jax.Array


class OwnCar(environment.Environment):
    """A car between walls at -1 and 1. Actions 0, 1 and 2 push left, not at all and right."""

    default_params = environment.EnvParams(max_steps_in_episode=100)

    def step_env(self, key, state, action, params):
        """Step once. Return observation, state, reward, terminated and info."""
        velocity = state.velocity + 0.02 * (action - 1)
        position = jnp.clip(state.position + velocity, -1.0, 1.0)
        velocity = position - state.position  # a wall stops the car
        terminated = (jnp.abs(position) < 0.05) & (jnp.abs(velocity) < 0.03)
        state = EnvState(position=position, velocity=velocity, time=state.time + 1)
        return self.observe(key, state, action, params), state, jnp.array(-1.0), terminated, {}

    def reset_env(self, key, params):
        """Start an episode, at rest. Return observation and state."""
        position = jax.random.uniform(key, minval=-1.0, maxval=1.0)
        state = EnvState(position=position, velocity=jnp.array(0.0), time=jnp.array(0))
        return self.observe(key, state, None, params), state

    def observe(self, key, state, action, params):
        """Return the observation (2,)."""
        return jnp.stack([state.position, state.velocity])

    def action_space(self, params):
        """Return the space of actions."""
        return spaces.Discrete(3)

    def observation_space(self, params):
        """Return the space of observations."""
        return spaces.Box(-1.0, 1.0, (2,))


gymnax.register("OwnCar-v0", lambda: OwnCar())
FLAGS = "--env-id OwnCar-v0 --total-timesteps 3e4 --sigma 0.2 --tau 0.03 --learning-rate 0.1"

if __name__ == "__main__":
    replay_td.main([*FLAGS.split(), *sys.argv[1:]])
