"""Every rule: the smallest recipe that breaks it, that its way out is one, and everything wrong in one report."""

import ast
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from megaspec.compose.compose import compose
from megaspec.core.errors import DataError, Problem, RecipeError
from megaspec.precision.spec import BLACKWELL_SM
from megaspec.resolve.resolver import resolve, settle
from megaspec.rules import table
from megaspec.rules.examples import B200_WITH_TE, CPU, EXAMPLES, FACTS, H200, H200_WITH_TE
from megaspec.rules.table import RULES
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec_kernels.catalog import BLACKWELL, CATALOG, Requirement
from tests.rules.composed import composed

# Words by which a message says what to do.
WAY_OUT = re.compile(r"\b(try|set|drop|keep|lower|raise|write|install|shorten|it has|start|did you mean|Llama 3 has)\b")


def broken(overrides, target=CPU, facts=FACTS, recipe="hello") -> list[Problem]:
    made = composed(recipe, tuple(overrides))
    try:
        settle(made.recipe, target, facts, made.origins)
    except RecipeError as error:
        return error.problems
    return []


def test_every_rule_has_an_example():
    assert set(RULES) - set(EXAMPLES) == set(), "add the smallest recipe that breaks them to EXAMPLES in examples.py"
    assert set(EXAMPLES) - set(RULES) == set(), "examples of rules that RULES in table.py does not have"


