"""Every rule of a run, by code. Each is one sentence; all are asked, and everything that is broken is told at once."""

from collections.abc import Mapping
from dataclasses import replace

from megaspec.core.errors import Problem
from megaspec.core.problems import origin_of
from megaspec.resolve import rules_batch, rules_mesh, rules_model, rules_optim
from megaspec.resolve.case import Case, Rule
from megaspec.spec import Decision

RULES: dict[str, Rule] = {
    "ranks-torchrun": rules_mesh.ranks_are_those_that_torchrun_started,
    "ranks-degrees": rules_mesh.degrees_make_the_world,
    "ranks-gpus": rules_mesh.a_gpu_for_each_rank,
    "tp-heads": rules_mesh.tp_divides_heads,
    "tp-kv-heads": rules_mesh.tp_fits_kv_heads,
    "tp-ffn": rules_mesh.tp_divides_ffn,
    "sp-tp": rules_mesh.sequence_parallel_needs_tp,
    "sp-seq": rules_mesh.sequence_splits_over_tp,
    "sp-max-seq": rules_mesh.longest_sequence_splits_over_tp,
    "kv-heads": rules_model.kv_heads_divide_heads,
    "heads-width": rules_model.heads_divide_width,
    "rope-even": rules_model.rotary_heads_are_even,
    "rope-scaling": rules_model.rotary_scaling_is_ordered,
    "seq-model": rules_model.sequences_fit_the_model,
    "vocab-data": rules_model.vocabulary_holds_the_data,
    "kernel-attention": rules_model.attention_kernel_runs,
    "kernel-cross-entropy": rules_model.cross_entropy_kernel_runs,
    "precision-gpu": rules_model.precision_runs_on_the_gpu,
    "batch-divides": rules_batch.global_batch_divides,
    "ramp-start": rules_batch.ramp_starts_below_the_batch,
    "ramp-increment": rules_batch.ramp_reaches_the_batch,
    "ramp-stages": rules_batch.ramp_stages_divide,
    "split-train": rules_batch.split_holds_training_data,
    "eval-split": rules_batch.evaluation_has_data,
    "data-train": rules_batch.training_split_fills_a_sequence,
    "data-valid": rules_batch.validation_split_fills_a_sequence,
    "sample-tokenizer": rules_batch.sampling_has_a_tokenizer,
    "lr-warmup": rules_optim.warmup_ends_before_decay,
    "wsd-steps": rules_optim.wsd_has_a_decay,
    "wsd-fits": rules_optim.wsd_decay_fits,
    "wsd-only": rules_optim.only_wsd_has_a_final_decay,
    "lr-min": rules_optim.lowest_rate_is_lowest,
    "lr-init": rules_optim.first_rate_is_not_highest,
    "wd-ramp": rules_optim.weight_decay_ramp_is_whole,
    "fp16-scale": rules_optim.fp16_scale_is_in_bounds,
    "log-tensorboard": rules_optim.tensorboard_is_installed,
}


def broken_rules(case: Case, *, decisions: tuple[Decision, ...], origins: Mapping[str, str]) -> list[Problem]:
    """Every problem, with its code and where the value is from: a file, the command line, or our own decision."""
    reasons = {d.key: f"decided: {d.reason}" for d in decisions}
    problems = []
    for code, rule in RULES.items():
        problem = rule(case)
        if problem is not None:
            origin = reasons.get(problem.key) or origin_of(origins, problem.key)
            problems.append(replace(problem, code=code, origin=origin))
    return problems
