"""The reader of scripts against bash itself: the same words reach the same command. About 1 s on one core."""

from __future__ import annotations

import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from llmctl.scripts.errors import ScriptError
from llmctl.scripts.shell.command_reader import read_script
from llmctl.scripts.shell.interpreter import Interpreter, World
from llmctl.scripts.shell.values import missing_of, text_of
from tests.waiting import HANG_S

# Every line that begins with "show" is compared.
SCRIPTS = {
    "quotes": r"""
A='single $X "q"'; B="double \$ \" \\ \n $((1+2))"; C=a\ b; D=$'tab\there'
show "$A" "$B" $C "$C" '' "" "$UNSET" x"$C"y a'b'"c"d
show a\
b \
  c # a comment
show "line one
line two" 'a # b' a#b
""",
    "variables": r"""
P=/a/b/model.tar.gz; N=5; EMPTY=
show ${P%.*} ${P%%.*} ${P##*/} ${P#*/} ${P/b/c} ${P//a/_} ${P:3:4} ${P: -3} ${#P} ${N}x
show ${U:-default} ${U-default} ${EMPTY:-d} "${EMPTY-d}" ${N:+set} ${U:+set} ${U:=made} $U
show ${W:-"two words"} ${W:-two words}
X=abc; show ${X^} ${X^^} ${X,,} ; R=X; show ${!R}
ARGS="--a 1"; ARGS="$ARGS --b 2"; ARGS+=" --c"; show $ARGS "$ARGS"
""",
    "arrays": r"""
A=(--one 1 # a comment
   --two "two words" '')
A+=(--three); A[1]=first
show "${A[@]}"; show ${A[@]}; show "${A[*]}"; show ${A[1]} ${#A[@]} ${A[-1]} $A x"${A[@]}"y
E=(); show "${E[@]}" end
""",
    "arithmetic": r"""
N=4; G=8; T=300
show $((N*G)) $(($N * ${G} / 3)) $((T*1000*1000*1000 / 2048)) $((10000 + (12345 % 50000)))
show $((2**10)) $((-7/2)) $((-7%3))
show $((N>3 ? 1 : 2)) $((N==4 && G!=8)) $((0x10)) $((~N)) $((1<<4|1)) $((N++)) $N $((++N)) $((N+=2)) $N
(( N > 5 )) && show big; let N=N+1; show $N $[1+1]
""",
    "branches": r"""
A=2; B=yes; EMPTY=
if [ $A -gt 1 ] && [ "$B" = "yes" ]; then show one; elif true; then show two; else show three; fi
if [[ $A -eq 3 || $B == y* ]]; then show pattern; fi
if [[ ! $B =~ ^n ]]; then show regex; fi
[[ -z $EMPTY ]] && R=empty || R=full; show $R
[ -n "$EMPTY" ] && R=full || R=empty; show $R
if ! false; then show not; fi
case $B in n*) show no;; y*|j*) show yes;; *) show other;; esac
case "$A" in 1) show 1;; *) show other;; esac
false || true && show chain
""",
    "loops": r"""
for x in a "b c" d; do show $x; done
for (( i = 0; i < 3; i++ )); do [ $i -eq 1 ] && continue; show $i; done
i=0; while [ $i -lt 3 ]; do i=$((i+1)); if [ $i -eq 2 ]; then break; fi; show $i; done
until [ $i -eq 0 ]; do i=$((i-1)); show $i; done
set -- --size 3 --name n
while [[ ${#} -gt 0 ]]; do case ${1} in --size) size=$2; shift;; esac; shift; done; show $size $#
""",
    "functions": r"""
f() { local x=$1; show in $x "$@" $#; return 0; show never; }
function g { f "$2"; }
f a "b c"; g 1 2; eval "show 'from eval' $((1+1))"; run="show a 'b'"; $run; eval $run
{ show group; }; ( show subshell )
""",
    "scopes": r"""
S=1; f() { local S=2 T; local -i N=3; T=4; show $S $T $N; g; show $S; }; g() { show $S; S=5; }
f; show $S ${N:-unset}
h() { local A=(x y); A+=(z); declare D=1; declare -g E=2; show ${A[@]}; }; A=(1); h; show ${A[@]} ${D:-no} $E
( S=2; show $S ); show $S; { S=3; } & wait; show $S; S=4 & wait; show $S
if true; then S=6; fi & wait; show $S; echo x | S=7; show $S
""",
    "associative arrays": r"""
declare -A M=([7b]=4096 [13b]=5120); K=13b; show ${M[7b]} ${M[$K]} ${#M[@]} ${M[nope]:-none}
declare -A E; E[a]=1; E['b']=2; E[a]+=0; show ${E[a]} ${E["b"]}; for k in a b; do show $k ${E[$k]}; done
declare -A O=([x]=1); show ${!O[@]}
A=([2]=c [0]=a d); show ${A[0]} ${A[2]} ${#A[@]}; A=(); A[5]=y; A[0]=x; show ${#A[@]} ${A[5]} ${A[@]} ${!A[@]}
A=(a b c); unset 'A[1]'; show ${A[@]}; for i in "${!A[@]}"; do show $i ${A[$i]}; done; n=A[@]; show ${!n}
""",
    "slices": r"""
A=(a "b b" c d); show ${A[@]:2}; show "${A[@]:1:2}"; show "${A[*]:1}"; show ${A[@]: -2}; B=("${A[@]:1}"); show ${#B[@]}
set -- 1 2 3 4; show ${@:2}; show ${@:2:2}; show "${@:3}"
""",
    "braces": r"""
show {a,b}c x{1..3} {01..03} a{,b} {x,{y,z}} {5..1..2} '{a,b}' {a} {a b} {c..e} ${U:-z}{1,2}
for i in {1..3}; do show $i; done; show $'\x1b[0m' $'\101' $'a\'b'
""",
    "read and printf -v": r"""
read -r A B <<EOF
x y z
EOF
show $A "$B"; read C D <<< '1 2'; show $C $D; IFS=, read -r X Y <<< 'a,b'; show $X $Y
IFS=',' read -ra P <<< 'a,b,c'; show ${P[1]} ${#P[@]}; mapfile -t L <<< $'a\nb'; show ${L[0]} ${L[1]}
read -r -d '' V <<'EOF' || true
--a 1
--b 2
EOF
show $V; printf -v N '%03d' 7; show $N
V=llama-7b; if [[ $V =~ ([[:digit:]]+)b ]]; then show ${BASH_REMATCH[1]} $BASH_REMATCH; fi
""",
    "here-documents": r"""
V=7
cat > "$OUT/f.json" <<EOF
{"stage": $V, "list": [1]}
EOF
show "$(cat $OUT/f.json)"
show "$(basename /a/b.sh .sh)" $(dirname /a/b) "$(echo x  y)" $(printf "%03d" 7) `echo old` $(expr 2 \* 3)
show $(echo "3 * 4" | bc)
""",
    "seq": """
for i in $(seq 3) $(seq 2 -2 -3) $(seq 3 1) $(seq 7 3 13); do show $i; done
show $(seq -s, 0 3) $(seq -s : 4 5) $(seq -2 0)
""",
}


