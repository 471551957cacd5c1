"""An optimizer's step that writes views of one flat buffer, as a pure function with a signature, and a wrapper that
does what the step did.
"""

import io

import numpy as np

from fanin.analysis import alias_dot, alias_plot, create_graph_signature, functionalize
from fanin.sharing import overlaps

# All parameters lie in one buffer. The step is given the parameters, the buffer (for weight decay), a momentum for
# each, and gradients.
flat = np.ones(10)
weight, bias = flat[:8].reshape(4, 2), flat[8:]
moment_w, moment_b = np.zeros((4, 2)), np.zeros(2)
grad_w, grad_b = np.full((4, 2), 0.5), np.full(2, 0.25)
names = ["weight", "bias", "flat", "moment_w", "moment_b", "grad_w", "grad_b"]


def step(weight, bias, flat, moment_w, moment_b, grad_w, grad_b):
    flat *= 0.5
    for p, m, g in [(weight, moment_w, grad_w), (bias, moment_b, grad_b)]:
        m *= 0.9
        m += g
        p -= m
    return weight[0], flat, np.linalg.norm(flat)


args = (weight, bias, flat, moment_w, moment_b, grad_w, grad_b)
f = functionalize(step, args)  # one run on copies: nothing of the caller's has changed
print("components:", [[names[i] for i in c] for c in overlaps(args).components])
for name, info in zip(names, f.meta.input_info, strict=True):
    print(f"  {name}: {info.mutation_type.name}")
print("outputs:", [(o.output_type.name, o.base_idx) for o in f.meta.output_info])

# The pure function takes one base for the three arrays that share memory, and returns what was written.
print("pure takes:", *f.pure.input_descs, sep="\n  ")
print("and returns:", *f.pure.output_descs, sep="\n  ")
signature = create_graph_signature(f.pure.names, f.pure.inner_meta)
print("new values:", signature.user_inputs_to_mutate)

# The wrapper leaves the caller with what the step itself would have left: writes, and outputs that are views of the
# caller's own.
row, buffer, norm = f(*args)
print(flat.tolist(), moment_b.tolist(), round(float(norm), 3))
print(buffer is flat, np.shares_memory(row, weight), row.tolist())

print(alias_dot(args, names))
try:
    picture = io.BytesIO()
    alias_plot(args, picture, names, title="who shares memory in the step")
    print("picture:", picture.getvalue()[:5].decode())
except ImportError as e:
    print("picture:", e)
