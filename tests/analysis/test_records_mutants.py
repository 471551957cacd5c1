"""Planted faults of the records: the tests of test_analysis_records.py notice each."""

from __future__ import annotations

import random

import pytest

from analysis import test_analysis_records as records
from kit.pymutants import Mutant, survivors

R, V = "fanin.analysis.records", "fanin.analysis.overlapping"
P = "fanin.analysis"
MUTANTS = [
    Mutant(R, "if self.keep_input_mutations and written and unseen:", "if written and unseen:", (P,)),
    Mutant(R, "(not self.mutates_metadata and not self.requires_grad)", "not self.requires_grad", (P,)),
    Mutant(R, "(not self.mutates_metadata and not self.requires_grad)", "not self.mutates_metadata", (P,)),
    Mutant(R, "            or self.mutations_hidden_from_autograd\n", "", (P,)),
    Mutant(R, "            or self.mutations_under_no_grad_or_inference_mode\n", "", (P,)),
    Mutant(
        R,
        "written = self.mutates_data or self.mutates_storage_metadata or",
        "written = self.mutates_data or",
        (P,),
    ),
    Mutant(
        R,
        "return self.mutation_type is MutationType.MUTATED_OUT_GRAPH and self.mutates_data and self.requires_grad",
        "return self.mutates_data and self.requires_grad",
        (P,),
    ),
    Mutant(
        R,
        "return self.mutation_type is MutationType.MUTATED_OUT_GRAPH and self.mutates_data and self.requires_grad",
        "return self.mutation_type is MutationType.MUTATED_OUT_GRAPH and self.mutates_data",
        (P,),
    ),
    Mutant(R, "if self.mutates_storage_metadata and not self.mutates_metadata:", "if False:", (P,)),
    Mutant(
        R,
        "INPUT_ALIAS_TYPES = frozenset({OutputType.alias_of_input, OutputType.is_input})",
        "INPUT_ALIAS_TYPES = frozenset({OutputType.alias_of_input})",
        (P,),
    ),
    Mutant(
        R,
        "OutputType.unsafe_view_alias, OutputType.custom_function_view})",
        "OutputType.unsafe_view_alias})",
        (P,),
    ),
    Mutant(R, "        if other is None:\n            return True\n", "", (P,)),
    Mutant(R, "field(default=None, hash=False)", "None", (P,)),
    Mutant(
        R,
        "kinds(self.traced_tangents) == kinds(other.traced_tangents)",
        "len(self.traced_tangents) == len(other.traced_tangents)",
        (P,),
    ),
    Mutant(R, "and self.num_backward_tokens == other.num_backward_tokens", "", (P,)),
    Mutant(R, "            and self.num_intermediate_bases == other.num_intermediate_bases\n", "", (P,)),
    Mutant(R, "if not hidden[i])", "if hidden[i])", (P,)),
    Mutant(
        R,
        "return self.num_mutated_inp_runtime_indices + self.num_outputs + self.num_intermediate_bases",
        "return self.num_mutated_inp_runtime_indices + self.num_outputs",
        (P,),
    ),
    Mutant(R, "expanded = 0 not in size and any(n > 1 and s == 0", "expanded = 0 not in size and any(s == 0", (P,)),
    Mutant(R, "            if nested and reach[-2] != stride[1]:", "            if nested:", (P,)),
    Mutant(R, "address(array) - address(root_of(array))", "0", (P,)),
    Mutant(
        R,
        "head = [keep_arg_mask[i] for i in tangent_inputs(m)]",
        "head = [keep_arg_mask[i] for i, x in enumerate(m.input_info) if x.mutates_data]",
        (P,),
    ),
    Mutant(
        R,
        "if o.output_type in INPUT_ALIAS_TYPES else o\n",
        "if o.base_idx is not None and o.base_idx < len(add_dupe_map) else o\n",
        (P,),
    ),
    Mutant(R, "tuple(dict.fromkeys(add_dupe_map[i] for i in m.static_input_indices))", "m.static_input_indices", (P,)),
    Mutant(R, "    if n == 0 or not keep_arg_mask[0]:", "    if n == 0:", (P,)),
    Mutant(R, "        if m.input_info[i] != m.input_info[kept[to]]:", "        if False:", (P,)),
    Mutant(R, "or (keep and to != len(kept) - 1)", "", (P,)),
    Mutant(R, "dataclasses.replace(x, unwrapped_idx=i) if isinstance(x, PlainTensorMeta) else x", "x", (P,)),
    Mutant(R, "    rest = len(tangent_inputs(m))", "    rest = len(written)", (P,)),
    Mutant(
        R,
        "written = [i for i, info in enumerate(inputs) if info.has_mutation_tangent]",
        "written = [i for i, info in enumerate(inputs) if info.mutates_data]",
        (P,),
    ),
    Mutant(
        R,
        "        mutates_data=True,  # there is",
        "        mutates_data=any(x.mutates_data for x in infos),  # there is",
        (P,),
    ),
    Mutant(
        R,
        "requires_grad=any(x.requires_grad for x in infos),\n",
        "requires_grad=any(x.requires_grad for x in infos), mutates_metadata=any(x.mutates_metadata for x in infos),\n",
        (P,),
    ),
    Mutant(R, "mutations_hidden_from_autograd=all(", "mutations_hidden_from_autograd=any(", (P,)),
    Mutant(R, "mutations_under_no_grad_or_inference_mode=all(", "mutations_under_no_grad_or_inference_mode=any(", (P,)),
    Mutant(R, "requires_grad=any(x.requires_grad", "requires_grad=all(x.requires_grad", (P,)),
    Mutant(R, "is_leaf=one.is_leaf,\n", "is_leaf=True,\n", (P,)),
    Mutant(
        R,
        "        if o.output_type in INPUT_ALIAS_TYPES:",
        "        if o.base_idx is not None:",
        (P,),
    ),
    Mutant(R, "if merged[i] and inner_args[position[i]] is not outer_args[i]:", "if position[i] != i:", (P,)),
    Mutant(R, "if merged[i] and inner_args[position[i]] is not outer_args[i]:", "if merged[i]:", (P,)),
    Mutant(
        R,
        'o.view_meta_sequence and dataclasses.replace(o.view_meta_sequence, sequence=("as_strided",))',
        "o.view_meta_sequence",
        (P,),
    ),
    Mutant(R, "if info.mutates_metadata and merged[i]]", "if info.mutates_metadata]", (P,)),
    Mutant(R, "        if len({x.is_leaf for x in infos}) > 1:", "        if False:", (P,)),
    Mutant(
        R,
        "tuple(position[i] for i in m.static_input_indices if not merged[i])",
        "tuple(position[i] for i in m.static_input_indices)",
        (P,),
    ),
    Mutant(R, "first = tokens + len(written)", "first = len(written)", (P,)),
    Mutant(
        R,
        "written = fw_metadata.mutated_inp_runtime_indices",
        "written = tuple(i for i, x in enumerate(fw_metadata.input_info) if x.mutates_data)",
        (P,),
    ),
    Mutant(R, "loss_output=outputs[loss_index]", "loss_output=outputs[loss_index - 1]", (P,)),
    Mutant(R, "for g, i in grads.items() if i < params}", "for g, i in grads.items()}", (P,)),
    Mutant(
        R,
        "buffers_to_mutate={name: full[i] for i, name in new.items() if params <= i < len(full)}",
        "buffers_to_mutate={name: full[i] for i, name in new.items() if params < i < len(full)}",
        (P,),
    ),
    Mutant(R, "wrong = [full[i] for i in written if i < params]", "wrong = []", (P,)),
    Mutant(R, "or len(gradients) != len(expected):", "or len(gradients) < len(expected):", (P,)),
    Mutant(V, '        return False, "1"', '        return False, "7"', (P,)),
    Mutant(V, '    if x.size == 0 or y.size == 0:\n        return True, "2"\n', "", (P,)),
    Mutant(V, "    if x.offset > y.offset:\n        x, y = y, x\n", "", (P,)),
    Mutant(V, 'return x.size <= d, "4"', 'return x.size < d, "4"', (P,)),
    Mutant(V, "    if x.last < y.offset:", "    if x.last <= y.offset:", (P,)),
    Mutant(V, '        if d < width:\n            return False, "6a"\n', "", (P,)),
    Mutant(V, "fits = d % s + y.shape[1] <= s", "fits = d % s + y.shape[1] <= s and d % s >= width", (P,)),
    Mutant(V, '        return fits, "6c" if fits else "6d"', '        return False, "6d"', (P,)),
    Mutant(V, '    return False, "7"\n', '    return True, "7"\n', (P,)),
    Mutant(V, '"units" if len(sizes) > 1 else rule', "rule", (P,)),
    Mutant(
        V,
        "for s, n in zip(x.strides, x.shape, strict=True) if n > 1 and x.itemsize and s % x.itemsize]",
        "for s, n in zip(x.strides, x.shape, strict=True) if False]",
        (P,),
    ),
]

