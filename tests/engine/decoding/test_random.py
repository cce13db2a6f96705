"""The counter-based numbers: a function of the key, uniform, and different for neighbouring keys."""

import torch

from engine.decoding.random import uniform

COUNT = 20_000


def numbers(seed=0, position=0, choice=0):
    keys = torch.broadcast_tensors(*(torch.as_tensor(x, dtype=torch.int64) for x in (seed, position, choice)))
    return uniform(*keys)


def plain(seed, position, choice):
    """The same function in Python's unbounded integers."""
    top = (1 << 64) - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & top
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & top
        return z ^ (z >> 31)

    state = 0
    for part in (seed, position, choice):
        state = mix(((state ^ part) + 0x9E3779B97F4A7C15) & top)
    return (state >> 11) * 2.0**-53


def test_numbers_equal_the_function_in_unbounded_integers():
    keys = [(0, 0, 0), (7, 130, 2), (2**63 - 1, 4095, 9), (123456789, 1, 0)]
    got = uniform(*(torch.tensor(part) for part in zip(*keys, strict=True)))
    assert got.tolist() == [plain(*key) for key in keys]


def test_a_number_depends_on_its_key_alone():
    batch = numbers(seed=torch.tensor([5, 9, 5]), position=torch.tensor([1, 1, 1]))
    assert batch[0] == batch[2] == numbers(seed=5, position=1)
    assert batch[0] != batch[1]


def test_numbers_are_uniform_over_seeds_positions_and_choices():
    for keys in ({"seed": torch.arange(COUNT)}, {"position": torch.arange(COUNT)}, {"choice": torch.arange(COUNT)}):
        got = numbers(**keys)
        assert got.dtype == torch.float64
        assert (got >= 0).all() and (got < 1).all()
        counts = torch.histc(got.float(), bins=20, min=0, max=1)
        # 19 degrees of freedom: the 1 - 1e-6 quantile is about 63.
        assert float(((counts - COUNT / 20) ** 2 / (COUNT / 20)).sum()) < 63


def test_neighbouring_keys_are_not_correlated():
    seeds = torch.arange(COUNT) * 3
    for neighbour in ({"seed": seeds + 1}, {"seed": seeds, "position": 1}, {"seed": seeds, "choice": 1}):
        correlation = torch.corrcoef(torch.stack([numbers(seed=seeds), numbers(**neighbour)]))[0, 1]
        assert abs(float(correlation)) < 5 / COUNT**0.5