def test_every_rule_that_is_written_is_asked():
    """What lies in a *_rules.py and is in no list would never be asked."""
    asked = {rule.__qualname__ for rule in RULES.values()}
    folder = Path(table.__file__).parent
    for path in sorted(folder.glob("*_rules.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and takes_a_case_alone(node) and not node.name.startswith("_"):
                assert node.name in asked, f"add {node.name} of {path.name} to RULES in {Path(table.__file__).name}"


def takes_a_case_alone(function: ast.FunctionDef) -> bool:
    """Whether a function has the signature of a rule."""
    returns = "" if function.returns is None else ast.unparse(function.returns)
    arguments = [ast.unparse(one.annotation) for one in function.args.args if one.annotation is not None]
    return arguments == ["Case"] and not function.args.kwonlyargs and returns == "Problem | None"


def test_every_kernel_that_can_not_run_is_refused():
    for operation, one in CATALOG.items():
        runs_everywhere = all(need == Requirement() for need in one.implementations.values())
        code = f"kernel-{operation.replace('_', '-')}"
        assert runs_everywhere or code in RULES, f"no rule {code}: kernels.{operation} runs on the target"


@pytest.mark.parametrize("code", EXAMPLES)
def test_rule(code):
    one = EXAMPLES[code]
    problems = broken(one.overrides, one.target, one.facts, one.recipe)
    assert [p.code for p in problems] == [code], problems
    (problem,) = problems
    assert problem.key == one.key
    assert one.key in problem.message
    assert WAY_OUT.search(problem.message), problem.message
    assert "\n" not in problem.message
    assert problem.origin
    mended = (*one.overrides, *one.mended)
    assert broken(mended, one.target, one.facts, one.recipe) == []


def test_each_rule_says_its_sentence():
    for code, rule in RULES.items():
        assert rule.__doc__, code
        assert rule.__doc__.endswith("."), code
        assert "\n" not in rule.__doc__, code


@pytest.mark.parametrize(("weights", "said"), [((1e308, 1e308), "1e+308 of a"), ((1e-200, 1e200), "1e-200 of a")])
def test_weights_that_are_no_share_of_their_sum(weights, said):
    blend = ", ".join(f"{{prefix: {name}, weight: {w}}}" for name, w in zip("ab", weights, strict=True))
    (text,) = map(str, broken((f"data.blend=[{blend}]",)))
    assert f"data.blend: the weight {said} is no share of the weights' sum" in text
    assert "set weights nearer to 1" in text


_BIN = "[{documents: 10, tokens: 1000, squares: 1e5}]"
_RANDOM = ("data=random", "~data.blend", "train.sample=null")


def test_lengths_of_documents_that_nothing_asks_for_are_refused():
    (problem,) = broken((f"data.document_lengths={_BIN}",))
    assert problem.message == (
        "data.document_lengths=[1 bin] needs data.document_mask=true, without which nothing asks where documents end; "
        "set data.document_mask=true, or drop data.document_lengths"
    )
    (problem,) = broken((*_RANDOM, "data.document_length=30"))
    assert problem.message.startswith("data.document_length=30 needs data.document_mask=true, ")
    # nor does anything ask for those of an evaluation set
    web = ("data.valid.web={blend: [{prefix: data/web}]}", "data.document_mask=true")
    (problem,) = broken((*web, f"data.valid.web.document_lengths={_BIN}"))
    assert problem.message.endswith("plans weigh what is trained on; drop it: ~data.valid.web.document_lengths")
    chance = "data.valid.web={kind: random, vocab_size: 257, document_length: 9}"
    (problem,) = broken((*_RANDOM, chance))
    assert problem.key == "data.valid.web.document_length"
    # what follows the training data is not said twice
    assert not broken((*web, f"data.document_lengths={_BIN}"))
    assert not broken((*_RANDOM, "data.document_length=30", "data.document_mask=true", chance))
    assert not broken(web)
    assert not broken(_RANDOM)


def test_no_lengths_are_no_lengths_of_documents():
    with pytest.raises(RecipeError) as error:
        compose("hello", ("data.document_mask=true", "data.document_lengths=[]"))
    (problem,) = error.value.problems
    assert problem.message == "data.document_lengths=[] must be a list whose length is at least 1 or auto"
    assert not broken(("data.document_mask=true", "data.document_lengths=null"))


@pytest.mark.parametrize(
    ("metric", "for_steps", "more", "most"),
    [
        ("loss", 240, (), None),
        ("loss", 241, (), "at most 240, the steps that train.steps=240 makes, or"),
        ("seconds", 231, ("train.skip_steps=[{first: 11, last: 20}]",), "at most 230"),
        ("eval/loss", 3, ("train.eval_every=100",), None),
        ("eval/loss", 4, ("train.eval_every=100",), "evaluations that train.steps=240 and train.eval_every=100 make"),
        ("eval/loss", 2, ("train.eval_every=240",), "at most 1,"),
    ],
)
def test_an_alert_that_could_never_be_raised_is_refused(metric, for_steps, more, most):
    alert = f"{{metric: {metric}, comparison: above, value: 8, for_steps: {for_steps}}}"
    found = broken(("train.steps=240", f"log.alerts=[{alert}]", *more))
    if most is None:
        assert found == []
    else:
        assert [problem.code for problem in found] == ["alert-raised"]
        assert most in found[0].message


def test_an_alert_on_what_nobody_counts_is_refused():
    """Transformer Engine's casts saturate and don't say how often."""
    alert = "log.alerts=[{metric: fp8_saturated, comparison: above, value: 0}]"
    delayed = ("precision.kind=fp8", "precision.recipe=delayed", alert)
    assert broken(delayed, H200_WITH_TE) == []
    (problem,) = broken((*delayed, "kernels.linear=te"), H200_WITH_TE)
    assert problem.message == (
        "log.alerts.0.metric=fp8_saturated is not counted with kernels.linear=te; watch grad_norm, or set "
        "kernels.linear=torch"
    )


def test_messages_hold_both_values_and_the_nearest_legal_ones():
    wrong = ("launcher.ranks=24", "parallelism.tp=12", "model.n_heads=32", "model.d_head=4", "model.n_kv_heads=8")
    wrong += ("train.global_batch=48",)
    texts = {p.code: str(p) for p in broken(wrong)}
    assert texts["tp-heads"] == (
        "parallelism.tp=12 must divide model.n_heads=32; try 1, 2, 4 or 8, or model.n_heads=24 or 48   (command line)"
    )
    (text,) = map(str, broken(("train.global_batch=30", "train.micro_batch=4", "parallelism.dp_replicate=2")))
    assert text == (
        "train.global_batch=30 must be a multiple of train.micro_batch=4 · dp=2 = 8; try 24 or 32, or "
        "train.micro_batch=1, 3 or 5   (command line)"
    )
    (text,) = map(str, broken(("kernels.attention=sdpa", "model.attention.dropout=0.1")))
    assert text == (
        "kernels.attention=sdpa has no attention dropout, model.attention.dropout=0.1 asks for it; "
        "set kernels.attention=reference   (command line)"
    )


B200 = H200.model_copy(update={"gpu": "NVIDIA B200", "sm": 100})
_FP8 = ("precision.kind=fp8",)


@pytest.mark.parametrize(
    ("overrides", "target", "said"),
    [
        # recipes that are planned alone are no way out
        (
            ("precision.recipe=blockwise", "model.n_kv_heads=4", "model.d_ffn=512"),
            B200,
            "needs Hopper (sm90), this GPU is sm100; set precision.recipe=tensorwise, delayed, rowwise, mxfp8 or nvfp4",
        ),
        (("model.n_layers=1",), H200, "2 + 1 = 3 layers in bf16 must be fewer than model.n_layers=1; lower both"),
        (("model.n_layers=3",), H200, "2 + 1 = 3 layers in bf16 must be fewer than model.n_layers=3; try 1"),
        (
            ("model.n_layers=1", "precision.last_layers_bf16=0"),
            H200,
            "precision.first_layers_bf16=2: 2 layers in bf16 must be fewer than model.n_layers=1; try 0",
        ),
        (
            ("model.d_head=20", "parallelism.tp=1"),
            H200,
            "model.d_head=20 · 2 key and value heads a rank must be a multiple of 16",
        ),
        (
            ("data.seq_len=100", "train.micro_batch=2", "train.global_batch=32"),
            H200,
            "data.seq_len=100 · 2 sequences of a micro batch must be a multiple of 16",
        ),
        (("precision.gather_fp8=true",), H200, "set precision.gather_fp8=false, or parallelism.dp_strategy=fsdp"),
        (
            ("precision.gather_fp8=true", "precision.recipe=rowwise"),
            H200,
            "set precision.gather_fp8=false, or precision.recipe=tensorwise or delayed along with"
            " parallelism.dp_strategy=fsdp",
        ),
        (
            ("optim.formats.exp_avg=bf16",),
            H200,
            "try parallelism.dp_strategy=zero1, or optim.formats.exp_avg=fp32",
        ),
    ],
)
def test_messages_on_number_formats_are_true_and_whole(overrides, target, said):
    texts = [problem.message for problem in broken((*_FP8, *overrides), target)]
    assert any(said in text for text in texts), texts


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("model.attention.score_cap=30",),
            "kernels.attention=sdpa caps no scores, model.attention.score_cap=30.0 asks",
        ),
        (("model.attention.dropout=0.1",), "has no attention dropout, model.attention.dropout=0.1 asks for it"),
    ],
)
def test_a_kernel_that_lacks_something_names_who_asks_for_it(overrides, said):
    (problem,) = broken(("kernels.attention=sdpa", *overrides))
    assert said in problem.message


