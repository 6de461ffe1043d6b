"""Rules of the weights that a run starts with."""

from megaspec.checkpoint.spec import InitSpec
from megaspec.core.errors import Problem
from megaspec.core.problems import show
from megaspec.hf.family import comparable, is_of_training
from megaspec.rules.case import Case
from megaspec.rules.difference import changed
from megaspec.rules.initial_weights import initial_weights, weight_shapes
from megaspec.rules.run_facts import SourceFacts
from megaspec.rules.upcycle_rules import copies_add_up_to_the_dense_model, without_experts

MOST_NAMES = 8
# What decides which weights there are and of which shape: of a part of them, each is looked at by itself.
_SIZES = ("n_layers", "vocab_size", "max_seq_len", "tied_embeddings", "d_model", "d_ffn", "n_heads", "n_kv_heads")


def one_source_of_weights(case: Case) -> Problem | None:
    """Weights begin in one folder."""
    init = case.recipe.init
    if init.from_hf is not None and init.load is not None:
        text = f"init.from_hf={show(init.from_hf)} and init.load={show(init.load)}: weights begin in one folder"
        return Problem("init.load", f"{text}; drop one of them")
    return None


def weights_have_a_source(case: Case) -> Problem | None:
    """What says how weights are read goes with a folder that has it."""
    init = case.recipe.init
    if init.from_hf is not None or init.load is not None:
        if init.step is None or init.load is not None:
            return None
        text = f"init.step={init.step} chooses a checkpoint of init.load; init.from_hf={show(init.from_hf)} has none"
        return Problem("init.step", f"{text}; drop it")
    for name, field in InitSpec.model_fields.items():
        if name not in ("from_hf", "load") and getattr(init, name) != field.default:
            text = f"init.{name} says what is read of a folder, and there is none"
            return Problem(f"init.{name}", f"{text}; set init.from_hf or init.load, or drop it")
    return None


def new_rows_belong_to_another_vocabulary(case: Case) -> Problem | None:
    """Rows are new where a vocabulary grows."""
    init = case.recipe.init
    if init.vocab == "resize" or init.new_rows == "drawn":
        return None
    text = f"init.new_rows={init.new_rows} says what new rows start from, and init.vocab={init.vocab} has none"
    return Problem("init.new_rows", f"{text}; set init.vocab=resize, or drop it")


def source_of_weights_is_read(case: Case) -> Problem | None:
    """The folder in which weights begin can be read, and holds what its own description says."""
    source = _source(case)
    if source is None or not source.problem:
        return None
    text = f"{source.key}={show(source.path)}: {source.problem}"
    return Problem(source.key, f"{text}; set it to a folder that is whole")


def initial_weights_are_of_this_model(case: Case) -> Problem | None:
    """Weights are read into the model that they are of."""
    source = _source(case)
    if source is None or source.model is None or copies_add_up_to_the_dense_model(case) is not None:
        return None
    init = case.recipe.init
    model = case.recipe.model
    if init.upcycle != "none":
        model = without_experts(model)
    mine, theirs = comparable(model, source.model)
    texts = []
    for key, here, there in changed(mine, theirs):
        is_length = key == "max_seq_len" and model.positions.kind != "learned"
        is_size = init.is_partial and key in _SIZES
        is_resized = init.vocab == "resize" and key == "vocab_size"
        if not is_of_training(key) and not is_length and not is_size and not is_resized:
            texts.append(f"model.{key}={show(here)} (there {show(there)})")
    if not texts:
        return None
    if len(texts) == 1 and texts[0].startswith("model.vocab_size="):
        text = f"{source.key}={show(source.path)} has another vocabulary: {texts[0]}"
        return Problem(source.key, f"{text}; set init.vocab=resize to take the rows that both have")
    more = f" and {len(texts) - MOST_NAMES} more" if len(texts) > MOST_NAMES else ""
    text = f"{source.key}={show(source.path)} is of another model: {', '.join(texts[:MOST_NAMES])}{more}"
    way_out = "start from that run's recipe, or read a part of it: init.missing=initialise"
    if init.from_hf is not None:
        way_out = f"write the recipe that fits with megaspec hf recipe {source.path} --out recipes/mine.yaml"
    return Problem(source.key, f"{text}; {way_out}")


def initial_weights_cover_the_model(case: Case) -> Problem | None:
    """Every weight is read, or is said to be drawn from the seed."""
    source = _source(case)
    if source is None or source.model is None or initial_weights_are_of_this_model(case) is not None:
        return None
    if copies_add_up_to_the_dense_model(case) is not None:
        return None
    init = case.recipe.init
    found = initial_weights(init, case.recipe.model.facts, theirs=source.shapes)
    for setting, word in found.idle:
        text = f"init.{setting}: {word} fits no weight of this model, whose first is {_first_name(case)}; drop it"
        return Problem(f"init.{setting}", text)
    if found.misfits:
        text = f"{source.key}={show(source.path)}: {_listed(found.misfits)}"
        text += "; leave them out with init.exclude and init.missing=initialise"
        if init.vocab == "same" and case.recipe.model.vocab_size != source.model.vocab_size:
            text += ", or set init.vocab=resize to take the rows of a vocabulary that both have"
        return Problem(source.key, text)
    if found.missing and init.missing == "error":
        names = [stored.partition("/")[2] for stored in found.missing]
        text = f"{source.key}={show(source.path)} gives no {_listed(names)}"
        return Problem(source.key, f"{text}; set init.missing=initialise to draw them from train.seed")
    if not found.read:
        return Problem(source.key, f"{source.key}={show(source.path)}: nothing of it is read; drop init.include")
    return None


def _source(case: Case) -> SourceFacts | None:
    """What is known of the folder that the recipe names; None: it names none."""
    source = case.facts.weights
    init = case.recipe.init
    if source is None or source.path not in (init.from_hf, init.load):
        return None
    return source


def _first_name(case: Case) -> str:
    return next(iter(weight_shapes(case.recipe.model.facts))).partition("/")[2]


def _listed(texts: list[str]) -> str:
    """The first of them, and how many more there are."""
    if len(texts) <= MOST_NAMES:
        return ", ".join(texts)
    return f"{', '.join(texts[:MOST_NAMES])} and {len(texts) - MOST_NAMES} more"
