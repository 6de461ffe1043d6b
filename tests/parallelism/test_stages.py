"""Which layers lie on which stage, against splits counted by hand."""

import re

import pytest

from megaspec.model.decoder.spec import DecoderSpec
from megaspec.parallelism.spec import ParallelismSpec, PipelineSpec
from megaspec.parallelism.stages import MOST_LAYERS, layer_ranges, parse_layout, stage_problem, stages_of


def model(n_layers):
    return DecoderSpec(kind="decoder", n_layers=n_layers, d_model=64, n_heads=4, vocab_size=100)


def split(n_layers, pp, **pipeline):
    return n_layers, ParallelismSpec(pp=pp, pipeline=PipelineSpec(**pipeline))


def layers(stages):
    return [[list(chunk.layers) for chunk in rank] for rank in stages]


def counts(stages):
    return [[len(chunk.layers) for chunk in rank] for rank in stages]


def test_one_stage_holds_everything():
    [[only]] = stages_of(*split(3, 1))
    assert (only.layers, only.embedding, only.head) == ((0, 1, 2), True, True)


def test_even_and_virtual_stages():
    assert layers(stages_of(*split(4, 2))) == [[[0, 1]], [[2, 3]]]
    stages = stages_of(*split(8, 2, virtual_stages=2, schedule="interleaved"))
    assert layers(stages) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [[(c.embedding, c.head) for c in rank] for rank in stages] == [
        [(True, False), (False, False)],
        [(False, False), (False, True)],
    ]


def test_v_shape_brings_the_last_stage_back_to_the_first_rank():
    stages = stages_of(*split(8, 2, virtual_stages=2, schedule="zb_v"))
    assert layers(stages) == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    assert stages[0][0].embedding
    assert stages[0][1].head
    assert not stages[1][1].head


def test_embedding_and_loss_count_as_layers():
    assert counts(stages_of(*split(126, 8, count_embedding=True, count_loss=True))) == [
        [15], [16], [16], [16], [16], [16], [16], [15],
    ]  # fmt: skip
    assert counts(stages_of(*split(7, 4, count_loss=True))) == [[2], [2], [2], [1]]


def test_uneven_ends():
    assert counts(stages_of(*split(61, 4, first_layers=15, last_layers=14))) == [[15], [16], [16], [14]]
    assert counts(stages_of(*split(10, 4, last_layers=1))) == [[3], [3], [3], [1]]
    stages = stages_of(*split(12, 2, first_layers=8, virtual_stages=2, schedule="interleaved"))
    assert counts(stages) == [[4, 4], [2, 2]]


def test_layout_letters():
    stages = parse_layout("Et*3|(tt|)*29,t|L")
    assert len(stages) == 32
    assert (stages[0], stages[1], stages[30], stages[31]) == ("Ettt", "tt", "t", "L")
    assert parse_layout("E((t|)*2t|)*2 L") == ("Et", "t", "t", "t", "t", "t", "L")
    laid = stages_of(*split(62, 16, virtual_stages=2, schedule="interleaved", layout="Et*3|(tt|)*29,t|L"))
    assert counts(laid)[0] == [3, 2]
    assert counts(laid)[15] == [2, 0]
    assert laid[15][1].head
    assert laid[14][1].layers == (61,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Etm|L", "has 'm'"),
        ("E(t|L", "without its )"),
        ("Et)|L", "without its ("),
        ("*3Et|L", "has a *"),
        ("Et*|L", "has a *"),
        ("Et*9999999|L", "longer than"),
        ("E((t*999)*999)*999|L", "longer than"),
        ("E" * 20_000, "longer than"),
    ],
)
def test_letters_that_say_nothing(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_layout(text)


@pytest.mark.parametrize(
    ("n_layers", "pp", "pipeline", "key", "says"),
    [
        (32, 5, {}, "pp", "pp=5 must divide model.n_layers=32"),
        (126, 8, {}, "pp", "parallelism.pp=8 must divide model.n_layers=126"),
        (126, 8, {"count_loss": True}, "pp", "126 + 1 loss = 127"),
        (32, 4, {"virtual_stages": 3}, "pipeline.virtual_stages", "must divide the 8 layers"),
        (10, 4, {"first_layers": 2}, "pipeline.first_layers", "try parallelism.pipeline.first_layers=1, 4 or 7"),
        (10, 1, {"first_layers": 2}, "pipeline.first_layers", "needs parallelism.pp of at least 2"),
        (10, 2, {"first_layers": 4, "last_layers": 4}, "pipeline.first_layers", "must be 0"),
        (10, 4, {"last_layers": 12}, "pipeline.last_layers", "must have one each at least"),
        (12, 2, {"first_layers": 5, "virtual_stages": 2}, "pipeline.first_layers", "multiple of 2"),
        (12, 2, {"last_layers": 4, "virtual_stages": 2, "schedule": "zb_v"}, "pipeline.last_layers", "zb_v"),
        (4, 2, {"layout": "Ett|tL"}, "pipeline.layout", "has 3 layers (t) and must have model.n_layers=4"),
        (4, 2, {"layout": "Et|t|t|tL"}, "pipeline.layout", "try parallelism.pipeline.virtual_stages=2"),
        (4, 3, {"layout": "Et|t|t|tL"}, "pipeline.layout", "has 4 stages and must have parallelism.pp=3"),
        (4, 2, {"layout": "tt|Ett|L"}, "pipeline.layout", "must start with its only E"),
        (4, 2, {"layout": "|Etttt L"}, "pipeline.layout", "must start with its only E"),
        (4, 2, {"layout": "Ett|ttL|"}, "pipeline.layout", "must end with its only L"),
        (MOST_LAYERS + 1, 1, {}, "model.n_layers", "at most"),
        (10, 2**20, {}, "pp", "must divide model.n_layers=10"),
    ],
)  # fmt: skip
def test_what_can_not_be_divided_says_what_can(n_layers, pp, pipeline, key, says):
    found = stage_problem(*split(n_layers, pp, **pipeline))
    assert found is not None
    assert found[0].removeprefix("parallelism.") == key
    assert says in found[1]


def test_no_problem_where_there_is_none():
    for n_layers, pp, pipeline in (
        (126, 8, {"count_embedding": True, "count_loss": True}),
        (80, 4, {"virtual_stages": 5}),
        (61, 4, {"first_layers": 15, "last_layers": 14}),
        (4, 2, {"layout": "Ettt|tL"}),
    ):
        assert stage_problem(*split(n_layers, pp, **pipeline)) is None


def test_ranges_in_words():
    assert layer_ranges((0, 1, 2, 7, 9, 10)) == "0-2, 7, 9-10"
    assert layer_ranges(()) == "none"