@pytest.mark.parametrize(("gpu", "sm", "best"), [("NVIDIA A100", 80, "bf16"), ("Tesla V100", 70, "fp16")])
def test_experts_in_fp8_on_a_gpu_without_it_are_told_of_that_alone(gpu, sm, best):
    """Another kernel for them would not help, and bf16 not everywhere."""
    target = H200.model_copy(update={"gpu": gpu, "sm": sm})
    (problem,) = broken((*_FP8, "model.moe={n_experts: 8}"), target)
    assert problem.message.endswith(f"set precision={best}")
    (problem,) = broken((*_FP8, "model.moe={n_experts: 8}"), B200)
    assert problem.key == "kernels.scaled_grouped"


@pytest.mark.parametrize("name", ["cudnn", "flash_attn", "te"])
def test_what_attends_instead_takes_parts_of_sequences_where_ranks_have_them(name):
    a100 = H200.model_copy(update={"gpu": "NVIDIA A100", "sm": 80})
    words = ("precision=bf16", "model.d_head=64", "data.document_mask=true", f"kernels.attention={name}")
    (problem,) = broken(words, a100)
    assert problem.message.endswith("set kernels.attention=flex")
    # documents hide keys, which flex leaves out; it has no parts
    problems = broken((*words, "parallelism.cp=2"), a100)
    assert {p.code for p in problems} <= {"kernel-attention", "kernel-attention-parts"}
    assert all("set kernels.attention=sdpa" in p.message for p in problems)