def shown_here(script: str, given: dict[str, str]) -> list[list[str]]:
    reader = Interpreter(World(given, lambda _name, _line: None, None, datetime(2026, 1, 1)))
    reader.run(read_script(script))
    assert all(missing_of(word) is None or text_of(word) == "" for run in reader.state.runs for word in run.words)
    return [[text_of(word) for word in run.words[1:]] for run in reader.state.runs if run.name == "show"]


def shown_by_bash(script: str, folder: Path) -> list[list[str]]:
    shim = 'show() { printf "%s\\0" "$@" >&3; printf "\\1\\0" >&3; }; bc() { echo $(( $(cat) )); }\n'
    seen = folder / "seen"
    subprocess.run(
        ["bash", "-c", f'exec 3>"{seen}"; OUT={folder}\n{shim}{script}'],
        check=True,
        timeout=HANG_S,
        capture_output=True,
    )
    words: list[list[str]] = [[]]
    for word in seen.read_bytes().decode().split("\0")[:-1]:
        if word == "\1":
            words.append([])
        else:
            words[-1].append(word)
    return words[:-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_words_as_bash(name: str, tmp_path: Path) -> None:
    expected = shown_by_bash(SCRIPTS[name], tmp_path)
    found = [words or [""] for words in shown_here(SCRIPTS[name], {"OUT": str(tmp_path)})]
    assert found == expected


def runs_of(script: str, **given: str) -> list[str]:
    reader = Interpreter(World(given, lambda _name, _line: None, None, datetime(2026, 1, 1)))
    reader.run(read_script(script))
    return [" ".join(text_of(word) for word in run.words) for run in reader.state.runs]


def test_an_unknown_condition_is_followed_both_ways() -> None:
    script = "if grep -q x file; then A=1; else A=2; fi\nB=3\ntrain $A $B"
    reader = Interpreter(World({}, lambda _name, _line: None, None, datetime(2026, 1, 1)))
    reader.run(read_script(script))
    value = reader.state.runs[-1].words[1]
    missing = missing_of(value)
    assert missing is not None and missing.problem == (
        "$A depends on a condition in line 1 that only the job knows; give the value with --arg A=VALUE"
    )
    assert runs_of(script, A="9")[-1] == "train 9 3"


def test_a_missing_file_is_that_of_a_first_run_unless_the_script_would_end() -> None:
    assert runs_of("if [ -f latest ]; then A=again; else A=first; fi\ntrain $A") == ["train first"]
    assert runs_of('if [ ! -d "$DATA" ]; then echo none; exit 1; fi\ntrain') == ["train"]
    assert runs_of("module load x || exit 1\ntrain") == ["train"]


@pytest.mark.parametrize(
    ("script", "line", "problem"),
    [
        ('a\nA="open\nb', 2, "double quote"),
        ("a\nA='open\nb", 2, "single quote"),
        ("if true; then\n a", 1, "if opens here and never ends with fi"),
        ("for x in a; do b", 1, "for opens here and never ends with done"),
        ("a\nfi", 2, "fi stands here without its beginning"),
        ("A=(1 2", 1, "opens here and never closes"),
        ("cat <<EOF\na", 1, "never ends with EOF"),
        ("a\ntrain --a 1 \\ \n --b", 2, "space follows the backslash"),
        ("A=$((1/0))", 1, "divides by 0"),
        ("A=$((1.5*2))", 1, "whole numbers"),
        ("A=B; B=A\nC=$((A))", 2, "defined by itself"),
        ("f() { f; }\nf", 1, "calls itself"),
        ("while true; do x=1; done", 1, "may never end"),
        (
            "A=x\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 14,
            6,
            "$A makes a value of more than 10,000 parts or 1,000,000 letters",
        ),
        ("x=$(( ${y", 1, "never closes"),
        ("[[ -f a", 1, "never closes with ]]"),
    ],
)
def test_a_bad_script_is_one_sentence_with_its_line(script: str, line: int, problem: str) -> None:
    reader = Interpreter(World({}, lambda _name, _line: None, None, datetime(2026, 1, 1)))
    with pytest.raises(ScriptError) as error:
        reader.run(read_script(script))
    assert error.value.line == line and problem in error.value.problem
    assert "\n" not in error.value.problem
