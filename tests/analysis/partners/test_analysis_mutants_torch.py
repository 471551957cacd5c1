"""Planted faults of the metadata of torch functions: the tests of test_analysis_torch.py notice each."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("torch", reason="torch is not installed")

from analysis.partners import test_analysis_torch as collected  # noqa: E402
from kit.pymutants import Mutant, survivors  # noqa: E402

T, C = "fanin.analysis.tensors", "fanin.analysis.collect"


def fault(old: str, new: str) -> Mutant:
    """A fault of the adapter for tensors, which the collector uses."""
    return Mutant(T, old, new, (C,))


MUTANTS = [
    fault("            mutates_data=written and not elsewhere,", "            mutates_data=written,"),
    fault(
        "        moved = elsewhere or MetadataKey.make(new) != MetadataKey.make(x) or new.dtype != x.dtype",
        "        moved = MetadataKey.make(new) != MetadataKey.make(x)",
    ),
    fault(
        "        moved = elsewhere or MetadataKey.make(new) != MetadataKey.make(x) or new.dtype != x.dtype",
        "        moved = elsewhere",
    ),
    fault("and all(w.unseen for w in self.touched[i])", "and any(w.unseen for w in self.touched[i])"),
    fault("and i not in self.hidden\n", "\n"),
    fault("mutations_hidden_from_autograd=not self.touched[i]", "mutations_hidden_from_autograd=i in self.hidden"),
    fault(
        "            requires_grad=new.requires_grad,\n            keep",
        "            requires_grad=x.requires_grad,\n            keep",
    ),
    fault("unseen = not torch.is_grad_enabled() or", "unseen ="),
    fault("elif not effects.moves and in_memory", "elif in_memory"),
    fault("                self.hidden.add(i)\n", "                pass\n"),
    fault(
        "if _core.overlap(x, write.where)]",
        "if x.untyped_storage()._cdata == write.where.untyped_storage()._cdata]",
    ),
    fault("        if start < end:", "        if False:"),
    fault(
        "        if input_ is not None and custom:\n            return OutputType.custom_function_view, None\n",
        "",
    ),
    fault("        if is_input is not None:", "        if False:"),
    fault("            if root in beside:", "            if root is not None:"),
    fault("max(touching or beside, default=None)", "max(beside, default=None)"),
    fault(
        "            if self.plain_views[lies] == 0 and made is not None:\n",
        "            if False:\n",
    ),
    fault("if base is not None and o.requires_grad and base.requires_grad:", "if base is not None:"),
    fault("== 1 or self.plain_views[lies] <= 1:", "== 1:"),
    fault("== 1 or self.plain_views[lies] <= 1:", "== 1 or self.plain_views[lies] <= 2:"),
    fault(
        "            if id(base) in self.at:\n                return", "            if False:\n                return"
    ),
    fault("            if known is base:\n", "            if False:\n"),
    fault(
        "        if not o.requires_grad and self.shared[lies] > 1:",
        "        if False:",
    ),
    fault("and MetadataKey.make(other) == key\n", "and True\n"),
    fault("o.requires_grad and (o._base is None or history(o) is not None)", "o.requires_grad"),
    fault("origin.of_several or effects.several)", "effects.several)"),
    fault("and not inputs[base].mutates_metadata", ""),
    fault("            torch.set_grad_enabled(grad)\n", ""),
    fault("with torch.random.fork_rng(devices=[]), self:", "with self:"),
    fault("copies[group[0][0]] = group[0][1].clone()", "copies[group[0][0]] = group[0][1]"),
    fault("        if id(x) not in self.made:", "        if True:"),
    Mutant(C, "        if info.has_mutation_tangent\n", "        if info.mutates_data and info.requires_grad\n"),
    Mutant(
        C,
        "        if info.output_type in PLAIN_TYPES and info.requires_grad_for_backward\n",
        "        if info.output_type in PLAIN_TYPES and info.requires_grad\n",
    ),
]


CHECKS = [
    collected.test_who_writes_follows_the_table,
    collected.test_a_changed_storage_is_reported_where_pytorch_raises,
    collected.kept_grad_mode,
    collected.test_writes_outside_of_operations_are_found_and_hidden_from_autograd,
    collected.test_of_overlapping_inputs_each_with_a_written_byte_is_written,
    collected.test_inputs_that_share_memory_share_it_in_the_run,
    collected.test_inputs_of_several_storages_on_one_memory_share_it_in_the_run,
    collected.test_outputs_of_each_kind,
    collected.test_the_arguments_are_as_they_were_also_where_the_function_raises,
    collected.test_outputs_of_the_rarer_kinds,
    collected.test_outputs_that_are_views_under_no_grad,
    collected.test_outputs_keep_their_places_if_an_input_moves,
    collected.fields_of_programs,
]


def test_planted_faults_are_noticed_a_sample() -> None:
    assert survivors([MUTANTS[i] for i in (0, 3, 9, 11)], CHECKS[:-1]) == []


@pytest.mark.slow
def test_every_planted_fault_is_noticed() -> None:
    assert survivors(MUTANTS, CHECKS) == []