def test_a_batch_that_ranks_do_not_divide_is_blamed_on_no_micro_batch_that_was_decided():
    (text,) = map(str, broken(("train.global_batch=31", "parallelism.tp=1", "parallelism.dp_replicate=2")))
    assert "train.global_batch=31 must be a multiple of train.micro_batch=1 · dp=2 = 2; try 30 or 32" in text


def test_the_longest_sequence_divides_as_the_trained_ones_do():
    ring = ("launcher.ranks=2", "parallelism.cp=2", "parallelism.tp=1", "model.max_seq_len=258")
    (text,) = map(str, broken(ring))
    assert text.startswith(
        "model.max_seq_len=258 must be a multiple of 4 with parallelism.cp=2, context.kind=ring; try 2"
    )
    assert not broken((*ring, "parallelism.context.kind=all_to_all"))


@pytest.mark.parametrize(
    "more", [("parallelism.offload.layers=2",), ("parallelism.recompute.kind=full", "parallelism.recompute.layers=2")]
)
def test_chunks_without_a_pipeline_are_told_beside_layers_that_lie_in_them(more: tuple[str, ...]):
    chunks = ("model.n_layers=1", "parallelism.pipeline.schedule=interleaved", "parallelism.pipeline.virtual_stages=2")
    assert "parallelism.pipeline.virtual_stages" in {p.key for p in broken((*chunks, *more))}


def test_a_file_is_named_where_the_value_is_from():
    (problem,) = broken(("model.max_seq_len=128",))
    assert problem.origin == "recipes/hello.yaml:9"


def test_everything_is_told_at_once():
    codes = {
        p.code
        for p in broken(
            (
                "parallelism.tp=3",
                "launcher.ranks=4",
                "model.n_kv_heads=3",
                "data.seq_len=512",
                "model.max_seq_len=256",
                "optim.schedule.min_lr=1",
                "optim.schedule.kind=wsd",
                "kernels.cross_entropy=triton",
                "train.global_batch=7",
                "train.micro_batch=2",
                "model.vocab_size=5",
            )
        )
    }
    assert codes >= {
        "ranks-degrees",
        "tp-heads",
        "kv-heads",
        "seq-model",
        "lr-min",
        "wsd-steps",
        "kernel-cross-entropy",
        "batch-divides",
        "vocab-data",
    }


def test_data_alone_is_a_data_error_and_with_rules_it_is_told_with_them():
    facts = replace(FACTS, problems=(Problem("data.blend.0.prefix", "data.blend.0.prefix=data/hello: not there"),))
    composed = compose("hello")
    with pytest.raises(DataError, match=r"not there   \(recipes/hello.yaml:7\)") as caught:
        resolve(composed.recipe, CPU, facts, composed.origins)
    assert caught.value.exit_code == 65
    texts = [str(p) for p in broken(("optim.schedule.min_lr=1",), facts=facts)]
    assert len(texts) == 2
    assert "not there" in texts[1]
    unknown = replace(FACTS, vocab_size=None)
    with pytest.raises(DataError, match=r"model\.vocab_size=auto takes the data's vocabulary"):
        resolve(compose("hello", ["model.vocab_size=auto"]).recipe, CPU, unknown)


