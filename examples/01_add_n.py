"""The sum of arrays in one pass over memory, with one rounding."""

import numpy as np

import fanin

rng = np.random.default_rng(0)
gradients = [rng.normal(size=100_000).astype(np.float16) for _ in range(64)]

exact = np.sum([g.astype(np.float64) for g in gradients], axis=0)


def error(total):
    return np.sqrt(np.mean((total - exact) ** 2) / np.mean(exact**2))


chain = gradients[0]
for g in gradients[1:]:
    chain = chain + g  # rounded 63 times
once = fanin.add_n(gradients)  # summed in float32, rounded once

print(f"float16, 64 terms: a chain of + is off by {error(chain):.1e}, add_n by {error(once):.1e}")

# Keys fix the place of each term in the sum: the bits are the same in every order of arrival.
order = rng.permutation(64)
shuffled = fanin.add_n([gradients[i] for i in order], keys=[int(i) for i in order])
print("in another order, with keys, the same bits:", np.array_equal(once, shuffled))

# Into memory that is there.
out = np.empty(100_000, np.float32)
fanin.add_n(gradients, out=out, scale=1 / 64)
print("the mean, in float32:", out.dtype, bool(np.allclose(out, exact / 64, atol=1e-6)))
