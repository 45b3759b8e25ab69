"""Small environments for the tests, and the pole of Gymnasium beside that of gymnax."""

from functools import partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import one_run
from gymnax.environments import CartPole, environment, spaces


def run_in(env, env_params, script, flags, **values):
    """One run in an environment of the tests, with the wrappers of the script's `make_env`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gymnax, "make", lambda _: (env, env_params))
        return one_run(script, flags, **values)


class Noise(environment.Environment):
    """Each observation is drawn anew, and three actions change nothing. Only time ends it.

    It has as many numbers as that of CartPole-v1, and compiles in half the time.
    """

    num_actions = 3
    default_params = environment.EnvParams(max_steps_in_episode=3)

    def reset_env(self, key, params):
        obs = jax.random.uniform(key, 4, minval=-1)
        return obs, environment.EnvState(time=jnp.array(0))

    def step_env(self, key, state, action, params):
        obs = jax.random.uniform(key, 4, minval=-1)
        state = state.replace(time=state.time + 1)
        return obs, state, jnp.array(1.0), jnp.array(False), {}

    def action_space(self, params):
        return spaces.Discrete(self.num_actions)

    def observation_space(self, params):
        return spaces.Box(-1.0, 1.0, (4,))


NOISE_PARAMS = Noise.default_params.replace(max_steps_in_episode=5)  # longer than the default


def noise_run(script, flags, **values):
    """One run in a new `Noise`: jax would not compile the steps of a known one once more."""
    return run_in(Noise(), NOISE_PARAMS, script, flags, **values)


class Columns(Noise):
    """The same numbers, as a picture of two rows and two columns."""

    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return obs.reshape(2, 2), state

    def step_env(self, key, state, action, params):
        obs, *others = super().step_env(key, state, action, params)
        return obs.reshape(2, 2), *others

    def observation_space(self, params):
        return spaces.Box(-1.0, 1.0, (2, 2))


class Echo(Noise):
    """The reward is the sum of the action. Bounds are -1 and 3, -1 and 7, -1 and 11, ..."""

    def __init__(self, shape):
        self.shape = shape

    def step_env(self, key, state, action, params):
        assert action.shape == self.shape
        obs, state, _, terminated, info = super().step_env(key, state, 0, params)
        return obs, state, jnp.sum(action), terminated, info

    def action_space(self, params):
        high = 3.0 + 4 * np.arange(np.prod(self.shape, dtype=int)).reshape(self.shape)
        return spaces.Box(jnp.full(self.shape, -1.0), jnp.array(high), self.shape)


class Pole(CartPole):
    """The cart starts halfway to the right end. To push left pays 2, right costs 1."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(x=state.x + params.x_threshold / 2)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 2.0 - 3 * action, terminated, info


# Not the defaults: a script must pass the parameters of its run. Some poles fall, and others stand
# until the time limit: `follow_in_gymnasium` asserts it, as does test_reinforce_parallel.py.
LIMIT = 14
CHANGES = {"gravity": 20.0, "force_mag": 20.0, "x_threshold": 0.3}
POLE_PARAMS = CartPole().default_params.replace(max_steps_in_episode=LIMIT, **CHANGES)
GYMNASIUM_POLE = gymnasium.make("CartPole-v1").unwrapped
vars(GYMNASIUM_POLE).update(CHANGES)
pole_run = partial(run_in, Pole(), POLE_PARAMS)


def step_in_gymnasium(obs, action):
    """The observation after a step of the same pole, and whether it fell."""
    GYMNASIUM_POLE.state, GYMNASIUM_POLE.steps_beyond_terminated = np.float64(obs), None
    next_obs, _, fell, *_ = GYMNASIUM_POLE.step(int(action))
    return next_obs, fell


def play_in_gymnasium(obs, policy):
    """Play policy(t, obs) from an observation on. Return all observations, and the rewards."""
    seen, rewards, fell = [obs], [], False
    while not fell and len(rewards) < LIMIT:
        action = policy(len(rewards), seen[-1])
        obs, fell = step_in_gymnasium(seen[-1], action)
        seen.append(obs)
        rewards.append(2 - 3 * int(action))
    return seen, rewards


def follow_in_gymnasium(seen):
    """What the pole does after each action (T, N) in the observations (T, N, 4) that were seen.

    Return the next observations, where it fell, where it stood but time ran out, and where either
    ended the episode, (T, N) each.
    """
    shape = seen.action.shape
    next_obs, fell, out_of_time = np.zeros((*shape, 4)), *np.zeros((2, *shape), bool)
    length = np.zeros(shape[1], int)
    for t, i in np.ndindex(shape):
        next_obs[t, i], fell[t, i] = step_in_gymnasium(seen.obs[t, i], seen.action[t, i])
        length[i] += 1
        out_of_time[t, i] = length[i] == LIMIT and not fell[t, i]
        if fell[t, i] or out_of_time[t, i]:
            length[i] = 0
    assert fell.any() and out_of_time.any()
    ended = fell | out_of_time
    return SimpleNamespace(next_obs=next_obs, fell=fell, out_of_time=out_of_time, ended=ended)


def assert_episodes_go_on_until_they_end(seen):
    """Each step begins where the one before led, or near the middle of the right half."""
    expected = follow_in_gymnasium(seen)
    goes_on = ~expected.ended[:-1]
    np.testing.assert_allclose(
        seen.obs[1:][goes_on], expected.next_obs[:-1][goes_on], rtol=1e-4, atol=1e-5
    )
    starts = [*seen.obs[0], *seen.obs[1:][~goes_on]]
    # Gymnasium's poles start within 0.05 of 0, and these halfway to the end of their track.
    assert np.all(np.abs(starts - np.array([0.15, 0, 0, 0])) <= 0.05)