def test_the_whole_list_is_told_in_one_report():
    """Nearly everything that an engineer can get wrong at once, each by its key and where it was set."""
    wrong = (
        # a world, a grid of experts and shapes that don't divide
        "launcher.ranks=100",
        "parallelism={tp: 8, pp: 3, cp: 4, ep: 7, etp: 5, dp_replicate: 2, dp_shard: 2, sequence_parallel: false}",
        "parallelism.context={kind: all_to_all, factors: [2, 3]}",
        "model={n_layers: 16, n_heads: 28, n_kv_heads: 6, d_head: 32, d_ffn: 1001, attention: {dropout: 0.1}}",
        "kernels.attention=sdpa",
        "data.seq_len=1022",
        "model.max_seq_len=512",
        # experts
        "model.moe={n_experts: 12, top_k: 13, d_expert: 96, d_shared: 100, layers: [0, 1], first_dense: 2}",
        "model.moe.router={n_groups: 5, group_top_k: 6, expert_bias: true, bias_rate: 0.1}",
        "model.moe.router.losses=[{kind: aux, coefficient: 1.0}, {kind: aux, coefficient: 2.0}]",
        "model.moe.drop=position",
        # pipeline, batch, recompute
        "parallelism.pipeline={schedule: interleaved, virtual_stages: 2}",
        "train={global_batch: 31, micro_batch: 2, batch_ramp: {start: 64, increment: 3, samples: 100}}",
        "parallelism.recompute={kind: selective, parts: [mla_up, mla_up], layers: 99}",
        # formats and optimizer
        "precision={kind: fp8, gather_fp8: true, first_layers_bf16: 8, last_layers_bf16: 9}",
        "optim.formats={exp_avg: bf16}",
        "optim.schedule={kind: wsd, warmup_steps: 500, decay_steps: 400, min_lr: 1.0}",
        "about.hardware=TPU",
    )
    problems = broken(wrong, target=H200)
    codes = {p.code for p in problems}
    assert codes == {
        "ranks-degrees",
        "ranks-gpus",
        "about-hardware",
        "tp-heads",
        "tp-kv-heads",
        "tp-ffn",
        "tp-shared",
        "kv-heads",
        "dp-replicate",
        "pp-layers",
        "cp-seq",
        "cp-heads",
        "cp-factors",
        "seq-model",
        "kernel-attention",
        "ep-experts",
        "ep-grid",
        "etp-width",
        "moe-sp",
        "moe-layers",
        "moe-layers-twice",
        "moe-top-k",
        "moe-groups-even",
        "moe-group-top-k",
        "moe-bias",
        "moe-losses",
        "moe-capacity-off",
        "recompute-off",
        "recompute-parts",
        "recompute-absent",
        "batch-divides",
        "ramp-start",
        "ramp-stages",
        "fp8-layers",
        "fp8-gather",
        "fp8-heads",
        "fp8-tiles",
        "formats-sharded",
        "wsd-steps",
        "lr-warmup",
        "lr-min",
    }
    assert all(p.origin == "command line" for p in problems), [p for p in problems if p.origin != "command line"]
    assert all(p.key in p.message and WAY_OUT.search(p.message) for p in problems)


def test_typing_errors_of_every_depth_are_told_together():
    with pytest.raises(RecipeError) as caught:
        compose(
            "hello",
            [
                "modle.n_layers=1",
                "model.n_layer=3",
                "model.moe={n_experts: 8, router: {scor: sigmoid}}",
                "model.dropout=1.5",
                "model.n_heads=-4",
                "train.micro_batch=0",
                "parallelism.pp=0",
            ],
        )
    found = {p.key: str(p) for p in caught.value.problems}
    assert set(found) == {
        "modle",
        "model.n_layer",
        "model.moe.router.scor",
        "model.dropout",
        "model.n_heads",
        "train.micro_batch",
        "parallelism.pp",
    }
    assert "did you mean n_layers or layer?" in found["model.n_layer"]
    assert "did you mean score?" in found["model.moe.router.scor"]
    assert "less than 1" in found["model.dropout"]
    assert all(text.endswith("(command line)") for text in found.values())


