"""Problems of PyTorch's CUDA graph trees, each by its issue, and fanin's behaviour. On the simulated device;
`fanin.GraphTree("cuda:0")` is the same. At the end a training step on the CPU, in NumPy.
"""

import threading
import warnings

import numpy as np

import fanin
from fanin import sim


def say(issue, what):
    print(f"{issue}: {what}")


def attempt(call):
    try:
        return call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def times(m, factor):
    def f(x):
        y = m.empty(x.shape, x.dtype)
        m.launch(fanin.current_stream("sim:0"), lambda a, b: np.multiply(a, factor, out=b), reads=[x], writes=[y])
        return y

    f.__name__ = f"times_{factor:g}"
    return f


def main(m):
    tree = fanin.GraphTree("sim:0", memory=1 << 16, limit=2)
    x = m.array(np.ones(2))

    # A gradient that lies in the tree's memory is overwritten by the next replay: after 4 steps 0.25, not 1.0.
    leaf = fanin.Leaf(m.array(np.zeros(2)))
    node = fanin.Node(lambda g: g, edges=[(leaf, 0)])
    adopts = tree.function(lambda x: fanin.backward([(node, 0, times(m, 0.25)(x))]))
    with fanin.set_options(warn_stream_mismatch=False), tree.step():
        say("#96693, the leaf adopts", attempt(lambda: adopts(x)))

    # Memory of the caller's, at one address, is what sums belong in; there it runs without a graph (#126938).
    def accumulate(x, grad):
        fanin.add_n([grad, times(m, 0.25)(x)], out=grad)

    adds, grad = tree.function(accumulate, roles=("copy", "accumulate")), m.array(np.zeros(2))
    for _ in range(4):
        with tree.step():
            adds(x, grad)
    say("#126938, accumulate", f"{adds.last.did}, {grad.numpy()}")

    # A handle of an earlier iteration: there it shows what the next replay wrote.
    double = tree.function(times(m, 2))
    for _ in range(4):
        with tree.step():
            old = double(x)
    say("a handle of an ended step", attempt(old.numpy))

    # g(f(x)) over two functions: there it fails where one of them hands over to the other.
    triple = tree.function(times(m, 3))
    for _ in range(4):
        with tree.step():
            seen = triple(double(x)).numpy()
    say("#160281, g(f(x))", f"{double.last.did}, {triple.last.did}, {seen}")

    # All outputs of one function kept: there each call overwrites the last one's.
    five = tree.function(times(m, 5))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            with tree.step():
                kept = [five(m.array(np.full(2, float(i)))) for i in range(4)]
                seen = [float(k.numpy()[0]) for k in kept]
    say("#170604, all of them kept", f"{five.last.did}, {seen}; {str(said[0].message).partition(':')[0]}")

    # A parameter that keeps moving: there it is recorded without end.
    moves, did = tree.function(times(m, 7), roles="static"), []
    weights = [m.array(np.ones(2)) for _ in range(7)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for w in weights:
            with tree.step():
                moves(w)
            did.append(moves.last.did)
    say("#188161, an operand that moves", f"{', '.join(did)}; {str(said[0].message).partition(',')[0]}")

    # A stream that was forked and not joined: there, a code.
    side = m.stream()

    def forgets(x):
        y = m.empty(x.shape, x.dtype)
        side.wait(fanin.current_stream("sim:0"))
        m.launch(side, lambda a, b: np.multiply(a, 2, out=b), reads=[x], writes=[y])
        return y

    joins = tree.function(forgets)
    with tree.step():
        joins(x)
        m.synchronize()
    with tree.step():
        say("#180396, a join forgotten", attempt(lambda: joins(x)))

    # Another thread: there, an assertion.
    def call():
        with m, tree.step():
            say("#123177, another thread", f"{double(x).numpy()}, {double.last.did}")

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

    # Ten shapes: there, memory for each, where each function has its own.
    shapes = fanin.GraphTree("sim:0", memory=1 << 16)
    f = shapes.function(times(m, 2))
    for _ in range(3):
        for n in range(1, 11):
            with shapes.step():
                f(m.array(np.ones(64 * n)))
    say("#83490, ten shapes", f"{shapes.stats.nodes} recordings in {shapes.stats.high_water} bytes, the largest's")


def on_the_cpu():
    """Least squares: NumPy's functions are recorded, weights stay where they are, the loss is a handle of its step."""
    tree = fanin.GraphTree("cpu")

    def train(x, want, w):
        wrong = x @ w - want
        w -= 0.1 * (x.T @ wrong) / len(x)
        return np.mean(wrong * wrong)

    step = tree.function(train, roles=("copy", "copy", "static"))
    rng, w, did = np.random.default_rng(0), np.zeros(3), []
    for _ in range(100):
        x = rng.standard_normal((16, 3))
        with tree.step():
            loss = step(x, x @ [1.0, 2.0, 3.0], w)
            last = float(loss.numpy())
        did.append(step.last.did)
    say("on the CPU", f"{', '.join(did[:4])}, ..: loss {last:.1e}, w {w.round(2)}")
    say("a loss of an ended step", attempt(loss.numpy))


if __name__ == "__main__":
    with sim.Machine(seed=1) as machine:
        main(machine)
    on_the_cpu()
