"""Planted faults in collect_metadata and functionalize: each is noticed by a rule's own test.

A fault is a rule that is omitted or reversed: how inputs and outputs are distinguished, how private memory is laid
out, what is checked and when, how views, geometry and writes are returned. A few are planted in the ordinary
run, all of them in the longer one.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable

import pytest

from analysis import (
    test_collect,
    test_functionalize,
    test_functionalize_containers,
    test_functionalize_guard,
    test_functionalize_pure,
)
from kit import pymutants
from kit.pymutants import Mutant, survivors

A = "fanin.analysis."
#: The modules in the order in which they import each other.
ORDER = ["trees", "arrays", "calls", "guards", "collect", "pure", "wrapper"]


def fault(name: str, old: str, new: str) -> Mutant:
    after = ORDER[ORDER.index(name) + 1 :]
    return Mutant(A + name, old, new, tuple(A + other for other in after))


MUTANTS = [
    # private memory
    fault("arrays", "[...] = words(each_byte_once(arrays[number]))", "[...] = 0"),
    fault("arrays", "        if not m.writeable:", "        if False:"),
    fault("arrays", "self.numbers[k] for k in self.snapshot.changed(which))", "())"),
    fault("arrays", "if not self._member(u).geometry.fits(self.arrays[u])]", "if False]"),
    fault(
        "arrays",
        "        return view_at(self.snapshot",
        "        return np.array(array) if True else view_at(self.snapshot",
    ),
    fault("arrays", "        if not writeable:\n            view.flags.writeable = False\n", ""),
    fault("arrays", "    for whole in (root_of(source), source):", "    for whole in ():"),
    # outputs
    fault(
        "calls",
        "        elif id(itself) in inputs:\n            places.append",
        "        elif False:\n            places.append",
    ),
    fault("calls", "same_as = first_seen.setdefault(id(itself), j) if run.is_array(o) else j", "same_as = j"),
    fault("calls", "                if base not in group.numbers:", "                if True:"),
    fault("calls", "        if id(root) in distinct:", "        if False:"),
    fault("calls", '            kind, base = "shared", len(bases)', '            kind, base = "shared", 0'),
    fault("calls", "own=o.base is None", "own=True"),
    fault(
        "calls",
        "        if run.is_array(o) and not run.remakeable(o)",
        "        if False and not run.remakeable(o)",
    ),
    fault("calls", "        if len(args) > len(takes) and not rest:", "        if False:"),
    fault("arrays", "        if array.dtype.hasobject:", "        if False:"),
    fault(
        "arrays",
        "        if type(array) is not np.ndarray:\n            raise",
        "        if False:\n            raise",
    ),
    fault("calls", 'return short if short == path else f"{short} (at {path})"', "return short"),
    # inputs
    fault(
        "collect",
        "data = not resized and (u in self.earlier or itself or u in self.run.changed)",
        "data = not resized and (u in self.earlier or itself)",
    ),
    fault(
        "collect",
        "data = not resized and (u in self.earlier or itself or u in self.run.changed)",
        "data = not resized and (u in self.earlier or u in self.run.changed)",
    ),
    fault(
        "collect",
        "data = not resized and (u in self.earlier or itself or u in self.run.changed)",
        "data = u in self.earlier or itself or resized",
    ),
    fault("collect", "mutates_metadata=resized or u in self.moved", "mutates_metadata=resized"),
    fault(
        "collect",
        "mutations_hidden_from_autograd=not seen if log else not data",
        "mutations_hidden_from_autograd=not data",
    ),
    fault(
        "collect",
        "mutations_under_no_grad_or_inference_mode=data and seen == {False}",
        "mutations_under_no_grad_or_inference_mode=data and False in seen",
    ),
    fault("collect", "if origin in near} if log", "if origin == u} if log"),
    fault(
        "collect",
        'base = place.base if place.kind == "output" else self.call.first[place.base]',
        "base = place.base",
    ),
    fault(
        "collect",
        "if place.base not in shared:",
        "if True:",
    ),
    fault(
        "collect",
        "OutputType.non_alias if place.own else OutputType.unsafe_view_alias, None",
        "OutputType.non_alias, None",
    ),
    fault("collect", "        if info.has_mutation_tangent\n", "        if info.mutates_data\n"),
    fault(
        "collect",
        "        if info.output_type in PLAIN_TYPES and info.requires_grad_for_backward\n",
        "        if info.requires_grad_for_backward\n",
    ),
    # writes that tracked arrays find
    fault(
        "collect",
        "        for o in out:\n            written(o)\n        if isinstance(result",
        "        if isinstance(result",
    ),
    fault("collect", '            if method == "at":\n', "            if False:\n"),
    fault("collect", "if not 0 <= address(array) - run.began(number) <", "if False and 0 <"),
    fault("collect", "        if not basic(key):", "        if False:"),
    fault("collect", "    return func in WRITERS or bool", "    return bool"),
    fault("collect", "{**dict(zip(names, args, strict=False)), **kwargs}", "kwargs"),
    fault(
        "collect", '        out = args[at] if at < len(args) else kwargs.get("out")', '        out = kwargs.get("out")'
    ),
    fault("collect", "        whole.__set__(self, value)\n        written(self)", "        whole.__set__(self, value)"),
    fault("collect", "and _core.overlap(mine, run.as_it_was(u)))", ")"),
    fault("collect", "        self.met.update(u for u in others", "        set().update(u for u in others"),
    fault("calls", "        itself = o.base if is_stripped(o) and id(o.base) in inputs else o", "        itself = o"),
    fault("arrays", "memory = root[shift : shift + size].view(kind)", "memory = root[shift : shift + size]"),
    # what is out of sight
    fault("calls", "        if is_one(fn) or", "        if False and"),
    fault(
        "calls",
        '    if isinstance(x, LATER):\n        raise TypeError(f"{name()}: expected arrays in',
        '    if False:\n        raise TypeError(f"{name()}: expected arrays in',
    ),
    fault("calls", "    if any(is_private(array) for array in held(x, kinds)):", "    if False:"),
    fault("wrapper", "        for i in record.guard.boxes:", "        for i in ():"),
    fault(
        "collect",
        "        super().__setitem__(key, value)\n        written(self)\n",
        "        super().__setitem__(key, value)\n",
    ),
    # the guard
    fault("guards", "            if leaves[i] is not leaves[j]:\n                return None", "            pass"),
    fault("guards", "            if leaves[i] is leaves[j]:\n                return None", "            pass"),
    fault("guards", "        if len(self.empty) > 1 and", "        if False and"),
    fault("guards", "if self.layout.check(arrays) is None else None", "if True else None"),
    fault(
        "guards",
        "            return args if tuple(map(type, args)) == self.types else None",
        "            return args if len(args) == len(self.types) else None",
    ),
    fault("guards", "return leaves if form == self.form and", "return leaves if"),
    # the pure function
    fault("pure", "if len(group.members) > 1 and g in written]", "if len(group.members) > 1]"),
    fault(
        "pure", "self.bases.sort(key=lambda g: min(self.first[u] for u in groups[g].numbers))", "self.bases.reverse()"
    ),
    fault("pure", "if u is None or (u not in in_base and self.first[u] == i)]", "if u is None or u not in in_base]"),
    fault("pure", "self.late = [u for u in numbers if u in in_base and u in self.moved]", "self.late = []"),
    fault("pure", "if len(inner) != len(descs):", "if False:"),
    fault("pure", "or array.shape != shape or array.dtype != dtype:", "or array.shape != shape:"),
    fault("pure", "        if containers.changed():", "        if False:"),
    fault("pure", "behaviour_of(outcome, run.changed,", "behaviour_of(outcome, set(),"),
    fault("pure", "        self._compare(was, now)\n", "        pass\n"),
    fault("pure", "        if len(values) != count:", "        if False:"),
    fault("pure", "            steps += geometry_steps(arrays[u], geometry)", "            pass"),
    fault("pure", "            if p.same_as is not None and p.same_as < j:", "            if False:"),
    fault("pure", "                made[j] = arrays[p.base]", "                pass"),
    fault(
        "pure",
        "            steps.append(functools.partial(setattr, arrays[u].flags, ",
        "            (lambda x: x)((u, ",
    ),
    fault("pure", "arrays, recorded=True))", "arrays))"),
    fault("pure", "                if not can_be_made_writeable(arrays[u]):", "                if False:"),
    fault(
        "pure", "    if array.shape != shape or array.dtype != dtype:\n        raise", "    if False:\n        raise"
    ),
    fault("pure", "    if array.strides == geometry.strides:", "    if True:"),
    fault("pure", '    value = np.array(base, "u1")', "    value = base"),
    fault("pure", "            if p.cls is not None and type(made[j]) is not p.cls:", "            if False:"),
    # what is put back
    fault(
        "arrays",
        "        array.resize(math.prod(m.geometry.shape) * m.geometry.dtype.itemsize, refcheck=False)",
        "        pass",
    ),
    fault("arrays", "if not m.geometry.fits(array):", "if False:"),
    fault(
        "arrays",
        "            self.snapshot.restore(self.at[m.number], where)",
        "            pass",
    ),
    fault("arrays", "            array.flags.writeable = m.writeable", "            pass"),
    fault("arrays", "                named.clear()\n", ""),
    fault("arrays", "                held[:] = items", "                pass"),
    fault("arrays", "            if g in self.resized or any(", "            if True or any("),
    fault(
        "arrays",
        "            axes[-1][1] += stride // axes[-1][0] * (n - 1)",
        "            axes[-1][1] += n - 1",
    ),
    fault("trees", "            elif (known_at := same.get(place, place)) in known:", "            elif False:"),
    fault(
        "trees",
        "        return isinstance(other, Form) and (self is other or self.tokens == other.tokens)",
        "        return isinstance(other, Form)",
    ),
    fault("trees", "            new.__dict__.update(node.__dict__)", "                pass"),
    # the wrapper
    fault("wrapper", "record.to_copy if self._lend else None", "None"),
    fault("wrapper", "    caller.undo().note(error, record.name)", "    pass"),
    fault("wrapper", "            if alone and latest.index.count(old) == 1:", "            if True:"),
    fault("wrapper", "    if containers is not None:\n        containers.undo()", "    pass"),
    fault("wrapper", '        if self._guard == "error" and self._records:', "        if False:"),
    fault(
        "wrapper",
        '            if self._guard == "error":\n                self._hold(',
        "            if False:\n                self._hold(",
    ),
    fault("wrapper", "            record.touched |= more\n", ""),
    fault("wrapper", "[: self._keep]", ""),
    fault("calls", "    for u in sorted(now.written - recorded.written):", "    for u in ():"),
    fault("calls", "        if recorded.after.get(u) != now.after.get(u):", "        if False:"),
    fault("calls", "    if recorded.form != now.form:", "    if False:"),
    fault("calls", "        if was is not None and role is not None and was != role:", "        if False:"),
]


def unparametrized() -> list[Callable[[], None]]:
    """The rules' tests, those of the wrapper first."""
    plain = [
        t
        for name, t in vars(test_collect).items()
        if name.startswith("test_") and not getattr(t, "pytestmark", None) and t.__code__.co_argcount == 0
    ]
    return [
        *test_functionalize.CHECKS,
        *test_functionalize_containers.CHECKS,
        *test_functionalize_guard.CHECKS,
        *test_functionalize_pure.CHECKS,
        test_collect.check_routes,
        test_collect.check_writes_of_what_is_there,
        test_collect.check_identity,
        test_collect.check_bad_arguments,
        *plain,
    ]


def quiet(mutants: list[Mutant]) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return survivors(mutants, unparametrized())


def test_every_text_occurs_once_in_its_module() -> None:
    for mutant in MUTANTS:
        assert pymutants.changed(mutant)


def test_some_planted_faults_are_noticed() -> None:
    seed = os.environ.get("FANIN_SEED", "20261121")
    print(f"FANIN_SEED={seed}")
    assert quiet(random.Random(seed).sample(MUTANTS, 3)) == []


@pytest.mark.slow
def test_every_planted_fault_is_noticed() -> None:
    assert quiet(MUTANTS) == []


def test_a_fault_that_is_none_survives() -> None:
    harmless = Mutant(A + "trees", 'LEAF: Final = "*"', 'LEAF: Final = "+"', tuple(A + other for other in ORDER[1:]))
    assert pymutants.notices(harmless, test_functionalize.CHECKS[:3]) is None
