#!/bin/bash
# Stands for launchers, containers, Python and programs that need a network: goes on with the shell that it is asked
# to start, else records its folder and its words in /record.
name=${0##*/}
place=0 before=
for word in "$@"; do
  place=$((place + 1))
  case $before in
    -x | -e | --env | --export)
      [[ ! $word =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || export "$word"
      ;;
    -genv | -env)
      [[ ! $word =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || export "$word=${*:place+1:1}"
      ;;
  esac
  case $word in
    *pretrain*.py) break ;;
    bash | sh | zsh | */bash | */sh) exec /bin/bash "${@:place+1}" ;;
    *.sh | *.bash) [ ! -f "$word" ] || exec /bin/bash "${@:place}" ;;
  esac
  before=$word
done
if [ "$name" = ssh ] && [[ "$*" == *.py* || "$*" == *.sh* ]]; then
  while [ $# -gt 1 ] && [[ $1 == -* ]]; do
    case $1 in -[ploiFJ]) shift ;; esac
    shift
  done
  exec /bin/bash -c "${*:2}"
fi
printf '%s\0' "$PWD" "$name" "$@" > "/record/${EPOCHREALTIME/./}.$$"
exit 0
