"""Every rule of a run, by code. Each is one sentence; all are asked, and everything that is broken is told at once."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from megaspec.core.errors import Problem
from megaspec.core.problems import origin_of
from megaspec.resolve import (
    rules_batch,
    rules_context,
    rules_mesh,
    rules_model,
    rules_moe,
    rules_optim,
    rules_overlap,
    rules_pipeline,
    rules_precision,
    rules_recompute,
)
from megaspec.resolve.case import Case, Rule
from megaspec.spec import Decision

RULES: dict[str, Rule] = {
    "ranks-torchrun": rules_mesh.ranks_are_those_that_torchrun_started,
    "ranks-degrees": rules_mesh.degrees_make_the_world,
    "ranks-gpus": rules_mesh.a_gpu_for_each_rank,
    "about-hardware": rules_mesh.named_hardware_is_known,
    "tp-heads": rules_mesh.tp_divides_heads,
    "tp-kv-heads": rules_mesh.tp_fits_kv_heads,
    "tp-ffn": rules_mesh.tp_divides_ffn,
    "sp-tp": rules_mesh.sequence_parallel_needs_tp,
    "sp-seq": rules_mesh.sequence_splits_over_tp,
    "sp-max-seq": rules_mesh.longest_sequence_splits_over_ranks,
    "dp-replicate": rules_mesh.replicas_share_nothing,
    "dp-sharded": rules_mesh.sharding_has_ranks_to_share,
    "dp-fsdp": rules_mesh.fsdp_has_one_replica,
    "dp-hsdp": rules_mesh.hsdp_shards_and_replicates,
    "grad-reduce": rules_mesh.reduced_gradients_have_ranks,
    "pp-layers": rules_pipeline.layers_divide_into_stages,
    "pp-uneven": rules_pipeline.uneven_stages_hold_all_layers,
    "pp-layout": rules_pipeline.layout_holds_all_layers,
    "pp-twice": rules_pipeline.stages_are_described_once,
    "pp-schedule": rules_pipeline.schedule_has_its_chunks,
    "pp-off": rules_pipeline.pipeline_settings_need_a_pipeline,
    "pp-micro-batches": rules_pipeline.interleaving_has_its_micro_batches,
    "pp-group": rules_pipeline.groups_fit_the_micro_batches,
    "pp-group-off": rules_pipeline.groups_need_interleaving,
    "cp-seq": rules_context.sequence_splits_over_cp,
    "cp-heads": rules_context.heads_split_over_cp,
    "cp-factors": rules_context.hierarchical_has_factors,
    "cp-off": rules_context.context_settings_need_cp,
    "ep-moe": rules_moe.expert_degrees_need_experts,
    "ep-experts": rules_moe.ep_divides_experts,
    "ep-grid": rules_moe.expert_grid_fits_the_ranks,
    "ep-replicas": rules_moe.replicas_hold_all_experts,
    "ep-dispatch": rules_moe.dispatch_needs_expert_ranks,
    "etp-width": rules_moe.etp_divides_experts_width,
    "tp-shared": rules_moe.tp_divides_shared_experts,
    "moe-sp": rules_moe.experts_under_tp_split_the_sequence,
    "moe-none": rules_moe.some_layer_has_experts,
    "moe-layers": rules_moe.layer_list_is_as_long_as_the_model,
    "moe-layers-twice": rules_moe.expert_layers_are_named_once,
    "moe-top-k": rules_moe.tokens_find_enough_experts,
    "moe-groups": rules_moe.groups_are_given_together,
    "moe-groups-even": rules_moe.groups_divide_experts,
    "moe-group-top-k": rules_moe.group_choice_is_within_the_groups,
    "moe-group-reach": rules_moe.chosen_groups_hold_enough_experts,
    "moe-bias": rules_moe.bias_balances_independent_scores,
    "moe-softmax": rules_moe.only_a_softmax_comes_first,
    "moe-top-1": rules_moe.a_single_expert_has_a_weight,
    "moe-sinkhorn": rules_moe.sinkhorn_balances_alone,
    "moe-capacity": rules_moe.capacity_needs_a_plain_choice,
    "moe-capacity-off": rules_moe.dropping_needs_a_capacity,
    "moe-losses": rules_moe.losses_are_given_once,
    "moe-gate": rules_moe.a_gate_needs_shared_experts,
    "recompute-off": rules_recompute.recompute_settings_need_their_kind,
    "recompute-parts": rules_recompute.recomputed_parts_are_named_once,
    "recompute-absent": rules_recompute.recomputed_parts_are_in_the_model,
    "recompute-layers": rules_recompute.recomputed_layers_are_there,
    "overlap-off": rules_overlap.overlap_needs_what_it_hides,
    "offload-layers": rules_overlap.offloaded_layers_are_there,
    "offload-optimizer": rules_overlap.offloaded_optimizers_work_element_by_element,
    "kv-heads": rules_model.kv_heads_divide_heads,
    "heads-width": rules_model.heads_divide_width,
    "rope-even": rules_model.rotary_heads_are_even,
    "rope-scaling": rules_model.rotary_scaling_is_ordered,
    "seq-model": rules_model.sequences_fit_the_model,
    "vocab-data": rules_model.vocabulary_holds_the_data,
    "kernel-attention": rules_model.attention_kernel_runs,
    "kernel-cross-entropy": rules_model.cross_entropy_kernel_runs,
    "kernel-grouped": rules_model.grouped_kernel_runs,
    "mla-kv-heads": rules_model.latent_attention_has_no_groups,
    "mla-head": rules_model.latent_heads_have_their_parts,
    "mla-rope": rules_model.latent_rotary_part_is_even,
    "mla-qk-norm": rules_model.latent_attention_has_its_own_norms,
    "precision-gpu": rules_precision.precision_runs_on_the_gpu,
    "fp8-gpu": rules_precision.fp8_runs_on_the_gpu,
    "fp8-layers": rules_precision.fp8_leaves_layers_to_itself,
    "fp8-gather": rules_precision.fp8_gathers_sharded_weights,
    "fp8-tiles": rules_precision.fp8_products_have_whole_tiles,
    "formats-sharded": rules_precision.narrow_state_is_sharded,
    "formats-weights": rules_precision.narrow_state_goes_with_narrow_weights,
    "formats-heads": rules_precision.scaled_state_is_of_own_heads,
    "batch-divides": rules_batch.global_batch_divides,
    "ramp-start": rules_batch.ramp_starts_below_the_batch,
    "ramp-increment": rules_batch.ramp_reaches_the_batch,
    "ramp-stages": rules_batch.ramp_stages_divide,
    "blend-weights": rules_batch.blend_weights_make_shares,
    "blend-pass": rules_batch.blend_without_weights_is_one_pass,
    "split-train": rules_batch.split_holds_training_data,
    "eval-split": rules_batch.evaluation_has_data,
    "data-train": rules_batch.training_split_fills_a_sequence,
    "data-valid": rules_batch.validation_split_fills_a_sequence,
    "sample-tokenizer": rules_batch.sampling_has_a_tokenizer,
    "lr-warmup": rules_optim.warmup_ends_before_decay,
    "lr-constant": rules_optim.a_constant_rate_stays,
    "wsd-steps": rules_optim.wsd_has_a_decay,
    "wsd-fits": rules_optim.wsd_decay_fits,
    "wsd-only": rules_optim.only_wsd_has_a_final_decay,
    "lr-min": rules_optim.lowest_rate_is_lowest,
    "lr-init": rules_optim.first_rate_is_not_highest,
    "wd-ramp": rules_optim.weight_decay_ramp_is_whole,
    "fp16-scale": rules_optim.fp16_scale_is_in_bounds,
    "log-tensorboard": rules_optim.tensorboard_is_installed,
}


def is_legal(case: Case) -> bool:
    """True when every rule is kept."""
    return all(rule(case) is None for rule in RULES.values())


def broken_codes(case: Case) -> frozenset[str]:
    """The codes of the rules that are broken."""
    return frozenset(code for code, rule in RULES.items() if rule(case) is not None)


def broken_rules(
    case: Case, *, decisions: tuple[Decision, ...], origins: Mapping[str, str], rules: Mapping[str, Rule] = RULES
) -> list[Problem]:
    """Every problem, with its code and where the value is from: a file, the command line, or our own decision."""
    reasons = {d.key: f"decided: {d.reason}" for d in decisions}
    problems = []
    for code, rule in rules.items():
        problem = rule(case if case.trial is None else replace(case, mends=partial(case.trial, code)))
        if problem is not None:
            origin = reasons.get(problem.key) or origin_of(origins, problem.key)
            problems.append(replace(problem, code=code, origin=origin))
    return problems
