"""SLURM: a Spec as the text of a batch job, and the job. Never imports torch.

One task on each node, and in it megaspec_launchers/node.py. A task for each GPU would do without it, but then nobody on
a node hears which rank failed first, ranks outlive each other by SLURM's KillWait, and a request to stop reaches ranks
that SLURM kills one by one; torchrun in each task turns every exit code into 1. With a process of ours per node the
codes, the grace and the first cause are those of a run on one machine, and Kubernetes' pods are started the same way.

Note "Fewer nodes". With launcher.min_nodes the job asks for a range, `--nodes=MIN-MAX`: SLURM starts it as soon as it
has MIN nodes, with as many more as are free then, and a job that goes back into the queue asks for the range again,
whatever it was given before. The script trains on the most nodes that a layout fits, as torchrun with
`--nnodes=MIN:MAX` does on the hosts that come; the others of the start stay idle. They get no task that ends at once:
from the first end on srun counts its --wait for the others. So it is given the names of those that train, since it
would choose among all of them.

Values of `#SBATCH` lines are words of a small alphabet (megaspec/launcher/spec.py): SLURM's own grammar of them has no
quoting that all versions share. What is not a word stands in the script, where the shell's quoting is exact.
"""

import math
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from megaspec.core.errors import HangError, HardwareError, Preempted, Problem, RecipeError, UnreachableError
from megaspec.launcher.spec import SEARCH, LauncherSpec, SlurmContainer, SlurmLauncher
from megaspec.spec import Spec
from megaspec_launchers.job_hosts import FAILED, MISSED
from megaspec_launchers.recipe_file import NAME, SECRET_FILE, recipe_of_job, words_of_job

SUBMIT = "sbatch"
# Word of a layout that says for how many ranks it is.
RANKS = "launcher.ranks="
# Ends the recipe in the script: no line of a recipe looks so.
END = "END-OF-RECIPE"
# Between the warning and SLURM's own kill, beyond the grace: what is left of a step, and srun.
MARGIN_SECONDS = 60
# What `scontrol show job` says of a job that SLURM ends at its limit, or preempts; of one that is cancelled, neither.
_GOES_ON = "Reason=TimeLimit|PreemptTime=[0-9]"
# How often a job was started again, as it says there.
_SAID_RESTARTS = r"""scontrol show job "$SLURM_JOB_ID" | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p'"""
# After which a job is put back into the queue.
_RESTARTED = f"{HangError.exit_code}|{Preempted.exit_code}"
# That, too, where a host can be named that the job is to do without.
_SUSPECTED = HardwareError.exit_code
# Tries to change the hosts that are left out, a second apart: SLURM ends the script, and what it has started, as soon
# as the job is back in the queue, first by SIGTERM and after its KillWait of 30 seconds by SIGKILL.
_TRIES = 5


def render(spec: Spec, *, memory: str = "check") -> str:
    """The batch script of a run. Pure. `memory`: ignore starts it where it is predicted not to fit."""
    return _script(spec, [spec], memory=memory)


def render_array(specs: Sequence[Spec], *, at_once: int | None = None, memory: str = "check") -> str:
    """The batch script of several runs that ask for the same nodes: an array, a task each. Pure.

    `at_once`: how many tasks may run beside each other; None: as many as SLURM lets. RecipeError: their jobs differ.
    """
    first = specs[0]
    for number, spec in enumerate(specs, 1):
        if _asked_for(spec) != _asked_for(first):
            text = (
                f"run {number}: the runs of a job array ask for the same nodes; keep launcher the same in all of them"
            )
            raise RecipeError([Problem("launcher", text)])
    return _script(first, list(specs), at_once=at_once, memory=memory)


def _asked_for(spec: Spec) -> LauncherSpec:
    """What a job asks SLURM for: its layouts are the run's own."""
    return spec.launcher.model_copy(update={"layouts": ()})


