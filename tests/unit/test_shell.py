"""Bash scripts read without running them; where bash is there, what it does is the reference."""

import random
import re
import shutil
import subprocess

import pytest

from mfsdp_cli.config.shell import read_script
from mfsdp_cli.config.shell_math import arithmetic

BASH = shutil.which("bash")


def launches(text, arguments=(), **variables):
    """Words of the commands called launch, as they are known."""
    script = read_script(text, {"HOME": "/h"} | variables, None if arguments is None else list(arguments))
    assert script.faults == []
    commands = [c for c in script.commands if c.words[0].text == "launch"]
    assert all(word.why == () for c in commands for word in c.words)
    return [[word.text for word in c.words[1:]] for c in commands]


def as_bash_does(text, arguments=()):
    call = 'launch() { printf "%s\\0" "$#" "$@"; }\n' + text
    environ = {"HOME": "/h", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([BASH, "-c", call, "script", *arguments], capture_output=True, text=True, env=environ, check=False)
    parts, found = done.stdout.split("\0")[:-1], []
    while parts:
        count = int(parts[0])
        found.append(parts[1:count + 1])
        parts = parts[count + 1:]
    return found


SCRIPTS = r"""
launch a "b c" 'd e' f\ g "a\"b\$c\\d" "a\nb" a"b"'c' $'t\tu' c#d # comment
X=1; launch $X "$X" '$X' ${X} "${X}y" ${Y:-z} "${Y:-a b}" ${Y:-a b} ${Y-} "${Y-}"
A=(a 'b c' "d e"); A+=(f); launch "${A[@]}" ${A[1]} "${A[*]}" ${#A[@]} ${A[@]} "pre${A[@]}post"
E=(); launch x "${E[@]}" y "${E[@]:-z}" ${E[@]+"${E[@]}"}; E+=("p q"); launch ${E[@]+"${E[@]}"} "${E[@]:-d}"
A=(x y z); A[1]=w; launch "${A[@]}" "${A[-1]}" "${A[0]}$A"
n=5; launch $((n*2+1)) $(( (n+1) / 2 )) $((n % 3)) $((-7/2)) $((-7 % 3)) $((n>3)) $((2**10)) $((1024 * $n))
[ "$1" -gt 3 ] && X=big || X=small; launch $X
if [ "$1" = 1 ]; then launch yes; elif [ -z "$1" ]; then launch two; else launch no; fi
[[ "$1" == 7* && -n "$1" ]] && launch match; [[ "$1" != 7 || ( 1 -eq 2 ) ]] || launch seven
for i in 1 2 "3 4"; do launch $i "$i"; done; launch $i
for i in 1 2 3; do if [ $i = 2 ]; then continue; fi; launch $i; [ $i = 3 ] && break; done
case "$1" in 7|8) launch 78 ;; [a-z]*) launch letter ;; *) launch other ;; esac
f() { local z=$1; launch f "$z" "$@"; }; f "a b" c; launch $#
function g { launch in g; return; launch never; }; g; launch after
S="a b=c  d"; launch $S x$S "$S" "x${S}y"
M=/x/y/z.sh; launch ${M##*/} ${M%/*} ${M%%/*} ${M#/} ${M%.sh} ${M/y/w} ${M//x/q} ${#M} ${M^^}
: ${Q:=7}; launch $Q ${Q:+set} ${W:+unset} "${W:+unset}" ${W+u}
export P=3 R="x y"; launch $P "$R"; unset P; launch "${P:-gone}"
launch ~/a "~/a" a~ k.k=~/b
launch "['$1', '$1']" ['a','b'] '["console","wandb"]' "{a: 1}"
{ launch g; } 2>/dev/null | cat; launch h &
( X=9; launch $X ); launch ${X:-none}
true && launch t; false || launch f; ! false && launch n; false && launch never
L="-m verl"; launch python3 ${L} 2>&1
launch "a${X:-"b c"}d" ${X:-'q r'} "${X:-'q r'}" k=${X:-"m n"}
set -- p q "r s"; launch "$@" $# "$*"; shift 2; launch "$@" $1
X="  a b  "; launch $X "[$X]" y${X}z; X=; launch "$X" $X ${X:-d} ${X-d} "a$X"
(( 3 > 2 )) && launch math; X=a; X+=b; launch $X; Y=$X$X"$X"; launch "$Y"
C="launch e \$X 'y z'"; X=3; eval "$C"; eval launch f '"g h"'; X=4; eval "X=5"; launch $X
bash -c 'true; false'; env A=1 true; launch a;launch b;if true;then launch 1;fi
if [ "$#" -lt 1 ]; then exit 1; fi; launch enough; exit; launch never
"""
LONG = r"""launch a \
  b # comment \
launch "c
d" \
 'e'
cat <<EOF > /dev/null
launch nothing $(x "
EOF
cat <<-'EOF' > /dev/null
	launch nothing
	EOF
# launch nothing
ARGS=(
    one   # a comment in an array
    "two words"

    three=${N:-3}
)
if false
then launch 2
else
  launch "${ARGS[@]}" \
    last
fi > /dev/stdout
TEXT="\
    a=1 \
    b='2' \
    c=3"
launch $TEXT
"""


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("text", [*SCRIPTS.strip().splitlines(), LONG, LONG.replace("\n", "\r\n")])
def test_words_are_those_that_bash_makes(text):
    for arguments in ((), ("7",), ("1",)):
        if not arguments and "$1" in text:
            continue
        assert launches(text, arguments) == as_bash_does(text.replace("\r\n", "\n"), arguments)


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_random_scripts_are_read_as_bash_reads_them():
    rng, lines, compared = random.Random(1), [line for line in SCRIPTS.strip().splitlines() if not re.search("exit|set --|&$", line)], 0
    for _ in range(20):
        text = "\n".join(rng.sample(lines, 5))
        script = read_script(text, {"HOME": "/h"}, ["7"])
        # where ours cannot know a word or a condition it says so; all that it does know is right
        if all(word.why == () for c in script.commands for word in c.words) and not any(c.doubt for c in script.commands):
            assert launches(text, ["7"]) == as_bash_does(text, ["7"]), text
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize("text, why", [
    ("launch $(hostname)", "the output of a command, $(hostname), in line 1"),
    ("launch `nproc`", "the output of a command, $(nproc), in line 1"),
    ("\nlaunch a=$MODEL", "$MODEL is not set in the script (line 2)"),
    ("launch $1", "the script's argument $1 is not set in the script (line 1)"),
    ("shift 2\nlaunch $3", "the script's argument $3 is not set in the script (line 2)"),
    ("launch ${X:?}", "$X must be given to the script (line 1)"),
    ("X=$(nproc)\nY=$X/2\nlaunch tp=${Y}", "the output of a command, $(nproc), in line 1"),
    ("if test -d /data; then X=1; else X=2; fi\nlaunch $X", "$X depends on the condition in line 1"),
    ("X=1\nif command -v sbatch; then X=2; fi\nlaunch $X", "$X depends on the condition in line 2"),
    ("nvidia-smi && X=8\nlaunch $X", "$X depends on the condition in line 1"),
    ("[ -n \"$N\" ] && X=8 || X=1\nlaunch $X", "$X depends on the condition in line 1"),
    ("case $HOSTNAME in a) X=1;; *) X=2;; esac\nlaunch $X", "$X depends on the condition in line 1"),
    ("for i in *.$(x); do Y=$i; done\nlaunch $i", "$i changes in the loop of line 1"),
    ("while read -r line; do X=$line; done < f\nlaunch $X", "$X changes in the loop of line 1"),
    ("read X < f\nlaunch $X", "$X is read from elsewhere in line 1"),
    ("launch $((X + 1))", "$((X + 1)) in line 1 cannot be worked out"),
    ("X=3; (( X++ ))\nlaunch $X", "$X is changed by (( )) in line 1"),
    ("launch ${!NAME}", "the variable that $NAME names, in line 1, is not followed"),
    ("declare -A M\nM[key]=1\nlaunch ${M[key]}", "the array is set by a key in line 2"),
    ("M=([a]=1)\nlaunch ${M[a]}", "arrays with keys, as in line 1, are not read"),
    ("launch $0", "$0 in line 1 is where the script lies"),
    ("X=abc; launch ${X/a?/d}", "${…/a?/d} in line 1 is not followed"),
    ("launch tp={1,2}", "braces, as in line 1, are not expanded"),
])
def test_what_the_script_alone_does_not_tell_is_named(text, why):
    script = read_script(text, {}, None)
    command = next(c for c in script.commands if c.words[0].text == "launch")
    assert command.words[1].why == (why,)


def test_ways_that_exit_do_not_count():
    text = 'if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nX=1\nnvidia-smi || { X=2; exit 1; }\nlaunch $X'
    assert launches(text, None) == [["1"]]
    assert launches(text, ["a"]) == [] and launches(text, ["a", "b"]) == [["1"]]


def test_exports_lines_and_doubts():
    text = 'export A=1 B\nB=2\nC=3\nset -a\nif nvidia-smi; then\n  D=4 launch x \\\n    y\nfi\nlaunch "$@"'
    script = read_script(text, {"V": "v"}, None)
    first, second = [c for c in script.commands if c.words[0].text == "launch"]
    assert {name: (v.text, v.line) for name, v in first.environ.items()} == {"A": ("1", 1), "B": ("2", 2), "D": ("4", 6)}
    assert [word.line for word in first.words] == [6, 6, 7] and first.doubt == "the condition in line 5 cannot be decided"
    assert set(second.environ) == {"A", "B"} and second.doubt == "" and len(second.words) == 1


def test_other_files_and_eval_are_told():
    script = read_script("source env.sh\n. other\neval \"$X\"\nbash -x more.sh", {}, None)
    assert [(line, why.partition(",")[0]) for line, why in script.notes] == [
        (1, "env.sh is another file"), (2, "other is another file"), (3, "what is run here is not known: $X is not set in the script (line 3)"),
        (4, "more.sh is another file")]


def test_commands_in_texts():
    script = read_script("\nX=1\nbash -c 'launch a\nlaunch $0 b' \nsh -xc \"launch $X\"\nenv A=1 B=2 launch c", {}, [])
    found = [(c.line, [w.text for w in c.words]) for c in script.commands]
    assert found == [(3, ["launch", "a"]), (4, ["launch", "$0", "b"]), (5, ["launch", "1"]), (6, ["env", "launch", "c"])]
    assert {name: v.text for name, v in script.commands[-1].environ.items()} == {"A": "1", "B": "2"}
    assert read_script("\neval 'launch ( x'", {}, []).faults == [(2, "the ( is never closed")]


@pytest.mark.parametrize("text, line, why", [
    ("launch a\nlaunch 'b\n", 2, "the ' is never closed"),
    ('launch "b', 1, 'the " is never closed'),
    ("a\nif true; then\nb\n", 4, "the end where fi was expected, for line 2"),
    ("case $X in a)\n if true; then b; else c ;;\nesac", 2, ";; where fi was expected, for line 2"),
    ("X=(a b\n", 1, "the ( of X is never closed"),
    ("a )", 1, ") has no beginning"),
    ("fi", 1, "fi has no beginning"),
    ("cat <<EOF\nx\n", 2, "the here-document never ends with EOF"),
    ("launch ${X", 1, "the ${ is never closed"),
    ("launch $(x", 1, "the $( is never closed"),
    ("a && ;", 1, "; where a command was expected"),
    ("(" * 5000, 1, "nested too deeply to be read"),
    ("f() { f; f; }\nf", 1, "the script goes on for too long: reading stopped here"),
    ("X=aaaaaaaaaa; for i in 1 2 3 4 5 6 7 8 9; do X=$X$X$X$X$X$X$X$X; done", 1, "the script goes on for too long: reading stopped here"),
])
def test_faults_have_their_line(text, line, why):
    script = read_script(text, {}, None)
    assert script.faults == [(line, why)]
    assert script.commands == [] or "too long" in why, "a script that is no shell is not read in part"


@pytest.mark.parametrize("text, value", [
    ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), (" n * 2 ", 14), ("$n - ${n}", 0), ("-7 / 2", -3), ("-7 % 3", -1), ("7 % -3", 1), ("2 ** 3", 8),
    ("n == 7", 1), ("n < 7", 0), ("1 / 0", None), ("x + 1", None), ("010", None), ("n = 3", None), ("n++", None), ("1 ? 2 : 3", None),
    ("2 ** 90", None), ("2 ** -1", None), ("", None), ("__import__('os')", None), ("1 if n else 2", None), ("1.5", None), ("(" * 400, None),
])
def test_arithmetic(text, value):
    assert arithmetic(text, {"n": 7}.get) == value


def test_any_text_is_read_without_an_exception_and_soon():
    rng = random.Random(2)
    letters = [*"$(){}[]\"'`\\;&|<>#=~*!-+@ \n\tabX1\0é", "${X:-", "$((", "<<E\n", "if ", "fi\n", "for i in ", "do ", "done\n", "A=("]
    for _ in range(1000):
        read_script("".join(rng.choice(letters) for _ in range(rng.randrange(60))), {"X": "1"}, rng.choice([None, [], ["a"]]))
    for _ in range(100):
        text = list(LONG + SCRIPTS)
        for _ in range(rng.randrange(1, 8)):
            at = rng.randrange(len(text))
            text[at:at + rng.randrange(4)] = rng.choice([[], [rng.choice(letters)], text[at:at + 30]])
        script = read_script("".join(text), {}, None)
        assert len(script.faults) <= 1
