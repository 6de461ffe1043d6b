"""What can't be followed with certainty is refused with its line, and what is followed is what bash does."""

import pytest

from megaspec.core.errors import RecipeError
from megaspec.megatron.arithmetic import sets_variable
from megaspec.megatron.conditions import decide, matches
from megaspec.megatron.script import script_words

ARGUMENTS = ("one", "two words")


def words(text: str, **environment: str) -> list[str]:
    """The words behind `python p.py`."""
    found = script_words(text, label="s", arguments=ARGUMENTS, environment=environment).words
    return found[found.index("p.py") + 1 :]


REFUSED = {
    # commands that set a variable
    "printf -v N x\npython p.py $N": (1, "it sets a variable"),
    "command printf -vN x\npython p.py": (1, "it sets a variable"),
    "coproc cat\npython p.py": (1, "runs beside the script"),
    "command eval 'source x'\npython p.py": (1, "another file is read"),
    "builtin read N\npython p.py": (1, "input is read"),
    "wait -n -p N\npython p.py $N": (1, "it sets a variable"),
    "exec {N}> log\npython p.py $N": (1, "a redirection that sets a variable"),
    "trap 'N=1' DEBUG\npython p.py": (1, "it sets a variable"),
    # declarations that change what an assignment means
    "declare -i N\npython p.py": (1, "`declare` with -i can't be followed"),
    "typeset -l N=A\npython p.py $N": (1, "`typeset` with -l can't be followed"),
    "declare -u N=a\npython p.py $N": (1, "`declare` with -u can't be followed"),
    "declare -n N=M\npython p.py $N": (1, "`declare` with -n can't be followed"),
    "readonly -A N\npython p.py": (1, "`readonly` with -A can't be followed"),
    "local N=1\npython p.py $N": (1, "outside of a function"),
    "readonly N=1\nN=2\npython p.py $N": (2, "N is read-only"),
    "export $MORE\npython p.py": (1, "`export` with $MORE can't be followed"),
    # options by which words are read otherwise
    "set -k\npython p.py A=1": (1, "`set` with -k"),
    "set -o posix\npython p.py": (1, "`set` with posix"),
    "set pipefail\npython p.py $1": (1, "arguments that are set anew"),
    "shopt -s nocasematch\npython p.py": (1, "`shopt` with -s nocasematch"),
    "shopt -s lastpipe\npython p.py": (1, "`shopt` with -s lastpipe"),
    "set -u\nunset N\npython p.py $N": (3, "`set -u` ends it here"),
    "set -e\n[ $# = 3 ]\npython p.py": (2, "before it trains"),
    "unset 'L[1]'\npython p.py": (1, "`unset L[1]` can't be followed"),
    "unset -n N\npython p.py": (1, "`unset -n N` can't be followed"),
    # assignments inside arithmetic
    "N=1\npython p.py $((N=3))": (2, "sets a variable"),
    "N=1\nM=$((N++))\npython p.py $N": (2, "sets a variable"),
    "N=1\nM=$((2 - --N))\npython p.py $N": (2, "sets a variable"),
    "N=1\n((N <<= 2))\npython p.py $N": (2, "sets a variable"),
    "L=(a b)\nM=${L[N=1]}\npython p.py $N": (2, "sets a variable"),
    "M='N=3'\n: $((M))\npython p.py $N": (2, "sets a variable by what M holds"),
    "[[ N=3 -eq 3 ]]\npython p.py $N": (1, "sets a variable"),
    "A=abc\nB=${A:N=1}\npython p.py $N": (2, "sets a variable"),
    "B=${A#${N:=1}}\npython p.py $N": (1, "sets a variable"),
    "echo > ${N:=log}\npython p.py $N": (1, "sets a variable"),
    "cat <<END > log\n${N:=1}\nEND\npython p.py $N": (1, "set a variable"),
    "let N=1\npython p.py": (1, "arithmetic is done"),
    "python p.py $[1+2]": (1, "arithmetic in an old spelling"),
    # other shells
    "find . -exec bash -c 'python p.py $1' _ {} +": (1, "find makes other words"),
    "cat words | xargs python p.py --x": (1, "xargs makes other words"),
    "nohup ssh host python p.py --name 'a b'": (1, "ssh makes other words"),
    "'python p.py' --x": (1, "has blanks in it"),
    "env -S 'A=1' bash -c 'python p.py $A'": (1, "`env` with -S"),
    "bash -n -c 'python p.py'": (1, "`set` with -n"),
    "zsh -c 'python p.py'": (1, "zsh reads words in another way"),
    "sh -c 'L=(a b); python p.py ${L[0]}'": (1, "not every `sh` has it"),
    "sh -c '[[ a == a ]] && python p.py'": (1, "not every `sh` has it"),
    "A=1 eval 'python p.py $A'": (1, "an assignment in front of `eval`"),
    # what only the machine knows
    "python p.py *.bin": (1, "*.bin becomes what the machine's files"),
    "L=(*.bin)\npython p.py \"${L[@]}\"": (2, "*.bin becomes what the machine's files"),
    "A='x?'\npython p.py $A": (2, "x? becomes what the machine's files"),
    "python p.py a[bc]": (1, "a[bc] becomes what the machine's files"),
    "python p.py ~user/data": (1, "~user/data becomes what the machine's files"),
    "python p.py x{a,b}": (1, "a brace expansion"),
    "A=1\npython p.py {$A,'b c'}": (2, "a brace expansion"),
    "python p.py {1..3}": (1, "a brace expansion"),
    "declare A={a,b}\npython p.py $A": (1, "a brace expansion"),
    "L=([1]=a)\npython p.py ${L[@]}": (1, "an element of L with its place"),
    # branches
    "if [ -f x ]; then python p.py --fp16; exit 0; fi\npython p.py --bf16": (1, "it decides what is trained"),
    "if [ -f x ]; then bash -c 'python p.py --fp16'; fi\npython p.py --bf16": (1, "it decides what is trained"),
    "if [ -f x ]; then command eval N=1; fi\npython p.py $N": (1, "it decides what is trained"),
    "if [ -f x ]; then trap 'N=2' DEBUG; fi\npython p.py $N": (1, "it decides what is trained"),
    "if [ -f x ]; then sbatch <<END\npython p.py --fp16\nEND\nfi\npython p.py": (1, "it decides what is trained"),
    "trap 'python p.py --x' EXIT\npython p.py --y": (1, "trains beside what it does"),
    "return\npython p.py": (1, "outside of a function"),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_it_is_refused_with_its_line_and_the_reason(text):
    line, why = REFUSED[text]
    with pytest.raises(RecipeError) as caught:
        words(text)
    assert str(caught.value).startswith((f"s:{line}: `", f"s:{line}, its string:1: `"))
    assert why in str(caught.value)


def test_ssh_gives_a_shell_less_than_is_written():
    """`ssh host bash -c 'python p.py'` starts `bash -c python p.py` there: python without a program."""
    with pytest.raises(RecipeError, match="no command in it starts"):
        words("ssh host bash -c 'python p.py --x'")


FOLLOWED = {
    "command python p.py --x": ["--x"],
    "command " * 5_000 + "builtin echo\npython p.py --x": ["--x"],
    "command -v nvcc && N=1\npython p.py ${N:-0}": ["$N"],
    # declarations and options
    "export A=1 B\ndeclare -x C=2\npython p.py $A $C": ["1", "2"],
    "N=A\nexport $N=1 'B=x y'\npython p.py $A \"$B\"": ["1", "x y"],
    "set -euo pipefail\nset +x -o errtrace\npython p.py --x": ["--x"],
    "set -f\npython p.py *.bin": ["*.bin"],
    "set -a\nA=1\nset +a\nB=2\nbash -c 'python p.py $A $B'": ["1", "$B"],
    "A=1\nunset -v A\npython p.py ${A-none}": ["none"],
    "f() { :; }\nunset -f f\nf\npython p.py --x": ["--x"],
    # arithmetic
    "N=1\npython p.py $((--5)) $((5--3)) $((N - -N)) $((N>=1)) $(( ))": ["5", "8", "2", "1", "0"],
    "unset N\nM=${N:=3}\npython p.py $N": ["3"],
    "unset N\nif [ -f x ]; then : ${N:=3}; fi\npython p.py ${N:-4}": ["$N"],
    "unset N\n[ -f x ] && [ ${N:=3} ]\npython p.py ${N:-4}": ["$N"],
    "unset N\n[[ a == b && ${N:=3} ]]\npython p.py ${N:-4}": ["4"],
    # shells of their own
    "N=1\n(N=2; shift; set -f; f() { :; })\nf\npython p.py $N $1": ["1", "one"],
    "N=1\nexport M=1\n( unset M; export N )\nbash -c 'python p.py $M ${N:+x}'": ["1", "${N:+x}"],
    "N=1\nN=2 | N=3\npython p.py $N": ["1"],
    "N=1\necho | { N=2; shift; exit 1; }\npython p.py $N $1": ["1", "one"],
    "N=1\nN=2 &\n{ cd /; N=3; exit; } &\npython p.py $N \"$(pwd)\"": ["1", "."],
    "(exit 1) || N=2\n(exit 0) && M=3\npython p.py $N $M": ["2", "3"],
    "exec > log\npython p.py --x": ["--x"],
    "exec python p.py --x\npython p.py --y": ["--x"],
    # strings of other shells
    "bash -c 'python p.py $0 $1 \"$@\" $#' name a 'b c'": ["name", "a", "a", "b c", "2"],
    "bash -c 'shift; N=2'\npython p.py $1 ${N:-0}": ["one", "0"],
    "bash -eo pipefail -c -x 'python p.py $1' name a": ["a"],
    "A=1 B=$A bash -c 'python p.py $A $B'": ["1", "1"],
    "export A=0 C=2\nenv A=1 bash -c 'python p.py $A $C'": ["1", "2"],
    "export A=0 C=2\nenv -u C A=1 bash -c 'python p.py $A ${C:-none}'": ["1", "none"],
    "export A=0\nenv -i B=1 bash -c 'python p.py ${A:-none} $B'": ["${A:-none}", "1"],
    "export A=0\ndocker exec box bash -c 'python p.py ${A:-none}'": ["${A:-none}"],
    "export A=0\ndocker exec box env A=1 bash -c 'python p.py $A'": ["1"],
    "export A=0\nssh -p 22 host bash -c \"'python p.py \\$A'\"": ["$A"],
    "ssh host python p.py \"a b\" '\"c d\"'": ["a", "b", "c d"],
    "export A=0\nsrun -l bash -c 'python p.py $A'": ["0"],
    "export A=0\nsrun --export=NONE bash -c 'python p.py $A'": ["$A"],
    "L=(a b)\nexport L\nbash -c 'python p.py $L'": ["$L"],
    "eval \"python p.py '$MORE'\"": ["$MORE"],
    "bash -c 'python p.py $# $2' name $MORE \"$2\"": ["$#", "$2"],
    # what stands for files, folders and several words
    "A=*.bin B={a,b}\npython p.py \"$A\" $B '*' \\? \"{a,b}\"": ["*.bin", "{a,b}", "*", "?", "{a,b}"],
    "python p.py {} a{b} \\{a,b}": ["{}", "a{b}", "{a,b}"],
    "mkdir -p {a,b} *.d\nfor_files=(*.bin)\npython p.py --x": ["--x"],
    "HOME=/me\nA=~/a:~/b\npython p.py $A ~/c ~ a~ '~' --d=~/e": ["/me/a:/me/b", "/me/c", "/me", "a~", "~", "--d=~/e"],
    "python p.py ~/data": ["$HOME/data"],
    "unset A\npython p.py \"${A:-'b c'}\" \"${A:-d\\e}\"": ["'b c'", "d\\e"],
    "python p.py ${HOME:-/root} ${UID:-0}": ["${HOME:-/root}", "${UID:-0}"],
    # conditions
    "N=3\n[[ N+1 -eq 4 ]] && A=yes\npython p.py $A": ["yes"],
    "N=3\n[ N -eq 3 ] && A=yes\npython p.py ${A:-no}": ["$A"],
    "N=a.py\n[[ $N == *.py && $N != \"*\" && $N == ?.[oprs]y ]] && A=yes\npython p.py $A": ["yes"],
    "P='a*'\n[[ abc == \"$P\" ]] || A=1\n[[ abc == $P ]] && B=2\npython p.py $A $B": ["1", "2"],
    "[[ a1 =~ a(.) ]] && A=yes\npython p.py ${A:-no}": ["$A"],
    "case $1 in o*) A=1;; *) A=2;; esac\npython p.py $A": ["1"],
}  # fmt: skip


@pytest.mark.parametrize("text", FOLLOWED, ids=range(len(FOLLOWED)))
def test_it_is_followed_as_bash_does(text):
    assert words(text) == FOLLOWED[text]


def test_what_is_given_in_front_of_the_script_is_exported():
    assert words("bash -c 'python p.py $A'\n", A="x y") == ["x", "y"]
    assert words("A=$A.b\nbash -c 'python p.py \"$A\"'", A="x y") == ["x y.b"]


@pytest.mark.parametrize(
    ("expression", "sets"),
    [
        ("X=3", True),
        ("X == 3", False),
        ("X<=3", False),
        ("X >>= 3", True),
        ("X|=1", True),
        ("X != 3", False),
        ("L[2] += 1", True),
        ("X ++", True),
        ("-- X", True),
        ("-----1", False),
        ("5--3", False),
        ("X - -1", False),
        ("1 + + 2", False),
    ],
)
def test_arithmetic_that_sets_a_variable(expression, sets):
    assert sets_variable(expression) is sets


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [
        ("abc", "a*", True),
        ("abc", "*b", False),
        ("aXbXc", "a*b*c", True),
        ("", "*", True),
        ("", "?", False),
        ("a]", "a[]]", True),
        ("a5", "a[0-9]", True),
        ("ab", "a[!b]", False),
        ("a[", "a[", True),
        # the order of letters, classes and what stands for bytes are the machine's language's
        ("ab", "a[a-z]", None),
        ("ab", "a[[:alpha:]]", None),
        ("é", "?", None),
        ("ab", "+(a|b)", None),
        ("a*", "a\\*", None),
    ],
)
def test_patterns(text, pattern, answer):
    assert matches(text, [(pattern, True)]) is answer
    assert matches(text, [(pattern, False)]) is (text == pattern)


def test_operands_of_a_bracket_are_weighed_as_posix_has_it():
    assert decide(["!", "", "-a", ""]) is True
    assert decide(["", "-o", "b"]) is True
    assert decide([" 3", "-eq", "3 "]) is True
    assert decide(["a", "=", "a", "-o", "b", "=", "c"]) is True
    # these are errors, whatever their first part says
    assert decide(["a", "=", "a", "-o", "b", "c", "=", "d"]) is None
    assert decide(["(", "a", "=", "b", ")"]) is None
    assert decide(["a", "=", "a", "-o", None, "=", "d"]) is None


def test_patterns_and_shells_are_bounded():
    stars = "*a" * 2_000
    text = f"A={'a' * 3_000}b\nif [[ $A == {stars} ]]; then B=1; fi\npython p.py --x"
    assert words(text) == ["--x"]
    with pytest.raises(RecipeError, match="characters"):
        words("".join(f"A{n}=x\n" for n in range(2_000)) + "(:)\n" * 2_000 + "python p.py")