SUGGESTED = re.compile(r"; (?:try|set it to) ([0-9, or]+)")


@pytest.mark.parametrize("code", EXAMPLES)
def test_suggested_numbers_mend(code):
    one = EXAMPLES[code]
    (problem,) = broken(one.overrides, one.target, one.facts, one.recipe)
    match = SUGGESTED.search(problem.message)
    for number in re.findall(r"\d+", match.group(1)) if match else ():
        changed = (*one.overrides, f"{problem.key}={number}")
        left = [(p.code, p.key) for p in broken(changed, one.target, one.facts, one.recipe)]
        assert (code, problem.key) not in left, (problem.message, number)


def test_interleaving_asks_for_groups_that_the_batch_can_fill():
    def codes(group: int, batch: int) -> set[str]:
        settings = {"pp": 4, "virtual": 2}
        overrides = (
            f"parallelism.pp={settings['pp']}",
            f"parallelism.pipeline.virtual_stages={settings['virtual']}",
            f"parallelism.pipeline.micro_batch_group={group}",
            f"train.global_batch={batch}",
            "train.micro_batch=1",
            "model.n_layers=8",
        )
        return {p.code for p in broken(overrides)}

    # in [pp, M], and the rest of M is none or at least pp
    assert codes(4, 3) == {"pp-micro-batches"}
    assert [g for g in range(1, 15) if not codes(g, 12)] == [4, 6, 7, 8, 12]
    assert codes(3, 12) == {"pp-group"}


def test_ranks_decided_by_the_machine_are_not_blamed():
    (problem,) = broken(("parallelism.pp=4", "parallelism.cp=4", "train.global_batch=64"), target=H200)
    assert problem.key == "parallelism.pp"
    assert problem.code == "ranks-degrees"
    assert "launcher.ranks=8" in problem.message
    assert problem.message.endswith("; try 1 or 2, or parallelism.cp=1 or 2")


def test_a_guessed_number_of_replicas_is_not_held_against_the_batch():
    codes = {p.code for p in broken(("launcher.ranks=100", "parallelism.tp=4", "parallelism.cp=8"))}
    assert codes == {"ranks-degrees"}
    both = ("launcher.ranks=100", "parallelism.tp=4", "parallelism.cp=8", "parallelism.dp_replicate=3")
    assert {p.code for p in broken((*both, "train.micro_batch=1"))} == {"ranks-degrees", "batch-divides"}


@pytest.mark.parametrize(
    ("sm", "legal"),
    [
        (89, {"tensorwise", "delayed", "rowwise"}),
        (90, {"tensorwise", "delayed", "rowwise", "blockwise"}),
        (100, {"tensorwise", "delayed", "rowwise", "mxfp8", "nvfp4"}),
        (120, {"tensorwise", "delayed", "rowwise"}),
    ],
)
def test_fp8_recipes_run_on_the_gpus_that_they_are_for(sm, legal):
    target = H200_WITH_TE.model_copy(update={"sm": sm})
    wide = ("model.n_kv_heads=4", "model.d_ffn=512")
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"):
        problems = broken(("precision.kind=fp8", f"precision.recipe={recipe}", *wide), target)
        assert ("fp8-gpu" in {p.code for p in problems}) == (recipe not in legal)
        for problem in problems:
            assert set(re.split(", | or ", problem.message.rpartition("precision.recipe=")[2])) == legal


