"""Every rule of a run, by code. Each is one sentence; all are asked, and everything that is broken is told at once."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from megaspec.core.errors import Problem
from megaspec.core.problems import origin_of
from megaspec.rules import (
    batch_rules,
    context_rules,
    init_rules,
    log_rules,
    mesh_rules,
    model_rules,
    moe_rules,
    optim_rules,
    overlap_rules,
    pipeline_rules,
    positions_rules,
    precision_rules,
    recompute_rules,
    schedule_rules,
    trainable_rules,
    upcycle_rules,
)
from megaspec.rules.case import Case, Rule
from megaspec.spec import Decision

RULES: dict[str, Rule] = {
    "ranks-torchrun": mesh_rules.ranks_are_those_that_torchrun_started,
    "ranks-degrees": mesh_rules.degrees_make_the_world,
    "ranks-gpus": mesh_rules.a_gpu_for_each_rank,
    "about-hardware": mesh_rules.named_hardware_is_known,
    "tp-heads": mesh_rules.tp_divides_heads,
    "tp-kv-heads": mesh_rules.tp_fits_kv_heads,
    "tp-ffn": mesh_rules.tp_divides_ffn,
    "sp-tp": mesh_rules.sequence_parallel_needs_tp,
    "sp-seq": mesh_rules.sequence_splits_over_tp,
    "sp-max-seq": mesh_rules.longest_sequence_splits_over_ranks,
    "dp-replicate": mesh_rules.replicas_share_nothing,
    "dp-sharded": mesh_rules.sharding_has_ranks_to_share,
    "dp-fsdp": mesh_rules.fsdp_has_one_replica,
    "dp-hsdp": mesh_rules.hsdp_shards_and_replicates,
    "grad-reduce": mesh_rules.reduced_gradients_have_ranks,
    "pp-layers": pipeline_rules.layers_divide_into_stages,
    "pp-uneven": pipeline_rules.uneven_stages_hold_all_layers,
    "pp-layout": pipeline_rules.layout_holds_all_layers,
    "pp-twice": pipeline_rules.stages_are_described_once,
    "pp-schedule": pipeline_rules.schedule_has_its_chunks,
    "pp-off": pipeline_rules.pipeline_settings_need_a_pipeline,
    "pp-micro-batches": pipeline_rules.interleaving_has_its_micro_batches,
    "pp-group": pipeline_rules.groups_fit_the_micro_batches,
    "pp-group-off": pipeline_rules.groups_need_interleaving,
    "cp-seq": context_rules.sequence_splits_over_cp,
    "cp-heads": context_rules.heads_split_over_cp,
    "cp-factors": context_rules.hierarchical_has_factors,
    "cp-off": context_rules.context_settings_need_cp,
    "ep-moe": moe_rules.expert_degrees_need_experts,
    "ep-experts": moe_rules.ep_divides_experts,
    "ep-grid": moe_rules.expert_grid_fits_the_ranks,
    "ep-replicas": moe_rules.replicas_hold_all_experts,
    "ep-dispatch": moe_rules.dispatch_needs_expert_ranks,
    "etp-width": moe_rules.etp_divides_experts_width,
    "tp-shared": moe_rules.tp_divides_shared_experts,
    "moe-sp": moe_rules.experts_under_tp_split_the_sequence,
    "moe-none": moe_rules.some_layer_has_experts,
    "moe-layers": moe_rules.layer_list_is_as_long_as_the_model,
    "moe-layers-twice": moe_rules.expert_layers_are_named_once,
    "moe-top-k": moe_rules.tokens_find_enough_experts,
    "moe-groups": moe_rules.groups_are_given_together,
    "moe-groups-even": moe_rules.groups_divide_experts,
    "moe-group-top-k": moe_rules.group_choice_is_within_the_groups,
    "moe-group-reach": moe_rules.chosen_groups_hold_enough_experts,
    "moe-group-score": moe_rules.a_group_score_needs_groups,
    "moe-group-two": moe_rules.a_group_has_the_experts_of_its_score,
    "moe-bias": moe_rules.bias_balances_independent_scores,
    "moe-bias-rate": moe_rules.only_a_bias_that_exists_moves,
    "moe-top-1": moe_rules.a_single_expert_has_a_weight,
    "moe-sinkhorn": moe_rules.sinkhorn_balances_alone,
    "moe-capacity": moe_rules.capacity_needs_a_plain_choice,
    "moe-capacity-off": moe_rules.dropping_needs_a_capacity,
    "moe-losses": moe_rules.losses_are_given_once,
    "moe-gate": moe_rules.a_gate_needs_shared_experts,
    "recompute-off": recompute_rules.recompute_settings_need_their_kind,
    "recompute-parts": recompute_rules.recomputed_parts_are_named_once,
    "recompute-absent": recompute_rules.recomputed_parts_are_in_the_model,
    "recompute-layers": recompute_rules.recomputed_layers_are_there,
    "overlap-off": overlap_rules.overlap_needs_what_it_hides,
    "offload-layers": overlap_rules.offloaded_layers_are_there,
    "offload-optimizer": overlap_rules.offloaded_optimizers_work_element_by_element,
    "kv-heads": model_rules.kv_heads_divide_heads,
    "heads-width": model_rules.heads_divide_width,
    "rope-even": positions_rules.rotary_heads_are_even,
    "rope-scaling": positions_rules.rotary_scaling_is_ordered,
    "rope-yarn": positions_rules.yarn_has_growing_wavelengths,
    "rope-longrope": positions_rules.longrope_has_a_factor_for_each_frequency,
    "rope-attention": positions_rules.attention_factor_is_said_once,
    "layer-pattern": positions_rules.layer_pattern_names_layer_types,
    "layer-types": positions_rules.layer_types_are_used,
    "layer-positions": positions_rules.layers_turn_where_nothing_is_added,
    "layer-masks": positions_rules.layers_have_masks_where_attention_has,
    "seq-model": model_rules.sequences_fit_the_model,
    "vocab-data": model_rules.vocabulary_holds_the_data,
    "kernel-attention": model_rules.attention_kernel_runs,
    "kernel-attention-merge": model_rules.attention_merge_kernel_runs,
    "kernel-cross-entropy": model_rules.cross_entropy_kernel_runs,
    "kernel-grouped": model_rules.grouped_kernel_runs,
    "kernel-unpermute": model_rules.unpermute_kernel_runs,
    "kernel-fp8-cast": model_rules.fp8_cast_kernel_runs,
    "kernel-scaled-product": model_rules.scaled_product_kernel_runs,
    "kernel-adamw": model_rules.adamw_kernel_runs,
    "mla-kv-heads": model_rules.latent_attention_has_no_groups,
    "mla-head": model_rules.latent_heads_have_their_parts,
    "mla-rope": model_rules.latent_rotary_part_is_even,
    "mla-positions": model_rules.latent_attention_is_rotary,
    "qk-norm-whole": model_rules.whole_norms_are_root_mean_squares,
    "qk-norm-l2": positions_rules.l2_norms_have_positions_before_them,
    "temperature-positions": positions_rules.temperature_is_for_layers_without_rotary_positions,
    "flat-length": model_rules.flat_layers_are_as_many_as_the_model_has,
    "flat-experts": model_rules.flat_layers_and_experts_agree,
    "flat-which": model_rules.flat_layers_say_where_experts_are,
    "precision-gpu": precision_rules.precision_runs_on_the_gpu,
    "fp8-gpu": precision_rules.fp8_runs_on_the_gpu,
    "fp8-layers": precision_rules.fp8_leaves_layers_to_itself,
    "fp8-format": precision_rules.fp8_format_is_one_of_the_recipe,
    "fp8-margin": precision_rules.fp8_looks_back_where_scales_are_delayed,
    "fp8-heads": precision_rules.fp8_heads_have_one_rank,
    "fp8-gather": precision_rules.fp8_gathers_sharded_weights,
    "fp8-tiles": precision_rules.fp8_products_have_whole_tiles,
    "formats-sharded": precision_rules.narrow_state_is_sharded,
    "formats-weights": precision_rules.narrow_state_goes_with_narrow_weights,
    "formats-heads": precision_rules.scaled_state_is_of_own_heads,
    "batch-divides": batch_rules.global_batch_divides,
    "ramp-start": batch_rules.ramp_starts_below_the_batch,
    "ramp-increment": batch_rules.ramp_reaches_the_batch,
    "ramp-stages": batch_rules.ramp_stages_divide,
    "blend-weights": batch_rules.blend_weights_make_shares,
    "blend-pass": batch_rules.blend_without_weights_is_one_pass,
    "split-train": batch_rules.split_holds_training_data,
    "eval-split": batch_rules.evaluation_has_data,
    "data-train": batch_rules.training_split_fills_a_sequence,
    "data-valid": batch_rules.validation_split_fills_a_sequence,
    "valid-samples": batch_rules.evaluation_sets_fill_a_sequence,
    "valid-vocab": batch_rules.evaluation_sets_fit_the_vocabulary,
    "valid-seq": batch_rules.evaluation_lengths_fit,
    "valid-mask": batch_rules.evaluation_masks_as_training,
    "valid-trained": batch_rules.evaluation_sets_are_not_trained_on,
    "sample-tokenizer": batch_rules.sampling_has_a_tokenizer,
    "sample-draws": batch_rules.sampling_draws,
    "trainable-names": trainable_rules.patterns_fit_parameters,
    "trainable-none": trainable_rules.something_is_trained,
    "lr-warmup": optim_rules.warmup_ends_before_decay,
    "lr-constant": optim_rules.a_constant_rate_stays,
    "wsd-steps": optim_rules.wsd_has_a_decay,
    "wsd-fits": optim_rules.wsd_decay_fits,
    "wsd-only": optim_rules.only_wsd_has_a_final_decay,
    "lr-min": optim_rules.lowest_rate_is_lowest,
    "lr-init": optim_rules.first_rate_is_not_highest,
    "lr-init-warmup": schedule_rules.a_first_rate_has_a_warmup,
    "first-step": schedule_rules.schedules_begin_with_the_run,
    "lr-steps": schedule_rules.the_schedule_has_steps,
    "pieces-kind": schedule_rules.piecewise_has_pieces,
    "pieces-length": schedule_rules.pieces_have_one_length,
    "pieces-ascend": schedule_rules.pieces_ascend,
    "pieces-rate": schedule_rules.pieces_say_a_rate_once,
    "pieces-highest": schedule_rules.pieces_stay_below_the_highest_rate,
    "pieces-end": schedule_rules.pieces_reach_the_end,
    "wd-ramp": optim_rules.weight_decay_ramp_is_whole,
    "fp16-scale": optim_rules.fp16_scale_is_in_bounds,
    "init-twice": init_rules.one_source_of_weights,
    "init-off": init_rules.weights_have_a_source,
    "init-rows": init_rules.new_rows_belong_to_another_vocabulary,
    "init-read": init_rules.source_of_weights_is_read,
    "init-upcycle": upcycle_rules.copies_add_up_to_the_dense_model,
    "init-model": init_rules.initial_weights_are_of_this_model,
    "init-weights": init_rules.initial_weights_cover_the_model,
    "log-tensorboard": log_rules.tensorboard_is_installed,
    "log-installed": log_rules.sinks_are_installed,
    "log-address": log_rules.no_password_in_an_address,
    "log-once": log_rules.each_service_once,
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
        looked_at = case
        if case.trial is not None:
            looked_at = replace(case, mends=partial(case.trial, code))
        problem = rule(looked_at)
        if problem is not None:
            origin = reasons.get(problem.key) or origin_of(origins, problem.key)
            problems.append(replace(problem, code=code, origin=origin))
    return problems
