"""What the codes of problems mean that are no rules of a run: of reading a recipe, of run folders and of sweeps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownCode:
    """What is said of a code, with what leads to it."""

    what: str
    way_out: str
    words: tuple[str, ...] = ()
    """Overrides of recipe=hello that lead to it."""
    yaml: str = ""
    """A recipe file that leads to it."""


_NAMES = {
    "choice.unknown": KnownCode(
        "A group has no such choice, or there is no such recipe, file or GPU.",
        "Take one of those that the message names.",
        ("optim=adam",),
    ),
    "choice.kind": KnownCode(
        "A section is chosen by the name of a file in its folder.",
        "Choose with group=choice; set single keys with group.key=value.",
        ("optim=3",),
    ),
    "choice.recipe": KnownCode(
        "A run has exactly one recipe.",
        "Give recipe=NAME once; a recipe builds on another with `defaults:`.",
        ("recipe=hello",),
    ),
    "choice.ambiguous": KnownCode("Two files on the search path have the same name.", "Rename one of them."),
    "defaults": KnownCode(
        "A `defaults:` list holds names of its own group and, in recipes, `override /group: choice`.",
        "Write it so; what it inherits from comes first.",
    ),
    "defaults.cycle": KnownCode("A file inherits from itself, over others.", "Take one of the inheritances away."),
    "defaults.order": KnownCode("Hydra can't order the `defaults:` lists.", "Do what the message says."),
    "path": KnownCode("A folder that is given with --config-dir does not exist.", "Make it, or give another."),
}
_KEYS = {
    "key.unknown": KnownCode(
        "The language is closed: a key that no class has is an error.",
        "Take the nearest key, or drop it; `megaspec explain SECTION` lists the keys of a section.",
        ("optim.lrr=3e-4",),
    ),
    "key.type": KnownCode(
        "A value has the type and the bounds of its key; text is never read as a number.",
        "Write a value that the message names; `megaspec explain KEY` says the type.",
        ("train.steps=-3",),
    ),
    "key.missing": KnownCode(
        "A key that has no default is set.", "Set it in the recipe or on the command line.", ("train.steps=???",)
    ),
    "key.more": KnownCode("More is wrong than is told at once.", "Mend what is told, and look again."),
    "key.code": KnownCode(
        "A recipe is data: it names no code.", "Drop the key; `kind:` chooses what is built.", ("+optim._target_=x",)
    ),
    "reference": KnownCode(
        "`${path.to.key}` stands for the value at another path; there are no functions, and no environment.",
        "Point at a key that is set to a plain value.",
        ("optim.lr=${optim.rate}",),
    ),
    "override.syntax": KnownCode(
        "A word of the command line is path=value, group=choice or ~path.",
        "Quote a value that has spaces or commas.",
        ("optim.lr",),
    ),
    "override.path": KnownCode("An override goes through something that is no section.", "Give the path of a key."),
    "override.delete": KnownCode("~path takes a key away that is set.", "Drop it.", ("~optim.beta3",)),
    "override.sweep": KnownCode(
        "A run has one value for each key.",
        "Run several with `megaspec train -m`; write a list as [1,2].",
        ("optim.lr=1e-3,1e-4",),
    ),
    "override.size": KnownCode(
        "A word of a command line is longer than any value needs to be.", "Write it in a recipe."
    ),
    "override.twice": KnownCode("A key is given two values on one command line.", "Keep one."),
    "override.hydra": KnownCode("Packages and settings of Hydra are no part of a recipe.", "Drop it."),
    "override.data": KnownCode(
        "A value is plain data: numbers, text, lists and sections.", "Write it out.", ("optim.schedule={1: 2}",)
    ),
}
_YAML = {
    "yaml.syntax": KnownCode("The file is YAML.", "Mend the line.", yaml="train: {steps: 1"),
    "yaml.mapping": KnownCode("A file holds keys and values.", "Write `key: value` lines.", yaml="- train"),
    "yaml.document": KnownCode("A file holds one document.", "Remove the second `---`.", yaml="a: 1\n---\nb: 2"),
    "yaml.tag": KnownCode("A file is data: tags are refused.", "Remove the tag.", yaml="a: !!python/name:os.system x"),
    "yaml.merge": KnownCode("`<<` hides where a value is from.", "Inherit with `defaults:`.", yaml="<<: {a: 1}"),
    "yaml.alias": KnownCode("An alias names a value that is finished above it.", "Write it out.", yaml="a: *b"),
    "yaml.duplicate": KnownCode("A key stands once in a section.", "Keep one.", yaml="a: 1\na: 2"),
    "yaml.key": KnownCode("A key is plain text.", "Write `key: value`.", yaml="[a]: 1"),
    "yaml.depth": KnownCode("Sections are nested at most 32 deep.", "Flatten it.", yaml="a: " + "[" * 40 + "]" * 40),
    "yaml.size": KnownCode("A file holds at most 20,000 values, those of aliases counted each time.", "Shorten it."),
    "yaml.package": KnownCode("Where a file belongs follows from its folder.", "Drop the `@package` line."),
}
_PYTHON = {
    "data.mapping": KnownCode("A recipe from Python is a dictionary.", "Give {key: value, ...}."),
    "data.key": KnownCode("A key of a recipe from Python is text without dots.", "Nest one for each section."),
    "data.kind": KnownCode(
        "A recipe holds plain values only.", "Write text, numbers, True, False, None, lists and dicts."
    ),
    "data.depth": KnownCode("Sections are nested at most 32 deep.", "Flatten it."),
    "weight.unknown": KnownCode("The model has no weight of that name.", "Take a name from megaspec.weights(built)."),
    "weight.misfit": KnownCode(
        "A weight that is set is a tensor of numbers with the weight's whole shape.", "Give the shape that is named."
    ),
}
_RUNS = {
    "launch-tasks": KnownCode(
        "Several tasks of srun or mpirun train one run only where torchrun makes one world of them.",
        "Start one task a node, and torchrun in it: the message has the command.",
    ),
    "supervise": KnownCode(
        "A supervisor starts the ranks of one machine itself, and starts them again.",
        "Do what the message says: drop what else would start them, or restart them.",
    ),
    "supervise-devices": KnownCode(
        "The file `devices` of a run's folder names the devices that a supervised run may use.",
        "Write their numbers with commas, such as 0,1,2.",
    ),
    "supervise-avoided": KnownCode(
        "A line of a run's avoided.jsonl names a device, or a host, that a supervised run keeps away from.",
        "Write the line as the message shows, or delete it.",
    ),
    "layouts-none": KnownCode(
        "Neither the layout of the recipe nor one of launcher.layouts fits the devices that may be used.",
        "Give more devices, or add a layout for fewer.",
    ),
    "unbuilt": KnownCode(
        "It can be planned, and is not built yet: `train` refuses it before anything starts.",
        "Do what the message says, or plan only.",
    ),
    "memory": KnownCode(
        "The fullest rank needs more memory than its GPU has, as predicted.",
        "Do what the message says, or train all the same with memory=ignore.",
    ),
    "saving-memory": KnownCode(
        "What is being saved beside training takes more of a machine's memory than is available, as predicted.",
        "Set checkpoint.saving=blocking, or train all the same with memory=ignore.",
    ),
    "hardware-unknown": KnownCode("Nothing is known of such a GPU.", "Name one with hardware=."),
    "vocab-unknown": KnownCode("model.vocab_size=auto takes that of the data.", "Prepare the data, or set the size."),
    "data-files": KnownCode("Data that is named is not there, or damaged.", "Give the command that the message names."),
    "data-tokenizers": KnownCode("All data sets of a blend have one tokenizer.", "Prepare them with the same."),
    "run-exists": KnownCode("A new run starts in an empty folder.", "Choose another name, or go on with resume=auto."),
    "run-missing": KnownCode("A folder holds neither a run nor a checkpoint.", "Give the one that `train` named."),
    "run-kernel": KnownCode(
        "A run was begun with an implementation of an operation that this version does not have.",
        "Say by which one it goes on, with the command that the message has.",
    ),
    "run-format": KnownCode(
        "A run was begun by a program that writes its files in another format.",
        "Go on with that program, or start a new run.",
    ),
    "run-weights": KnownCode(
        "A run that was imported or taken from checkpoints holds weights alone, as may the last checkpoint of another.",
        "Start a run from them with `init.load=RUN`, or write text with it.",
    ),
    "run-damaged": KnownCode("A file of a run folder can't be read.", "Restore it, or start another run."),
    "resume-frozen": KnownCode(
        "A run goes on as the experiment that it is: model, data order, batch, optimizer and formats stay.",
        "Take the change back, or start another run from its checkpoint with --fork NAME.",
    ),
    "fork-weights": KnownCode(
        "A fork begins with the weights of its checkpoint.", "Drop what changes `init`, or start a new run."
    ),
    "resume-data": KnownCode("The content of the data has changed since the run began.", "Put it back, or fork."),
    "resume-order": KnownCode(
        "A run reads its samples in the order that it began with; this version no longer makes that of some blends.",
        "End it with the version that began it, or fork.",
    ),
    "resume-steps": KnownCode("A run can't end before the step that it has reached.", "Raise train.steps."),
    "resume-profile": KnownCode("Steps that are done can't be profiled.", "Name later ones with profile.steps."),
    "resume-folder": KnownCode("A run stays in its folder.", "Drop run_dir, or fork."),
    "tune-large": KnownCode("No layout fits the memory of these GPUs.", "Try more of them, or larger ones."),
    "verify-ranks": KnownCode(
        "A layout is verified with every axis that is above 1.", "Give more --ranks, or verify it with fewer axes."
    ),
    "tune-none": KnownCode("No layout keeps the rules for this number of GPUs.", "Try another number, or batch."),
}
_SWEEPS = {
    "sweep.empty": KnownCode("A word of a sweep has values.", "Write a.b=1,2, range(1,8) or glob(*)."),
    "sweep.key": KnownCode("Some keys differ for every point by themselves.", "Set sweep.name or sweep.folder."),
    "sweep.twice": KnownCode("A key is swept by one word.", "Keep one."),
    "sweep.interval": KnownCode(
        "An interval is searched, a grid has values.", "Choose sweep.kind=optuna, or write values."
    ),
    "sweep.size": KnownCode("A sweep has a bounded number of points.", "Sweep fewer values."),
    "sweep.points": KnownCode("Every point is resolved before the first starts; one is wrong.", "Mend or drop it."),
    "sweep.metric": KnownCode(
        "Points are compared by a number that each of them comes to have.",
        "Set train.eval_every above 0, or sweep.metric=loss.",
    ),
    "sweep.gpus": KnownCode("Slots share the GPUs of this machine.", "Ask for fewer."),
    "sweep.launcher": KnownCode(
        "A launcher of Hydra runs grids only, and has to be installed.", "Use megaspec's slots."
    ),
    "sweep.optuna": KnownCode("A search needs Optuna.", "Install it, or sweep a grid."),
    "sweep.torchrun": KnownCode("A sweep starts its points itself.", "Start it without torchrun."),
    "sweep.changed": KnownCode("A sweep that goes on has the points that it began with.", "Choose another folder."),
    "sweep-other": KnownCode("The folder holds another sweep.", "Choose another sweep.folder."),
    "sweep-exists": KnownCode("A sweep starts in an empty folder.", "Choose another sweep.folder."),
    "sweep-missing": KnownCode("The folder holds no sweep.", "Give the one that `train -m` named."),
    "sweep-damaged": KnownCode("A file of a sweep can't be read.", "Restore it, or start another sweep."),
}
_MEGATRON = {
    "megatron-flag": KnownCode("A flag of Megatron-LM, or its value, can't be read.", "Mend the command line."),
    "megatron-program": KnownCode("A program of Megatron-LM trains what no recipe can say.", "Leave it to Megatron."),
    "megatron-script": KnownCode(
        "A shell script can't be followed without running it.", "Give the command that it makes."
    ),
    "megatron-lost": KnownCode("A flag of Megatron-LM has no meaning here.", "Read why, and leave it out."),
}

_PLUGINS = {
    "plugin": KnownCode("A package that is given with --plugin offers no plugin, or a wrong one.", "Mend the package."),
    "plugin-missing": KnownCode(
        "A run was made with a plugin that is not given now, or that is not installed.", "Give it with --plugin."
    ),
}

CODES: dict[str, KnownCode] = {**_NAMES, **_KEYS, **_YAML, **_PYTHON, **_RUNS, **_SWEEPS, **_MEGATRON, **_PLUGINS}