@pytest.mark.parametrize(
    ("overrides", "target", "said"),
    [
        # a GPU that has no such tensor cores, whatever kernel is asked for
        (
            (),
            H200_WITH_TE,
            "precision.recipe=mxfp8 needs Blackwell (sm100 to sm119), this GPU is sm90; set "
            "precision.recipe=tensorwise, delayed, rowwise or blockwise",
        ),
        (
            ("kernels.linear=te",),
            H200_WITH_TE,
            "set precision.recipe=tensorwise, delayed, rowwise or blockwise",
        ),
        # the package is there, and auto takes it
        ((), B200_WITH_TE, None),
        (("kernels.linear=te",), B200_WITH_TE, None),
        (("precision.format=hybrid",), B200_WITH_TE, None),
        (
            ("kernels.linear=torch",),
            B200_WITH_TE,
            "kernels.linear=torch takes precision.recipe=mxfp8 on CPUs alone; set kernels.linear=te, or "
            "precision.recipe=tensorwise and kernels.linear=torch",
        ),
        # it is not
        (
            (),
            B200,
            "kernels.linear=auto has no kernel for precision.recipe=mxfp8: te needs the package transformer-engine, "
            "which is not installed (pip install 'megaspec[te]'); set precision.recipe=tensorwise, or "
            "kernels.linear=reference, which multiplies in fp32, slower than bf16",
        ),
        (
            ("kernels.linear=te",),
            B200,
            "kernels.linear=te needs the package transformer-engine, which is not installed (pip install "
            "'megaspec[te]'); set precision.recipe=tensorwise and kernels.linear=torch",
        ),
        (("kernels.linear=reference",), B200, None),
        (("kernels.linear=reference", "precision.first_layers_bf16=0", "precision.last_layers_bf16=0"), B200, None),
        # CPUs compute it by the definition
        ((), CPU, None),
        (("kernels.linear=te",), CPU, "kernels.linear=te needs cuda, the target is cpu; set kernels.linear=torch"),
        (
            ("kernels.fp8_cast=reference",),
            CPU,
            "kernels.fp8_cast=reference is not read: kernels.linear casts and multiplies itself with "
            "precision.recipe=mxfp8; set kernels.fp8_cast=auto",
        ),
        # linear=torch is no way out there
        (
            ("kernels.linear=te", "kernels.fp8_cast=triton"),
            B200_WITH_TE,
            "kernels.fp8_cast=triton is not read: kernels.linear casts and multiplies itself with "
            "precision.recipe=mxfp8; set kernels.fp8_cast=auto",
        ),
        (
            ("model.d_ffn=336",),
            B200_WITH_TE,
            "model.d_ffn=336 must be a multiple of 32 with precision.kind=fp8 and precision.recipe=mxfp8; try "
            "320 or 352, or precision=bf16",
        ),
        (
            ("model.d_ffn=352", "parallelism.tp=2", "launcher.ranks=2"),
            B200_WITH_TE.model_copy(update={"gpus": 2}),
            "model.d_ffn=352 / parallelism.tp=2 must be a multiple of 32",
        ),
        (
            ("data.seq_len=48", "train.micro_batch=1"),
            B200_WITH_TE,
            "data.seq_len=48 must be a multiple of 32",
        ),
        (
            ("precision.gather_fp8=true",),
            B200_WITH_TE,
            "precision.gather_fp8=true needs kernels.linear=torch",
        ),
        (
            ("model.moe={n_experts: 8}",),
            B200_WITH_TE,
            "precision.recipe=mxfp8 has no grouped products, and model.moe has experts; set "
            "precision.recipe=tensorwise, delayed or rowwise",
        ),
    ],
)
def test_mxfp8_is_computed_where_it_can_be(overrides, target, said):
    words = (*_FP8, "precision.recipe=mxfp8", "model.n_kv_heads=4", "model.d_ffn=512")
    texts = [problem.message for problem in broken((*words, *overrides), target)]
    if said is None:
        assert texts == []
        made = composed("hello", (*words, *overrides))
        filled = settle(made.recipe, target, FACTS, made.origins).recipe
        assert unbuilt_problems(filled) == []
        if target is B200_WITH_TE:
            assert filled.kernels.linear == "te"
        assert filled.precision.format == ("hybrid" if "precision.format=hybrid" in overrides else "e4m3")
    else:
        assert any(said in text for text in texts), texts