CHECKS = [
    records.test_the_mutation_type_is_computed_for_every_combination,
    records.test_an_output_has_a_base_where_its_kind_needs_one_and_nowhere_else,
    records.test_how_a_view_was_made_counts_by_what_came_out,
    records.test_the_key_of_an_array_is_its_geometry_in_its_memory,
    records.test_the_layout_of_a_tangent_is_that_of_the_array_unless_it_is_expanded,
    records.test_counts_and_indices_follow_from_the_records,
    records.test_metadata_is_equal_where_what_counts_is,
    records.test_without_duplicates_inputs_tangents_and_positions_of_inputs_follow,
    records.test_a_written_duplicate_without_a_gradient_takes_no_tangent_of_an_output,
    records.test_masks_and_maps_that_do_not_fit_are_refused,
    records.test_a_base_replaces_its_views,
    records.test_the_fields_of_a_base_are_those_of_the_table,
    records.test_a_view_that_is_the_base_itself_stays_what_it_is,
    records.test_bases_that_do_not_fit_are_refused,
    records.test_overlap_sets_of_ndarrays_are_exact_and_pytorchs_mistakes_have_their_rule,
    records.test_an_invalid_request_is_refused_by_its_position,
    records.test_a_signature_names_what_each_slot_is,
    records.test_a_signature_of_a_graph_that_is_only_forward,
    records.test_a_signature_uses_positions_if_names_are_equal,
    records.test_writes_in_the_graph_are_no_outputs_of_it,
    records.test_signatures_that_do_not_add_up_are_refused,
]


def test_planted_faults_are_noticed_a_sample() -> None:
    assert survivors(random.Random(2).sample(MUTANTS, 3), CHECKS) == []


@pytest.mark.slow
def test_every_planted_fault_is_noticed() -> None:
    assert survivors(MUTANTS, CHECKS) == []