def node_counts(launcher: SlurmLauncher) -> list[int]:
    """Numbers of nodes that a run can be trained on, the most first: all that its job asks for, and those for whose
    ranks launcher.layouts has a layout. Each of them says its ranks (commands/fewer_nodes.py)."""
    counts = {launcher.nodes}
    if launcher.is_elastic:
        assert launcher.layouts != SEARCH, "a search is done before a job is written"
        for words in launcher.layouts:
            (ranks,) = [word.removeprefix(RANKS) for word in words if word.startswith(RANKS)]
            counts.add(int(ranks) // launcher.ranks_per_node)
        assert min(counts) == launcher.min_nodes, f"no layout for launcher.min_nodes={launcher.min_nodes}"
    return sorted(counts, reverse=True)


def submit(text: str, specs: Sequence[Spec]) -> str:
    """Hands a script to sbatch, from the folder where it is called. -> the job's number.

    RecipeError: there is no sbatch, it refuses the job, or nodes would not find megaspec; nothing was started then.
    UnreachableError: no controller answers.
    """
    refuse_missing()
    launcher = specs[0].launcher
    assert isinstance(launcher, SlurmLauncher), f"launcher.kind={launcher.kind} is no job of SLURM"
    if launcher.container is None and not launcher.modules:
        _refuse_another_python()
    done = subprocess.run([SUBMIT, "--parsable"], input=text, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if "unable to contact slurm controller" in said.lower():
            text = f"sbatch reaches no cluster: {said}; nothing was started, give the same command again later"
            raise UnreachableError([Problem("launcher", text)])
        raise RecipeError(
            [Problem("launcher", f"sbatch refuses the job: {said}; mend launcher.*, nothing was started")]
        )
    # NUMBER, or NUMBER;CLUSTER
    return done.stdout.strip().partition(";")[0]


def refuse_missing() -> None:
    """RecipeError: sbatch can't be found."""
    if shutil.which(SUBMIT) is None:
        text = "launcher.kind=slurm needs sbatch, which can't be found; start it on a login node of the cluster, "
        text += "or write the script with --print and submit it there"
        raise RecipeError([Problem("launcher.kind", text)])


def _refuse_another_python() -> None:
    """RecipeError: `python3`, which nodes start with this shell's PATH, has no megaspec."""
    python = shutil.which("python3")
    if python is not None:
        looked = [python, "-P", "-c", "import megaspec_launchers.node"]
        if subprocess.run(looked, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
            return
    text = f"nodes start python3 by this shell's PATH, which is {python or 'not there'} and has no megaspec; start "
    text += "this again with its environment activated, or set launcher.modules or launcher.container"
    raise RecipeError([Problem("launcher", text)])


def quoted(text: str) -> str:
    """One word of bash that is this text, in printable ASCII whatever is in it. RecipeError: it is no Unicode."""
    if text.isascii() and text.isprintable():
        return shlex.quote(text)
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{text!r} holds half of a letter (a surrogate), which no script can; drop it") from None
    made = ""
    for byte in raw:
        character = chr(byte)
        if character in "'\\" or not 0x20 <= byte < 0x7F:
            made += f"\\x{byte:02x}"
        else:
            made += character
    return f"$'{made}'"


def _script(spec: Spec, specs: list[Spec], *, memory: str, at_once: int | None = None) -> str:
    launcher = spec.launcher
    assert isinstance(launcher, SlurmLauncher), f"launcher.kind={launcher.kind} is no job of SLURM"
    lines = ["#!/bin/bash", *_options(spec, launcher, len(specs), at_once)]
    lines += ["", *_preparation(launcher, _common_counts(specs))]
    if len(specs) == 1:
        lines += ["", *_recipe(spec)]
    else:
        lines += ["", *_recipes(specs)]
    if launcher.container is not None:
        lines += ["", *_mounted()]
    step = _step(spec, launcher, memory)
    if launcher.is_elastic:
        step = _step_on_enough(launcher, step)
    lines += ["", *step, "", *_end(launcher)]
    return "\n".join(lines) + "\n"


def _common_counts(specs: Sequence[Spec]) -> list[int]:
    """Numbers of nodes that each of the runs can be trained on, the most first."""
    counts = node_counts(specs[0].launcher)
    for spec in specs[1:]:
        others = node_counts(spec.launcher)
        counts = [count for count in counts if count in others]
    return counts


def _options(spec: Spec, launcher: SlurmLauncher, runs: int, at_once: int | None) -> Iterator[str]:
    """What SLURM is asked for. Its parser reads them up to the first command."""
    nodes = str(launcher.nodes)
    tasks_per_node: int | None = 1
    if launcher.is_elastic:
        nodes = f"{launcher.min_nodes}-{launcher.nodes}"
        # with a number of tasks SLURM gives nodes for the fewest, however many are free; srun says it for the step
        tasks_per_node = None
    said: dict[str, object] = {
        "job-name": spec.name,
        "nodes": nodes,
        "ntasks-per-node": tasks_per_node,
        "time": launcher.time,
        "account": launcher.account,
        "partition": launcher.partition,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "reservation": launcher.reservation,
        "cpus-per-task": launcher.cpus_per_node,
        "mem": launcher.memory,
    }
    if launcher.hardware != "cpu":
        said["gres"] = f"{launcher.gres}:{launcher.ranks_per_node}"
    if runs > 1:
        slots = "" if at_once is None else f"%{at_once}"
        said["array"] = f"1-{runs}{slots}"
    # to the tasks of the step, which save then; the shell that waits for them stays as it is
    said["signal"] = f"USR1@{math.ceil(launcher.grace_seconds) + MARGIN_SECONDS}"
    said["open-mode"] = "append"
    for name, value in said.items():
        if value is not None:
            yield f"#SBATCH --{name}={value}"
    if launcher.exclusive:
        yield "#SBATCH --exclusive"
    yield "#SBATCH --requeue"


def _preparation(launcher: SlurmLauncher, counts: Sequence[int]) -> Iterator[str]:
    """`counts`: numbers of nodes that the runs can be trained on, the most first."""
    if launcher.modules:
        # before set -u: what defines `module`, and modules themselves, read variables that may not be there
        yield "# a shell that nobody has logged in to may not know what modules are"
        yield "# shellcheck source=/dev/null"
        yield "if ! command -v module > /dev/null; then . /etc/profile; fi"
        yield f"module load {shlex.join(launcher.modules)} || exit 64"
    yield "set -u"
    yield "# a request to stop is for the step, which saves: this shell waits for it, and then looks how it ended"
    yield "trap : USR1 HUP"
    yield "# SLURM tells this shell, too, where it ends the job itself: scancel, a limit, preemption"
    yield "ended=no"
    yield "trap 'ended=yes' TERM"
    for name, value in launcher.env.items():
        yield f"export {name}={quoted(value)}"
    yield "# nodes reach each other by the name of the first; the port is one that another job of the node hardly has"
    if not launcher.is_elastic:
        yield 'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    yield "port=$((10000 + SLURM_JOB_ID % 20000))"
    yield "# what the job trains, where all its nodes see it"
    yield 'job="$PWD/.megaspec-job-$SLURM_JOB_ID"'
    yield "trap 'rm -rf \"$job\"' EXIT"
    yield 'rm -rf "$job"'
    yield 'mkdir -p "$job/recipes" || exit 73'
    if launcher.nodes > 1:
        yield "# by it ranks know what another rank wrote where they meet; another one in each start of the job"
        secret = 'head -c 32 /dev/urandom | od -An -v -tx1 | tr -d " \\n" > "$job/secret"'
        yield f"(umask 077 && {secret}) || exit 73"
        yield f'export {SECRET_FILE}="$job/secret"'
        yield "# what nodes say of their hosts; see megaspec_launchers/job_hosts.py"
        yield 'mkdir -p "$job/nodes" "$job/ended" "$job/left-out" || exit 73'
        if launcher.is_elastic:
            yield from _chosen_hosts(launcher, counts)
        else:
            yield 'scontrol show hostnames "$SLURM_JOB_NODELIST" > "$job/hosts"'
        yield 'lost=$(cat "$job.lost" 2> /dev/null)'
        yield 'rm -f "$job.lost"'


def _chosen_hosts(launcher: SlurmLauncher, counts: Sequence[int]) -> Iterator[str]:
    """Which nodes of the start train: see the note "Fewer nodes"."""
    yield "# those that SLURM gives, less those that it was told to leave out"
    yield 'scontrol show hostnames "$SLURM_JOB_NODELIST" > "$job/given"'
    yield """sed -n 2p "$job.excluded" 2> /dev/null | tr , '\\n' > "$job/avoided\""""
    yield 'grep -F -x -v -f "$job/avoided" "$job/given" > "$job/left"'
    yield "# on as many nodes as a layout fits"
    yield "nodes=0"
    yield f"for count in {' '.join(str(count) for count in counts)}; do"
    yield '  if [ "$count" -le "$(wc -l < "$job/left")" ]; then nodes=$count; break; fi'
    yield "done"
    yield 'head -n "$nodes" "$job/left" > "$job/hosts"'
    yield 'host=$(head -n 1 "$job/hosts")'
    yield 'idle=$(grep -F -x -v -f "$job/hosts" "$job/given" | paste -s -d , -)'
    yield f'if [ "$nodes" -lt {launcher.nodes} ]; then'
    yield f'  echo "megaspec: this start trains on $nodes of {launcher.nodes} nodes${{idle:+, idle are $idle}}" >&2'
    yield "fi"


def _step_on_enough(launcher: SlurmLauncher, step: Iterator[str]) -> Iterator[str]:
    """The step, unless too few nodes are left: the job waits for others then, as after a suspicion."""
    yield 'if [ "$nodes" -gt 0 ]; then'
    for command in step:
        yield f"  {command}"
    yield "else"
    text = 'the run keeps away from all but $(wc -l < "$job/left") of $idle, and launcher.min_nodes='
    text += f"{launcher.min_nodes}; to let one in again, delete its line in avoided.jsonl and $job.excluded"
    yield f'  echo "megaspec: {text}" >&2'
    yield f"  code={_SUSPECTED}"
    yield "fi"


def _recipe(spec: Spec) -> Iterator[str]:
    """Writes the recipe of the one run."""
    yield f"run={quoted(spec.run_dir)}"
    yield from _written(spec)


def _recipes(specs: Sequence[Spec]) -> Iterator[str]:
    """Writes the recipe of the run that an array's task is."""
    yield 'case "$SLURM_ARRAY_TASK_ID" in'
    for number, spec in enumerate(specs, 1):
        yield f"{number})"
        yield from _recipe(spec)
        yield ";;"
    yield "*)"
    yield '  echo "megaspec: SLURM_ARRAY_TASK_ID=$SLURM_ARRAY_TASK_ID has no run" >&2'
    yield "  exit 64 ;;"
    yield "esac"


def _written(spec: Spec) -> Iterator[str]:
    text = recipe_of_job(spec)
    if not text.isascii():
        # bytes, whatever the locale of who prints the script, or of the node
        yield f'printf %s {quoted(text)} > "$job/recipes/{NAME}.yaml" || exit 73'
        return
    assert END not in text.splitlines(), f"a recipe with the line {END}"
    yield f"cat > \"$job/recipes/{NAME}.yaml\" <<'{END}' || exit 73"
    yield text.removesuffix("\n")
    yield END


def _mounted() -> Iterator[str]:
    """What every container of a job sees: the folder that it was submitted from, and that of an absolute run_dir."""
    yield 'mounts="$PWD:$PWD"'
    yield 'case "$run" in /*)'
    yield '  runs=$(dirname -- "$run")'
    yield '  mkdir -p -- "$runs" || exit 73'
    yield '  mounts="$mounts,$runs:$runs" ;;'
    yield "esac"
    yield 'case "$PWD$run" in *[:,]*)'
    yield '  echo "megaspec: $PWD, $run: no container can mount a folder with a colon or comma; take another" >&2'
    yield "  exit 64 ;;"
    yield "esac"


def _step(spec: Spec, launcher: SlurmLauncher, memory: str) -> Iterator[str]:
    """One task a node. The first that ends leaves the others time to end by themselves, with the code that counts."""
    wait = math.ceil(launcher.grace_seconds) + MARGIN_SECONDS
    nodes = str(launcher.nodes)
    if launcher.is_elastic:
        nodes = '"$nodes"'
    started = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}"]
    if launcher.is_elastic:
        started.append("""--nodelist="$(paste -s -d , "$job/hosts")\"""")
    words = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--wait={wait}"]
    if launcher.cpus_per_node is not None:
        # srun does not take it over from sbatch
        words += [f"--cpus-per-task={launcher.cpus_per_node}"]
    # whatever sbatch was told of the environment: the secret, modules and launcher.env are for the tasks
    words += ["--cpu-bind=none", "--export=ALL"]
    lines = [" ".join([*started, shlex.join(words)]), *_inside(launcher)]
    node = [f"--ranks={launcher.ranks_per_node}", "--rank-from=SLURM_NODEID", f"--grace={launcher.grace_seconds:g}"]
    lines += [f"python3 -P -m megaspec_launchers.node --nodes={nodes} {shlex.join(node)}"]
    lines += ['--host="$host" --port="$port" --job="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --run-dir="$run"']
    if launcher.nodes > 1:
        lines += ['--job-dir="$job" --host-from=SLURMD_NODENAME --restarts="${SLURM_RESTART_COUNT:-0}" --lost="$lost"']
    words = words_of_job("@job@", spec, memory=memory)
    lines += [f"-- {shlex.join(words)}".replace("@job@", '"$job"')]
    yield " \\\n  ".join(lines)
    yield "code=$?"


def _inside(launcher: SlurmLauncher) -> Iterator[str]:
    """Of srun's words those that put a task into its container."""
    container = launcher.container
    if container is None:
        return
    if container.runtime == "pyxis":
        yield f"--container-image={shlex.quote(container.image)} --no-container-mount-home"
        yield f'--container-mounts="$mounts"{_mounts(container)} --container-workdir="$PWD"'
        return
    words = ["apptainer", "exec", "--no-home"]
    if launcher.hardware != "cpu":
        words += ["--nv"]
    yield f'{shlex.join(words)} --pwd "$PWD" --bind "$mounts"{_mounts(container)}'
    yield shlex.quote(container.image)


def _mounts(container: SlurmContainer) -> str:
    """`,/data:/data:ro,/models:/models`, quoted: what follows the job's own. Both programs read the same words."""
    text = ""
    for mount in container.mounts:
        target = mount.target or mount.source
        text += f",{PurePosixPath(mount.source)}:{PurePosixPath(target)}"
        if mount.read_only:
            text += ":ro"
    if not text:
        return ""
    return shlex.quote(text)


def _end(launcher: SlurmLauncher) -> Iterator[str]:
    """The job's own exit code, and whether it goes back into the queue."""
    has_hosts = launcher.nodes > 1
    yield "# of a task that was killed srun tells 128 and the signal; Python tells 1 of what it could not even begin"
    yield 'if [ "$code" -ge 128 ]; then code=74; elif [ "$code" -eq 1 ]; then code=70; fi'
    if has_hosts:
        yield from _hosts()
    if launcher.is_elastic:
        yield from _enough_hosts()
    yield 'case "$code" in'
    yield f"{_RESTARTED}|{_SUSPECTED})" if has_hosts else f"{_RESTARTED})"
    yield "  # SLURM would requeue a job that is cancelled, too; one whose time is over, or that is preempted, goes on"
    yield f"""  if [ "$ended" = yes ] && ! scontrol show job "$SLURM_JOB_ID" | grep -E -q '{_GOES_ON}'; then"""
    if has_hosts:
        yield "    # where a node was lost SLURM has counted the restart already, and starts the job again by itself"
        yield f"    restarts=$({_SAID_RESTARTS})"
        yield """    if [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]; then"""
        yield "      again=yes"
        yield '      echo "megaspec: exit code $code: SLURM itself puts the job back into the queue" >&2'
        yield "    else"
        yield '      echo "megaspec: exit code $code: SLURM was told to end the job, which stays ended" >&2'
        yield "    fi"
    else:
        yield '    echo "megaspec: exit code $code: SLURM was told to end the job, which stays ended" >&2'
    if has_hosts:
        yield f'  elif [ "$code" -eq {_SUSPECTED} ] && [ "$named" = no ]; then'
        yield '    echo "megaspec: exit code $code: no host of the job can be named, which stays ended" >&2'
    yield f'  elif [ "${{SLURM_RESTART_COUNT:-0}}" -lt {launcher.max_restarts} ]; then'
    yield '    echo "megaspec: exit code $code: the job goes back into the queue" >&2'
    if has_hosts:
        yield from _back_without_hosts(launcher)
    else:
        yield '    rm -rf "$job"'
        yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "  else"
    yield f'    echo "megaspec: exit code $code after {launcher.max_restarts} restarts (launcher.max_restarts)" >&2'
    yield "  fi ;;"
    yield "esac"
    if has_hosts:
        yield 'if [ "$again" = no ]; then rm -f "$job.lost" "$job.excluded"; fi'
    yield 'exit "$code"'


def _hosts() -> Iterator[str]:
    """Which hosts the job is to do without, in the words of its nodes."""
    yield "# what sbatch was told to exclude, and what was left out since: kept while the job is in the queue"
    yield "own="
    yield "before="
    yield """if [ -e "$job.excluded" ]; then { read -r own; read -r before; } < "$job.excluded"; fi"""
    yield "# hosts that stand in avoided.jsonl, as each node found it at its end; without a word of any the list stays"
    yield "avoided=$before"
    yield "named=no"
    yield 'for said in "$job"/left-out/*; do'
    yield '  if [ -e "$said" ]; then avoided=; fi'
    yield "done"
    yield 'sort -u "$job"/left-out/* > "$job/avoided" 2> /dev/null'
    yield "while read -r name; do"
    yield '  if scontrol show node "$name" > /dev/null 2>&1; then'
    yield '    avoided="$avoided${avoided:+,}$name"'
    yield '    if grep -F -x -q -e "$name" "$job/hosts"; then named=yes; fi'
    yield "  else"
    yield '    echo "megaspec: $name of $run/avoided.jsonl is no node of this cluster, and is not left out" >&2'
    yield "  fi"
    yield 'done < "$job/avoided"'
    yield "# a host is lost where it alone says nothing of its end, ranks of others missed its own, and none was killed"
    yield "# SLURM ends what this shell has started, too, as soon as it sees that a node is lost"
    yield "("
    yield "  trap '' TERM"
    yield "  gone="
    yield "  while read -r name; do"
    yield '    if [ ! -e "$job/ended/$name" ]; then gone="$gone${gone:+,}$name"; fi'
    yield '  done < "$job/hosts"'
    yield f'  if [ "$code" -eq {HangError.exit_code} ] && [ -n "$gone" ] && [ "${{gone#*,}}" = "$gone" ] &&'
    yield f'    grep -q -s {MISSED} "$job"/ended/* && ! grep -q -s {FAILED} "$job"/ended/*; then'
    yield '    echo "megaspec: host $gone was lost; at the second time the run keeps away from it" >&2'
    yield '    echo "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} $gone" > "$job.lost"'
    yield "  fi"
    yield ")"
    yield "again=no"


def _enough_hosts() -> Iterator[str]:
    """How many nodes of this start are left without the hosts to leave out, and whether SLURM gave it others that it
    had been told of: it is told again then."""
    yield """printf '%s\\n' "$avoided" | tr , '\\n' > "$job/avoided\""""
    yield 'others=$(grep -F -x -v -c -f "$job/avoided" "$job/given")'
    yield 'if [ "$nodes" -eq 0 ]; then named=yes; fi'
    yield 'if [ "$(wc -l < "$job/left")" -lt "$(wc -l < "$job/given")" ]; then before=-; fi'


def _back_without_hosts(launcher: SlurmLauncher) -> Iterator[str]:
    """Back into the queue, and then other hosts to leave out: SLURM changes them only of a job that waits, and does not
    start a job again for some seconds. Where this shell is ended between the two, a node of the next start refuses."""
    yield "    again=yes"
    yield '    rm -rf "$job"'
    yield """    if [ -n "$avoided" ]; then echo "megaspec: left out: $avoided ($run/avoided.jsonl says why)" >&2; fi"""
    yield """    if [ "$avoided" != "$before" ] && [ ! -e "$job.excluded" ]; then"""
    yield """      own=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\\([^ (]*\\).*/\\1/p')"""
    yield "    fi"
    yield "    # SLURM ends this shell when the job is back in the queue: not before what follows is done"
    yield "    trap '' TERM"
    yield """    if scontrol requeue "$SLURM_JOB_ID" && [ "$avoided" != "$before" ]; then"""
    yield '      list="$own${own:+${avoided:+,}}$avoided"'
    yield "      tries=0"
    yield '      until scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$list"; do'
    yield "        tries=$((tries + 1))"
    yield f'        if [ "$tries" -eq {_TRIES} ]; then break; fi'
    yield "        sleep 1"
    yield "      done"
    yield f'      if [ "$tries" -lt {_TRIES} ]; then'
    yield r"""        printf '%s\n' "$own" "$avoided" > "$job.excluded" """.rstrip()
    if launcher.is_elastic:
        yield f'      elif [ "$others" -ge {launcher.min_nodes} ]; then'
        yield r"""        printf '%s\n' "$own" "$avoided" > "$job.excluded" """.rstrip()
        said = "SLURM does not leave out $avoided: the job itself does, where it is given them"
        yield f"""        if [ -n "$avoided" ]; then echo "megaspec: {said}" >&2; fi"""
    yield "      else"
    yield '        scontrol hold "$SLURM_JOB_ID"'
    yield '        echo "megaspec: SLURM does not leave out $list: the job is held. To go on, give" >&2'
    yield '        echo "  scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$list" >&2'
    yield '        echo "  scontrol release $SLURM_JOB_ID" >&2'
    yield '        echo "or end it: scancel $SLURM_JOB_ID" >&2'
    yield "      fi"
    yield "    fi"