@pytest.mark.parametrize(
    ("overrides", "target", "said"),
    [
        (
            (),
            H200_WITH_TE,
            "precision.recipe=nvfp4 needs Blackwell (sm100 to sm119), this GPU is sm90; set precision.rec",
        ),
        ((), B200_WITH_TE, None),
        (("precision.gradient_rounding=nearest",), B200_WITH_TE, None),
        ((), CPU, None),
        (
            ("kernels.linear=torch",),
            B200_WITH_TE,
            "kernels.linear=torch takes precision.recipe=nvfp4 on CPUs alone; set",
        ),
        ((), B200, "kernels.linear=auto has no kernel for precision.recipe=nvfp4: te needs the package"),
        (("precision.format=hybrid",), B200_WITH_TE, "precision.format=hybrid does not go with precision.recipe=nvfp4"),
        (("model.moe={n_experts: 8}",), B200_WITH_TE, "precision.recipe=nvfp4 has no grouped products"),
        (("model.d_ffn=336",), B200_WITH_TE, "model.d_ffn=336 must be a multiple of 32"),
        (("precision.gather_fp8=true",), B200_WITH_TE, "precision.gather_fp8=true needs kernels.linear=torch"),
        (
            (
                "parallelism.tp=2",
                "launcher.ranks=2",
                "data.seq_len=34",
                "train.micro_batch=16",
                "train.global_batch=16",
            ),
            CPU,
            "data.seq_len=34 / (parallelism.cp=1 · parallelism.tp=2) = 17 tokens must be even with "
            "precision.recipe=nvfp4 and parallelism.sequence_parallel=true; try 32 or 36",
        ),
    ],
)
def test_nvfp4_is_computed_where_it_can_be(overrides, target, said):
    words = (*_FP8, "precision.recipe=nvfp4", "model.n_kv_heads=4", "model.d_ffn=512")
    texts = [problem.message for problem in broken((*words, *overrides), target)]
    if said is None:
        assert texts == []
    else:
        assert any(said in text for text in texts), texts


def test_what_blackwell_alone_has_is_said_alike():
    assert tuple(BLACKWELL_SM) == BLACKWELL


def test_only_nvfp4_rounds_at_random():
    words = (*_FP8, "precision.recipe=rowwise", "precision.gradient_rounding=nearest")
    (problem,) = broken(words, H200)
    assert problem.message.startswith(
        "precision.gradient_rounding=nearest is not read: precision.recipe=rowwise rounds gradients to nearest"
    )


def test_a_warm_up_that_outlasts_the_run_is_held_against_the_steps_that_were_set():
    (text,) = (p.message for p in broken(("train.steps=15",)))
    assert text.startswith("optim.schedule.warmup_steps=20 must be below train.steps=15")
    constant = ("optim.schedule={kind: constant, min_lr: 0}", "train.steps=15")
    assert [p.code for p in broken(constant)] == ["lr-warmup"]
    assert broken((*constant, "optim.schedule.warmup_steps=15")) == []
    longer = ("train.steps=15", "optim.schedule.decay_steps=100")
    assert [p.code for p in broken(longer)] == ["lr-warmup"]
    assert [p.code for p in broken(("optim.schedule={kind: constant, min_lr: 0, decay_steps: 9}",))] == ["lr-constant"]


@pytest.mark.parametrize("word", ["model.moe.router.n_groups=1000000000", "model.moe.router.group_top_k=1000000000"])
def test_a_number_that_is_far_too_large_costs_no_memory(word):
    """Ways out of it are a few values at the ends of ranges that hold as many."""
    composed = compose("deepseek_v3", (word,))
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError, match="groups"):
            settle(composed.recipe, H200, FACTS, composed.origins)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20
