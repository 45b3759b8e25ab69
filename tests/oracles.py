"""What the scripts compute, written once more in NumPy: features, networks and a loss."""

import jax
import jax.numpy as jnp
import numpy as np

SCALE = [2.4, 3.0, 0.2, 3.0]  # of CartPole-v1, for the linear learners


def radial_features(sigma, centers, obs):
    """Radial basis functions (..., F) of observations (..., D), as the book defines them."""
    scaled = np.asarray(obs, float) / SCALE
    difference = scaled[..., None] - np.asarray(centers)  # (..., D, F)
    return np.exp(-np.sum(difference**2, axis=-2) / (2 * sigma**2))


def tanh_network(params, obs):
    """Outputs (..., A) of a network of REINFORCE or PPO for observations (..., D)."""
    return np.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def normalized_network(bounds, params, obs):
    """Values (..., A) of all actions by a network of PQN or DQN in observations (..., D)."""
    *hidden, output = params
    x = obs / bounds
    for layer in hidden:
        x = x @ layer["w"] + layer["b"]
        deviation = x - x.mean(axis=-1, keepdims=True)
        x = deviation / (x.var(axis=-1, keepdims=True) + 1e-5) ** 0.5
        x = x * (x > 0)
    return x @ output["w"] + output["b"]


def values_of_actions(bounds, params, batch):
    """Values (B,) of the actions that were taken, by a network of PQN or DQN."""
    q = normalized_network(bounds, params, batch.obs)
    return q[np.arange(len(batch.action)), batch.action]


def value_loss(params, bounds, batch, targets):
    """Half the mean squared error of these values, the loss of PQN and DQN, also under jax.grad."""
    return ((targets - values_of_actions(bounds, params, batch)) ** 2).mean() / 2


def random_params(seed, like):
    """Draw parameters of the same shapes. New ones are 0 in part, or make all actions equal."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda array: jnp.float32(rng.normal(size=array.shape) / 2), like)
